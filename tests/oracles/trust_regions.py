"""Reference values for trust regions on the sampler, and for what weighs groups and tokens, from the formulas alone.

Loops, gradients and notation are those of `losses.py`. pi = pi_theta(y_it), and mu = mu(y_it) is the probability under
what sampled the token; ``sampler_logps[i, t]`` is log mu, and -inf where mu = 0. r = pi / mu.

Sources, and where each formula was read:

* DPPO: arXiv 2602.04879, eqs. 13 and 14 (the masks) and section 5.4 (the truncation); read in the authors' code and in
  two others that cite these numbers, not in the paper's text.
* M2PO: arXiv 2510.01161, algorithm 1; read in the paper's picture of it.
* MaxRL: arXiv 2602.02710; read in a script of the authors and in two other codes.
* Optimal token baseline: arXiv 2602.07078; read in the documentation and the code of the authors' framework.
* RAGEN-2's filter: arXiv 2604.06268; read in the authors' code, which ranks by the std and takes 0.01 off the
  threshold, and in a sister project's, which ranks by the variance. Which one the paper's text has was not verified.
"""

import math

from torch import Tensor

from tests.oracles.losses import Result, _advantage, _kept, _loss_tokens, _sequence_mean, _zero_grad

# DPPO


def _ratio(logp: float, sampler_logp: float) -> float:
    """r = pi / mu; infinite for mu = 0."""
    return math.exp(logp - sampler_logp) if logp - sampler_logp < 700.0 else math.inf


def binary_kl(pi: float, mu: float) -> float:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), arXiv 2602.04879, eq. 14, with 0 log(0 / x) = 0.

    By hand: mu = 1/2, pi = 3/4: (log(2/3) + log 2) / 2 = log(4/3) / 2 = 0.143841. pi = 1 > mu: infinite.
    """
    total = 0.0
    for p, q in ((mu, pi), (1.0 - mu, 1.0 - pi)):
        if p > 0.0:
            total += p * math.log(p / q) if q > 0.0 else math.inf
    return total


def dppo_dropped(logp: float, sampler_logp: float, a: float, *, low: float, high: float, divergence: str) -> bool:
    """Return True if DPPO drops the token: it moved too far, in the direction that A pushes it.

    "tv", eq. 13: A > 0 and pi - mu > high, or A < 0 and pi - mu < -low.
    "kl", eq. 14: A > 0 and pi > mu and D > high, or A < 0 and pi < mu and D > low, with D = `binary_kl`.
    """
    pi, mu = math.exp(logp), math.exp(sampler_logp)
    if a == 0.0 or (pi - mu) * a <= 0.0:
        return False
    distance = abs(pi - mu) if divergence == "tv" else binary_kl(pi, mu)
    return distance > (high if a > 0.0 else low)


def dppo(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    divergence: str = "tv",
    truncate: float = 20.0,
    keep: Tensor | None = None,
) -> Result:
    """DPPO: -min(r, C) A on each token that is not dropped, 0 on the others; the mean of `losses.py`.

    C = ``truncate``. The weight is detached: the gradient is that of -sg[min(r, C)] A log pi, which is -min(r, C) A.

    By hand, tv, low = high = 0.2, A = 1, one token: mu = 0.5, pi = 0.6: kept, loss = grad = -1.2. pi = 0.8: dropped.
    mu = 0.001, pi = 0.1: r = 100, kept (0.099 < 0.2), loss = -20, grad = -20.
    """

    def term(i: int, t: int, _: list[int]) -> tuple[float, float]:
        logp, sampler_logp, a = float(logps[i, t]), float(sampler_logps[i, t]), _advantage(advantages, i, t)
        if dppo_dropped(logp, sampler_logp, a, low=low, high=high, divergence=divergence):
            return 0.0, 0.0
        r = _ratio(logp, sampler_logp)
        value = -min(r, truncate) * a * _kept(keep, i, t)
        return value, value

    return _sequence_mean(mask, term)


# M2PO


def m2po_keep(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    budget: float,
) -> Tensor:
    """Return M_it, (B, T), 1 = keep, by M2PO's algorithm 1 over all loss tokens given: the batch is one set.

    T <- the tokens with (A > 0 and r > 1) or (A < 0 and r < 1); while the mean of (log r)^2 over T is above
    ``budget``, the largest leaves T and its M is 0. The mean is over T alone, not over the batch, and over what is
    left. The first of equal ones leaves first. Masked tokens have M = 0.

    By hand, budget 0.04, A = 1, log r = (0.1, 0.2, 0.5, -3): squares of T 0.01, 0.04, 0.25, mean 0.1 > 0.04: 0.5
    leaves; mean 0.025: stop. M = (1, 1, 0, 1).
    """
    keep = _zero_grad(logps)
    left = []
    for i in range(mask.shape[0]):
        for t in _loss_tokens(mask, i):
            keep[i, t] = 1.0
            gap, a = float(logps[i, t]) - float(sampler_logps[i, t]), _advantage(advantages, i, t)
            if gap * a > 0.0:
                left.append((gap * gap, i, t))
    while left and sum(square for square, _, _ in left) / len(left) > budget:
        largest = max(left, key=lambda token: token[0])
        left.remove(largest)
        keep[largest[1], largest[2]] = 0.0
    return keep


def m2po(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    budget: float,
) -> Result:
    """M2PO: -(1 / sum_i |y_i|) sum_it M_it r_it A_it, arXiv 2510.01161, its objective. r is attached and not clipped.

    |y_i| counts dropped tokens too. The gradient is -M r A, divided likewise.
    """
    kept = m2po_keep(logps, sampler_logps, mask, advantages, budget=budget)
    tokens = sum(len(_loss_tokens(mask, i)) for i in range(mask.shape[0]))

    def term(i: int, t: int, of_row: list[int]) -> tuple[float, float]:
        if float(kept[i, t]) == 0.0:
            return 0.0, 0.0
        r = _ratio(float(logps[i, t]), float(sampler_logps[i, t]))
        share = mask.shape[0] * len(of_row) / tokens  # the mean over all tokens, not that of `losses.py`
        value = -r * _advantage(advantages, i, t) * share
        return value, value

    return _sequence_mean(mask, term)


# Advantages


def maxrl(rewards: list[float], group_size: int) -> list[float]:
    """MaxRL, arXiv 2602.02710: A = (r - mean) / mean of each consecutive group; 0 where the mean is 0.

    For rewards of 0 or more. By hand: (1, 0, 0, 0): mean 1/4, A = (3, -1, -1, -1). (1, 1): (0, 0). (0, 0): (0, 0).
    """
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = math.fsum(group) / len(group)
        advantages += [0.0 if mean == 0.0 else (r - mean) / mean for r in group]
    return advantages


def token_baseline(
    rewards: list[float],
    logps: Tensor,
    square_sums: Tensor,
    mask: Tensor,
    group_size: int,
) -> list[list[float]]:
    """Optimal token baseline, arXiv 2602.07078: A_it = G_i - B_t for each loss token of each row, in order.

    W_it = sum_{j <= t} (1 - 2 pi_ij + sum_v pi_ij(v)^2),  B_t = sum_i G_i W_it / sum_i W_it

    t counts a row's loss tokens; the sums over i are over the group's rows with a loss token t. ``square_sums[i, t]``
    is sum_v pi_it(v)^2. G_i = ``rewards[i]``: one reward at the end. B_t is the mean of G_i where all W_it are 0.
    A row that is the only one with a token t has B_t = G_i there, so A_it = 0.

    By hand, G = (1, 0), pi = 1/2 throughout. Sums of squares (1/2, 1/2) and (1): W = (1/2, 1), (1).
    B_1 = (1/2) / (3/2) = 1/3, B_2 = 1: A = (2/3, 0), (-1/3).
    """
    advantages = []
    for start in range(0, len(rewards), group_size):
        rows = range(start, start + group_size)
        energies = {}
        for i in rows:
            total, energies[i] = 0.0, []
            for j in _loss_tokens(mask, i):
                total += 1.0 - 2.0 * math.exp(float(logps[i, j])) + float(square_sums[i, j])
                energies[i].append(total)
        for i in rows:
            advantages.append([])
            for t in range(len(energies[i])):
                running = [(rewards[k], energies[k][t]) for k in rows if t < len(energies[k])]
                weight = math.fsum(w for _, w in running)
                if weight == 0.0:
                    running = [(g, 1.0) for g, _ in running]
                    weight = float(len(running))
                advantages[-1].append(rewards[i] - math.fsum(g * w for g, w in running) / weight)
    return advantages


# Groups


def variance_filter(rewards: list[float], group_size: int, share: float = 0.9) -> list[bool]:
    """Return for each consecutive group if RAGEN-2's filter keeps it, arXiv 2604.06268.

    Groups come in by falling variance (n in the denominator) until ``share`` of the summed variance is reached; the
    first of equal ones comes first. A group without variance never comes in.

    By hand, pairs of variances 1, 1/4, 0, 1/16: sum 1.3125, 90 % of it 1.18125. 1 < 1.18125 <= 1.25: groups 1 and 2.
    """
    variances = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = math.fsum(group) / len(group)
        variances.append(math.fsum((r - mean) ** 2 for r in group) / len(group))
    keep = [False] * len(variances)
    reached = 0.0
    for k in sorted(range(len(variances)), key=lambda k: -variances[k]):
        if variances[k] <= 0.0 or reached >= share * math.fsum(variances):
            break
        keep[k] = True
        reached += variances[k]
    return keep
