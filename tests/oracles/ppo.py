"""Reference values for PPO with a critic on token sequences, written from the papers' formulas alone.

The code loops over completions ``i`` and tokens ``t`` on Python floats (IEEE float64). A table is (B, T), a list of
lists or a float64 tensor. ``mask[i][t]`` is True for an action token: a token that the policy has sampled. Tool output
between two action tokens is part of the state of the second one, so each function works on the list of the action
tokens and returns 0 at all other tokens. Numbers at other tokens are never read. They may be NaN.

Papers: GAE, arXiv 1506.02438. PPO, arXiv 1707.06347, and `ppo2/model.py` of OpenAI baselines. Fine-tuning language
models from human preferences, arXiv 1909.08593, and its code. InstructGPT, arXiv 2203.02155. VAPO, arXiv 2504.05118.
"""

import math
from collections.abc import Sequence
from typing import Any

Row = Sequence[Any]
"""One number per token, step or completion: a list or a tensor."""
Table = Sequence[Row]
"""(B, T) or (B, S)."""


def _actions(row: Row) -> list[int]:
    return [t for t in range(len(row)) if bool(row[t])]


def _zeros(mask: Table) -> list[list[float]]:
    return [[0.0] * len(row) for row in mask]


def gae(
    rewards: Table, values: Table, mask: Table, gamma: float, lam: float | Row, bootstrap: Row | None = None
) -> list[list[float]]:
    """Return the generalized advantage estimate, arXiv 1506.02438, eq. 11-16.

    delta_k = r_k + gamma V_{k+1} - V_k                                   (eq. 11)
    A_k     = sum_{l >= 0} (gamma lambda)^l delta_{k+l}                   (eq. 16)
            = delta_k + gamma lambda A_{k+1}

    k counts the action tokens of one completion: 0, ..., n - 1. V_n is ``bootstrap[i]``: the value of the state after
    the last action token if the completion was truncated, and 0 if the episode ended. A_n = 0. ``lam`` is one number,
    or one per completion.

    """
    advantages = _zeros(mask)
    for i in range(len(mask)):
        tokens = _actions(mask[i])
        r = [float(rewards[i][t]) for t in tokens]
        v = [float(values[i][t]) for t in tokens]
        v.append(0.0 if bootstrap is None else float(bootstrap[i]))
        lambda_i = float(lam) if isinstance(lam, int | float) else float(lam[i])
        later = 0.0
        for k in reversed(range(len(tokens))):
            delta = r[k] + gamma * v[k + 1] - v[k]
            later = delta + gamma * lambda_i * later
            advantages[i][tokens[k]] = later
    return advantages


def token_rewards(
    ends: Table, step_rewards: Table, old_logps: Table, ref_logps: Table | None, mask: Table, kl_coef: float
) -> list[list[float]]:
    """Return the reward of each action token: the KL penalty, and the rewards of the steps.

    R(x, y) = r(x, y) - beta log( pi(y | x) / rho(y | x) )

    This is arXiv 1909.08593, eq. 2. The log-probability of y is the sum over its tokens. Each action token therefore
    gets its own part of the penalty, -beta (log pi_old - log rho): see arXiv 2203.02155, section 3.5. The score r
    arrives at the end.

    ``ends`` and ``step_rewards`` are (B, S). Step j scores the tokens before ``ends[i][j]``. Its reward arrives at the
    last action token with an index below this end. A reward of NaN means that there is no such step. A step before
    whose end there is no action token changes nothing. Without ``ref_logps`` there is no penalty.

    """
    rewards = _zeros(mask)
    for i in range(len(mask)):
        tokens = _actions(mask[i])
        if ref_logps is not None:
            for t in tokens:
                rewards[i][t] -= kl_coef * (float(old_logps[i][t]) - float(ref_logps[i][t]))
        for j in range(len(ends[i])):
            before = [t for t in tokens if t < int(ends[i][j])]
            if before and not math.isnan(float(step_rewards[i][j])):
                rewards[i][before[-1]] += float(step_rewards[i][j])
    return rewards


def adaptive_kl(coef: float, kl: float, target: float, horizon: float, answers: int) -> float:
    """Return the next KL coefficient, arXiv 1909.08593, section 2.2.

    e      = clip( (KL - KL_target) / KL_target, -0.2, 0.2 )
    beta'  = beta (1 + K e)

    The paper's K is 0.1 for one batch. Its code divides the number of answers of the batch by a horizon:
    K = answers / horizon.

    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * answers / horizon)


def whiten(values: Table, mask: Table, shift_mean: bool = True) -> list[list[float]]:
    """Return (x - mean) / sqrt(var + 1e-8) of the action tokens of the whole batch.

    Source: the code of arXiv 1909.08593, where the papers say nothing. The variance has n - 1 in its
    denominator, and 1 for a single token. Without ``shift_mean``, the mean is added back, so that only the scale
    changes.

    """
    numbers = [float(values[i][t]) for i in range(len(mask)) for t in _actions(mask[i])]
    whitened = _zeros(mask)
    if not numbers:
        return whitened
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1)
    for i in range(len(mask)):
        for t in _actions(mask[i]):
            whitened[i][t] = (float(values[i][t]) - mean) / math.sqrt(variance + 1e-8)
            if not shift_mean:
                whitened[i][t] += mean
    return whitened


def value_loss(
    values: Table, old_values: Table, returns: Table, mask: Table, cliprange: float | None
) -> list[list[float]]:
    """Return the value loss of each token, OpenAI baselines, `ppo2/model.py`, and the code of arXiv 1909.08593.

    L_t = 1/2 max( (V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2 )

    Without ``cliprange``, L_t = 1/2 (V - R)^2.

    """
    losses = _zeros(mask)
    for i in range(len(mask)):
        for t in _actions(mask[i]):
            v, target = float(values[i][t]), float(returns[i][t])
            losses[i][t] = 0.5 * (v - target) ** 2
            if cliprange is not None:
                old = float(old_values[i][t])
                clipped = min(max(v, old - cliprange), old + cliprange)
                losses[i][t] = 0.5 * max((v - target) ** 2, (clipped - target) ** 2)
    return losses


def ppo_targets(
    ends: Table,
    step_rewards: Table,
    old_logps: Table,
    ref_logps: Table | None,
    values: Table,
    mask: Table,
    bootstrap: Row | None = None,
    *,
    gamma: float,
    lam: float,
    value_lam: float,
    kl_coef: float,
    whiten_rewards: bool = False,
    whiten_advantages: bool = True,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the advantages and the returns of a rollout.

    Returns are `gae` with ``value_lam``, plus the values (arXiv 2504.05118, section 4.1: decoupled GAE). They are not
    whitened.

    """
    rewards = token_rewards(ends, step_rewards, old_logps, ref_logps, mask, kl_coef)
    if whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)

    advantages = gae(rewards, values, mask, gamma, lam, bootstrap)
    returns = gae(rewards, values, mask, gamma, value_lam, bootstrap)
    for i in range(len(mask)):
        for t in _actions(mask[i]):
            returns[i][t] += float(values[i][t])

    if whiten_advantages:
        advantages = whiten(advantages, mask)
    return advantages, returns
