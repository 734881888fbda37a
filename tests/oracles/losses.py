"""Reference values for the policy losses, written from the papers alone.

Everything is an explicit Python loop over sequences ``i`` and tokens ``t`` on Python floats (IEEE float64), so that
each line can be read against its formula. Gradients are closed forms; autograd is never used.

Notation, common to every function:

* ``logps[i, t]``, ``old_logps[i, t]``, ``ref_logps[i, t]``: log pi_theta(y_it), log pi_old(y_it), log pi_ref(y_it).
* ``mask[i, t]`` (bool): True for a token of the answer that takes part in the loss; ``|y_i|`` counts these only. What
  lies at a masked-out position is never read, so it may be NaN.
* ``G``: the number of sequences (rows) given. A row without a loss token adds 0 to every sum and still counts in G.
* ``keep``: a mask on the policy term, (B, T), or (B,) for whole sequences. It multiplies each summand, M_it; G and
  |y_i| count what is dropped (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
* ``Result.loss`` is the quantity to minimise (-J for the objectives J of the papers, the mean itself for a KL term);
  ``Result.grad[i, t]`` is d loss / d log pi_theta(y_it).

Papers: GSPO, arXiv 2507.18071; GRPO, arXiv 2402.03300; DeepSeek-V3.2, arXiv 2512.02556.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """A loss and its gradient with respect to the token log-probs: (B, T), float64, on the CPU, 0 where masked."""

    loss: float
    grad: Tensor


# Pieces


def _loss_tokens(mask: Tensor, i: int) -> list[int]:
    """The positions t of sequence i that take part in the loss; |y_i| is the length of this list."""
    return [t for t in range(mask.shape[1]) if bool(mask[i, t])]


def _zero_grad(logps: Tensor) -> Tensor:
    return torch.zeros(logps.shape[0], logps.shape[1], dtype=torch.float64)


def _advantage(advantages: Tensor, i: int, t: int) -> float:
    """A_it: ``advantages[i, t]`` of a (B, T) tensor, or A_i = ``advantages[i]`` of a (B,) one."""
    if advantages.dim() == 1:
        return float(advantages[i])
    return float(advantages[i, t])


def _token_ratio(logps: Tensor, old_logps: Tensor, i: int, t: int) -> float:
    """r_it = pi_theta(y_it) / pi_old(y_it)   (arXiv 2402.03300, eq. 3)."""
    return math.exp(float(logps[i, t]) - float(old_logps[i, t]))


def _sequence_ratio(logps: Tensor, old_logps: Tensor, i: int, tokens: list[int]) -> float:
    """s_i = exp( (1/|y_i|) sum_t log( pi_theta(y_it) / pi_old(y_it) ) )   (arXiv 2507.18071, definition of s_i)."""
    total = 0.0
    for t in tokens:
        total += float(logps[i, t]) - float(old_logps[i, t])
    return math.exp(total / len(tokens))


def _kept(keep: Tensor | None, i: int, t: int) -> float:
    """M_it of a mask on the policy term, 1 = keep, ``keep[i, t]``, or M_i = ``keep[i]`` of a (B,) one; 1 without."""
    return 1.0 if keep is None else _advantage(keep, i, t)


def _sequence_mean(mask: Tensor, term: Callable[[int, int, list[int]], tuple[float, float]]) -> Result:
    """(1/G) sum_i (1/|y_i|) sum_t x_it, with the x_it and the d x_it / d log pi_theta(y_it) that ``term`` returns.

    ``term`` gets i, t and the list of the loss tokens of sequence i.
    """
    g = mask.shape[0]
    grad = _zero_grad(mask)
    loss = 0.0
    for i in range(g):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            value, slope = term(i, t, tokens)
            loss += value / (g * len(tokens))
            grad[i, t] = slope / (g * len(tokens))
    return Result(loss=loss, grad=grad)


def _surrogate(w: float, a: float, eps_low: float, eps_high: float, delta: float | None) -> tuple[float, float]:
    """min( w A, clip(w, 1 - eps_low, 1 + eps_high) A ) and its derivative with respect to log w.

    With ``delta``, w A in the unclipped branch becomes min(w, delta) A, which is constant where w > delta.
    d(w A) / d log w = w A. A branch held at a bound has derivative 0. Equal branches: the unclipped one's.
    """
    bounded = w if delta is None else min(w, delta)
    clipped = min(max(w, 1.0 - eps_low), 1.0 + eps_high)
    active = bounded if bounded * a <= clipped * a else clipped
    return active * a, w * a if active == w else 0.0


# Policy losses


def _clipped(
    ratio: Callable[[int, int, list[int]], float],
    mask: Tensor,
    advantages: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    delta: float | None = None,
    keep: Tensor | None = None,
) -> Result:
    """-(1/G) sum_i (1/|y_i|) sum_t M_it min( w_it A_it, clip(w_it, 1 - eps_low, 1 + eps_high) A_it ).

    ``advantages`` is (B,) or (B, T). With d log w_it / d log pi_theta(y_it) = 1 through that token alone, the gradient
    is -w_it A_it / (G |y_i|) where the unclipped branch is active, else 0.
    """

    def term(i: int, t: int, tokens: list[int]) -> tuple[float, float]:
        value, slope = _surrogate(ratio(i, t, tokens), _advantage(advantages, i, t), eps_low, eps_high, delta)
        return -value * _kept(keep, i, t), -slope * _kept(keep, i, t)

    return _sequence_mean(mask, term)


def gspo(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Result:
    """GSPO, arXiv 2507.18071, the sequence-level objective. ``advantages`` is (B,).

    J    = (1/G) sum_i min( s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i )
    loss = -J

    A summand is the mean over t of itself. d log s_i / d log pi_theta(y_it) = 1/|y_i|, so
    d loss / d log pi_theta(y_it) = -s_i A_i / (G |y_i|) where the unclipped branch is active: `_clipped` with w = s_i.
    """
    assert advantages.dim() == 1
    return gspo_token(logps, old_logps, mask, advantages, **options)


def gspo_token(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Result:
    """GSPO-token, arXiv 2507.18071, section 4.3: `_clipped` with s_it.

    s_it = sg[s_i] * pi_theta(y_it) / sg[pi_theta(y_it)], so the value of s_it is s_i at every token.
    """
    ratio = lambda i, t, tokens: _sequence_ratio(logps, old_logps, i, tokens)
    return _clipped(ratio, mask, advantages, **options)


def grpo_token(logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Result:
    """GRPO with the sequence-mean reduction, arXiv 2402.03300, eq. 3 without KL: `_clipped` with r_it."""
    return _clipped(lambda i, t, _: _token_ratio(logps, old_logps, i, t), mask, advantages, **options)


# KL terms


def corrected_k3(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Result:
    """The KL estimate corrected by the importance ratio, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    kl_it = (pi_theta / pi_old) * ( pi_ref / pi_theta - log(pi_ref / pi_theta) - 1 ), all at y_it
    loss  = (1/G) sum_i (1/|y_i|) sum_t kl_it

    The ratio is per token, not detached and not clipped. (pi_theta/pi_old)(pi_ref/pi_theta) = pi_ref/pi_old does not
    depend on theta, so
    d loss / d log pi_theta(y_it) = (pi_theta / pi_old) * log(pi_theta / pi_ref) / (G |y_i|).
    """

    def term(i: int, t: int, _: list[int]) -> tuple[float, float]:
        ratio = _token_ratio(logps, old_logps, i, t)
        log_ref_over_theta = float(ref_logps[i, t]) - float(logps[i, t])
        kl_it = ratio * (math.exp(log_ref_over_theta) - log_ref_over_theta - 1.0)
        return kl_it, ratio * -log_ref_over_theta

    return _sequence_mean(mask, term)


# Clip statistics: (low, high, either)
#
# Low: A < 0 and ratio < 1 - eps_low. High: A > 0 and ratio > 1 + eps_high. The bound delta is no part of them.


def gspo_token_clip_shares(
    logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[float, float, float]:
    """Share of all loss tokens whose s_it (= s_i in value) is clipped (low, high, either); zeros if there is none."""
    low = high = count = 0
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            s_i, a = _sequence_ratio(logps, old_logps, i, tokens), _advantage(advantages, i, t)
            count += 1
            low += a < 0.0 and s_i < 1.0 - eps_low
            high += a > 0.0 and s_i > 1.0 + eps_high
    return low / max(count, 1), high / max(count, 1), (low + high) / max(count, 1)
