"""Reference values for KL terms and masks that correct for an off-policy sampler, written from the formulas alone.

Loops, floats and gradients are as in `losses.py`. Notation, on top of its own:

* ``old_logps[i, t]``: log pi_old(y_it), the policy at rollout as the trainer scores it.
* ``sampler_logps[i, t]``: log mu(y_it), the engine that sampled y_it. NaN where the engine could not score the token.
* ``denominator_logps[i, t]``: log pi_den(y_it), either of the two (see `sampler_or_old`); never NaN at a loss token.
* ``sampling_logps[i, t]``: log pi_sampling(y_it), either of the two; NaN is allowed.
* r_it = pi_ref(y_it) / pi_theta(y_it), and rho_it = pi_theta(y_it) / pi_den(y_it).
* k1_it = -log r_it, k2_it = (log r_it)^2 / 2, k3_it = r_it - log r_it - 1. With l_it = log pi_theta(y_it):
  d k1_it / d l_it = 1, d k2_it / d l_it = -log r_it, d k3_it / d l_it = 1 - r_it, d rho_it / d l_it = rho_it.
* Masks are ``keep`` of `losses.py`: 1.0 for a token that stays in the policy loss, 0.0 for one that is dropped.

A row without a loss token is kept by every mask. A value within rounding of its threshold may fall on either side.

Paper: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.oracles import losses as oracles
from tests.oracles.losses import Result, _advantage, _loss_tokens, _sequence_mean, _token_ratio

# KL terms


def sampler_or_old(sampler_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log pi_den with mu as the denominator, and pi_old at a loss token that has no mu: (B, T), NaN where masked."""
    denominator = torch.full((mask.shape[0], mask.shape[1]), math.nan, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in _loss_tokens(mask, i):
            log_mu = float(sampler_logps[i, t])
            denominator[i, t] = float(old_logps[i, t]) if math.isnan(log_mu) else log_mu
    return denominator


def plain_k2(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Result:
    """The k2 estimate, by sequence mean.

    loss = (1/G) sum_i (1/|y_i|) sum_t (log r_it)^2 / 2

    d loss / d log pi_theta(y_it) = -log r_it / (G |y_i|).
    """

    def term(i: int, t: int, _: list[int]) -> tuple[float, float]:
        log_r = float(ref_logps[i, t]) - float(logps[i, t])
        return log_r**2 / 2.0, -log_r

    return _sequence_mean(mask, term)


def _corrected(
    logps: Tensor,
    denominator_logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor,
    of_k1: Callable[[float], tuple[float, float]],
) -> Result:
    """(1/G) sum_i (1/|y_i|) sum_t rho_it x_it, with x_it and its slope over rho_it from k1_it."""

    def term(i: int, t: int, _: list[int]) -> tuple[float, float]:
        rho = _token_ratio(logps, denominator_logps, i, t)
        value, slope = of_k1(float(logps[i, t]) - float(ref_logps[i, t]))
        return rho * value, rho * slope

    return _sequence_mean(mask, term)


def corrected_k1(*batch: Tensor) -> Result:
    """The k1 estimate times the importance ratio, which is per token, not detached and not clipped.

    d loss / d log pi_theta(y_it) = rho_it (k1_it + 1) / (G |y_i|), by the product rule.
    """
    return _corrected(*batch, lambda k1: (k1, k1 + 1.0))


def corrected_k2(*batch: Tensor) -> Result:
    """The k2 estimate times the importance ratio, which is per token, not clipped, and a constant.

    d loss / d log pi_theta(y_it) = rho_it k1_it / (G |y_i|), that of `corrected_k3`.
    """
    return _corrected(*batch, lambda k1: (k1**2 / 2.0, k1))


corrected_k3 = oracles.corrected_k3


def by_row(term: Callable[..., Result], factors: list[float], *batch: Tensor) -> Result:
    """A KL term with a strength for each row: (1/G) sum_i f_i kl_i, where kl_i is the term of row i alone."""
    g = len(factors)
    rows = [term(*(values[i : i + 1] for values in batch)) for i in range(g)]
    loss = sum(factor * row.loss for factor, row in zip(factors, rows, strict=True)) / g
    return Result(loss, torch.cat([factor / g * row.grad for factor, row in zip(factors, rows, strict=True)]))


# Masks: (B, T), float64, 1.0 = keep, 0.0 = drop, 1.0 at masked-out positions


def _mean_log_off_policy_ratio(logps: Tensor, sampling_logps: Tensor, i: int, tokens: list[int]) -> float:
    """(1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ); an unscored token adds 0 and counts in |y_i|."""
    total = 0.0
    for t in tokens:
        if math.isnan(float(sampling_logps[i, t])):
            continue
        total += float(sampling_logps[i, t]) - float(logps[i, t])
    return total / len(tokens)


def _keep_all(mask: Tensor) -> Tensor:
    return torch.ones(mask.shape[0], mask.shape[1], dtype=torch.float64)


def off_policy_statistic(logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> list[float]:
    """The mean log off-policy ratio of every row that has a loss token, in row order."""
    rows_of_tokens = [(i, _loss_tokens(mask, i)) for i in range(logps.shape[0])]
    return [_mean_log_off_policy_ratio(logps, sampling_logps, i, tokens) for i, tokens in rows_of_tokens if tokens]


def off_policy_sequence(
    advantages: Tensor, logps: Tensor, sampling_logps: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Off-policy sequence masking, arXiv 2512.02556, section 3.1. ``advantages`` is (B,) or (B, T).

    M_it = 0 if A_i < 0 and (1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ) > delta, else 1

    A_i of (B, T) advantages is their mean over the loss tokens of sequence i.
    """
    means = []
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        means.append(sum(_advantage(advantages, i, t) for t in tokens) / max(len(tokens), 1))
    return off_policy_token(torch.tensor(means), logps, sampling_logps, mask, delta)


def off_policy_token(advantages: Tensor, logps: Tensor, sampling_logps: Tensor, mask: Tensor, delta: float) -> Tensor:
    """`off_policy_sequence` with the sign of each token's own advantage. ``advantages`` is (B,) or (B, T).

    M_it = 0 if A_it < 0 and (1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ) > delta, else 1
    """
    keep = _keep_all(mask)
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            statistic = _mean_log_off_policy_ratio(logps, sampling_logps, i, tokens)
            if _advantage(advantages, i, t) < 0.0 and statistic > delta:
                keep[i, t] = 0.0
    return keep


def geometric(old_logps: Tensor, sampler_logps: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Keep sequence i iff low <= exp( (1/|y_i|) sum_t log( pi_old(y_it) / mu(y_it) ) ) <= high.

    An unscored token adds 0 to the sum and counts in |y_i|.
    """
    keep = _keep_all(mask)
    for i in range(old_logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        # pi_old / mu is the inverse of the off-policy ratio
        if tokens and not low <= math.exp(-_mean_log_off_policy_ratio(old_logps, sampler_logps, i, tokens)) <= high:
            keep[i, tokens] = 0.0
    return keep


def veto(old_logps: Tensor, sampler_logps: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Drop sequence i iff pi_old(y_it) / mu(y_it) < threshold at any of its loss tokens.

    An unscored token is no evidence: it never drops its sequence.
    """
    keep = _keep_all(mask)
    for i in range(old_logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        if any(_token_ratio(old_logps, sampler_logps, i, t) < threshold for t in tokens):  # NaN is not
            keep[i, tokens] = 0.0
    return keep


def rows(keep: Tensor, mask: Tensor) -> Tensor:
    """The (B,) form of a mask that keeps or drops whole sequences; 1.0 for a row without a loss token."""
    per_row = [min([float(keep[i, t]) for t in _loss_tokens(mask, i)], default=1.0) for i in range(mask.shape[0])]
    return torch.tensor(per_row, dtype=torch.float64)


# Mismatch between pi_old and mu, over all loss tokens of all rows; w = pi_old(y_it) / mu(y_it)
#
# A token that mu could not score (NaN) is left out, so n counts the others.


def mismatch_log_ratios(old_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> list[float]:
    """log w of every scored loss token, row by row."""
    pairs = [(old_logps[i, t], sampler_logps[i, t]) for i in range(mask.shape[0]) for t in _loss_tokens(mask, i)]
    return [float(old) - float(sampler) for old, sampler in pairs if not math.isnan(float(sampler))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mismatch_mean_log_ratio(*batch: Tensor) -> float:
    """(1/n) sum log w."""
    return _mean(mismatch_log_ratios(*batch))


def mismatch_k3(*batch: Tensor) -> float:
    """(1/n) sum (w - 1 - log w), an estimate of KL(mu || pi_old) on tokens sampled from mu."""
    return _mean([math.exp(log_w) - 1.0 - log_w for log_w in mismatch_log_ratios(*batch)])


def mismatch_shares(*batch: Tensor) -> tuple[float, float]:
    """Shares of the n tokens with w > 2 and with w < 1/2."""
    ratios = [math.exp(log_w) for log_w in mismatch_log_ratios(*batch)]
    return _mean([float(w > 2.0) for w in ratios]), _mean([float(w < 0.5) for w in ratios])


def mismatch_effective_sample_size(*batch: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), as a share: 1 where all w are equal, 1/n where one token has all the weight."""
    ratios = [math.exp(log_w) for log_w in mismatch_log_ratios(*batch)]
    return sum(ratios) ** 2 / (len(ratios) * sum(w * w for w in ratios))


def quantile(values: list[float], q: float) -> float:
    """v_k of the sorted values v_1 <= ... <= v_n, with the smallest k such that k/n >= q (0 <= q <= 1)."""
    k = 1
    while k / len(values) < q:
        k += 1
    return sorted(values)[k - 1]
