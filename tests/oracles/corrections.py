"""Reference values for KL terms and masks that correct for an off-policy sampler, written from the formulas alone.

Everything is an explicit Python loop over sequences ``i`` and tokens ``t`` on Python floats (IEEE float64), so that
each line can be read against its formula. Gradients are closed forms; autograd is never used.

Notation, on top of that of `losses.py` (``logps``, ``ref_logps``, ``mask``, ``G``, ``|y_i|``, ``Result``):

* ``old_logps[i, t]``: log pi_old(y_it), the policy at rollout as the trainer scores it.
* ``sampler_logps[i, t]``: log mu(y_it), the engine that sampled y_it. NaN where the engine could not score the token.
* ``denominator_logps[i, t]``: log pi_den(y_it), either of the two (see `sampler_or_old`); never NaN at a loss token.
* ``sampling_logps[i, t]``: log pi_sampling(y_it), either of the two; NaN is allowed.
* r_it = pi_ref(y_it) / pi_theta(y_it), and rho_it = pi_theta(y_it) / pi_den(y_it).
* k1_it = -log r_it, k2_it = (log r_it)^2 / 2, k3_it = r_it - log r_it - 1. With l_it = log pi_theta(y_it):
  d k1_it / d l_it = 1, d k2_it / d l_it = -log r_it, d k3_it / d l_it = 1 - r_it, d rho_it / d l_it = rho_it.
* Masks are ``keep`` of `losses.py`: 1.0 for a token that stays in the policy loss, 0.0 for one that is dropped.

What lies at a masked-out position is never read, so it may be NaN. A row without a loss token adds 0 to every sum,
still counts in G, and is kept by every mask.

Thresholds are compared as they stand, so a value within rounding of its threshold may fall on either side.

Papers:

* DeepSeek-V3.2: arXiv 2512.02556, section 3.1 (KL estimate corrected by the importance ratio; off-policy masking).
* GSPO: arXiv 2507.18071. GRPO: arXiv 2402.03300.
"""

import math

import torch

from tests.oracles import losses as oracles
from tests.oracles.losses import Result, _advantage, _loss_tokens, _token_ratio, _zero_grad

# --------------------------------------------------------------------------------------------------------------------
# KL terms
# --------------------------------------------------------------------------------------------------------------------


def sampler_or_old(sampler_logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi_den with mu as the denominator, and pi_old at a loss token that has no mu: (B, T), NaN where masked."""
    denominator = torch.full((mask.shape[0], mask.shape[1]), math.nan, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in _loss_tokens(mask, i):
            log_mu = float(sampler_logps[i, t])
            denominator[i, t] = float(old_logps[i, t]) if math.isnan(log_mu) else log_mu
    return denominator


def plain_k2(logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> Result:
    """The k2 estimate, by sequence mean.

    loss = (1/G) sum_i (1/|y_i|) sum_t (log r_it)^2 / 2

    d loss / d log pi_theta(y_it) = -log r_it / (G |y_i|).
    """
    g = logps.shape[0]
    grad = _zero_grad(logps)
    loss = 0.0
    for i in range(g):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            log_r = float(ref_logps[i, t]) - float(logps[i, t])
            loss += log_r**2 / 2.0 / (g * len(tokens))
            grad[i, t] = -log_r / (g * len(tokens))
    return Result(loss=loss, grad=grad)


def corrected_k1(
    logps: torch.Tensor, denominator_logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor
) -> Result:
    """The k1 estimate times the importance ratio, which is per token, not detached and not clipped.

    loss = (1/G) sum_i (1/|y_i|) sum_t rho_it k1_it

    d loss / d log pi_theta(y_it) = rho_it (k1_it + 1) / (G |y_i|), by the product rule.
    """
    g = logps.shape[0]
    grad = _zero_grad(logps)
    loss = 0.0
    for i in range(g):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            rho = _token_ratio(logps, denominator_logps, i, t)
            k1 = float(logps[i, t]) - float(ref_logps[i, t])
            loss += rho * k1 / (g * len(tokens))
            grad[i, t] = rho * (k1 + 1.0) / (g * len(tokens))
    return Result(loss=loss, grad=grad)


def corrected_k2(
    logps: torch.Tensor, denominator_logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor
) -> Result:
    """The k2 estimate times the importance ratio, which is per token, not clipped, and a constant (sg: stop-gradient).

    loss = (1/G) sum_i (1/|y_i|) sum_t sg[rho_it] k2_it

    d loss / d log pi_theta(y_it) = rho_it k1_it / (G |y_i|), that of `corrected_k3`.
    """
    g = logps.shape[0]
    grad = _zero_grad(logps)
    loss = 0.0
    for i in range(g):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            rho = _token_ratio(logps, denominator_logps, i, t)
            k1 = float(logps[i, t]) - float(ref_logps[i, t])
            loss += rho * (k1**2 / 2.0) / (g * len(tokens))
            grad[i, t] = rho * k1 / (g * len(tokens))
    return Result(loss=loss, grad=grad)


def corrected_k3(
    logps: torch.Tensor, denominator_logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor
) -> Result:
    """The k3 estimate times the importance ratio, arXiv 2512.02556, section 3.1: per token, not detached, not clipped.

    loss = (1/G) sum_i (1/|y_i|) sum_t rho_it k3_it

    d loss / d log pi_theta(y_it) = rho_it (k3_it + 1 - r_it) / (G |y_i|) = rho_it k1_it / (G |y_i|).
    """
    return oracles.corrected_k3(logps, denominator_logps, ref_logps, mask)


# --------------------------------------------------------------------------------------------------------------------
# Masks: (B, T), float64, 1.0 = keep, 0.0 = drop, 1.0 at masked-out positions
# --------------------------------------------------------------------------------------------------------------------


def _mean_log_off_policy_ratio(logps: torch.Tensor, sampling_logps: torch.Tensor, i: int, tokens: list[int]) -> float:
    """(1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ); an unscored token adds 0 and counts in |y_i|."""
    total = 0.0
    for t in tokens:
        if math.isnan(float(sampling_logps[i, t])):
            continue
        total += float(sampling_logps[i, t]) - float(logps[i, t])
    return total / len(tokens)


def _keep_all(mask: torch.Tensor) -> torch.Tensor:
    return torch.ones(mask.shape[0], mask.shape[1], dtype=torch.float64)


def off_policy_statistic(logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """(1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ) of every row that has a loss token, in row order."""
    statistics = []
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        if len(tokens) == 0:
            continue
        statistics.append(_mean_log_off_policy_ratio(logps, sampling_logps, i, tokens))
    return statistics


def off_policy_sequence(
    advantages: torch.Tensor,
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    delta: float,
) -> torch.Tensor:
    """Off-policy sequence masking, arXiv 2512.02556, section 3.1. ``advantages`` is (B,) or (B, T).

    M_it = 0 if A_i < 0 and (1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ) > delta, else 1

    A_i of (B, T) advantages is their mean over the loss tokens of sequence i.
    """
    keep = _keep_all(mask)
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        if len(tokens) == 0:
            continue
        if advantages.dim() == 1:
            a_i = float(advantages[i])
        else:
            total = 0.0
            for t in tokens:
                total += float(advantages[i, t])
            a_i = total / len(tokens)
        if a_i < 0.0 and _mean_log_off_policy_ratio(logps, sampling_logps, i, tokens) > delta:
            for t in tokens:
                keep[i, t] = 0.0
    return keep


def off_policy_token(
    advantages: torch.Tensor,
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    mask: torch.Tensor,
    delta: float,
) -> torch.Tensor:
    """`off_policy_sequence` with the sign of each token's own advantage. ``advantages`` is (B,) or (B, T).

    M_it = 0 if A_it < 0 and (1/|y_i|) sum_t log( pi_sampling(y_it) / pi_theta(y_it) ) > delta, else 1

    With (B,) advantages A_it = A_i, and this is `off_policy_sequence`.
    """
    keep = _keep_all(mask)
    for i in range(logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        if len(tokens) == 0:
            continue
        statistic = _mean_log_off_policy_ratio(logps, sampling_logps, i, tokens)
        for t in tokens:
            if _advantage(advantages, i, t) < 0.0 and statistic > delta:
                keep[i, t] = 0.0
    return keep


def geometric(
    old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Keep sequence i iff low <= exp( (1/|y_i|) sum_t log( pi_old(y_it) / mu(y_it) ) ) <= high.

    An unscored token adds 0 to the sum and counts in |y_i|.
    """
    keep = _keep_all(mask)
    for i in range(old_logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        if len(tokens) == 0:
            continue
        total = 0.0
        for t in tokens:
            if math.isnan(float(sampler_logps[i, t])):
                continue
            total += float(old_logps[i, t]) - float(sampler_logps[i, t])
        geometric_mean = math.exp(total / len(tokens))
        if not low <= geometric_mean <= high:
            for t in tokens:
                keep[i, t] = 0.0
    return keep


def veto(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drop sequence i iff pi_old(y_it) / mu(y_it) < threshold at any of its loss tokens.

    An unscored token is no evidence: it never drops its sequence.
    """
    keep = _keep_all(mask)
    for i in range(old_logps.shape[0]):
        tokens = _loss_tokens(mask, i)
        vetoed = False
        for t in tokens:
            if math.isnan(float(sampler_logps[i, t])):
                continue
            if _token_ratio(old_logps, sampler_logps, i, t) < threshold:
                vetoed = True
        if vetoed:
            for t in tokens:
                keep[i, t] = 0.0
    return keep


def rows(keep: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The (B,) form of a mask that keeps or drops whole sequences; 1.0 for a row without a loss token."""
    per_row = torch.ones(mask.shape[0], dtype=torch.float64)
    for i in range(mask.shape[0]):
        tokens = _loss_tokens(mask, i)
        for t in tokens:
            if float(keep[i, t]) != float(keep[i, tokens[0]]):
                raise ValueError(f"row {i} is neither kept nor dropped as a whole")
            per_row[i] = float(keep[i, t])
    return per_row


# --------------------------------------------------------------------------------------------------------------------
# Mismatch between pi_old and mu, over all loss tokens of all rows; w = pi_old(y_it) / mu(y_it)
#
# A token that mu could not score (NaN) is left out, so n counts the others. With n = 0 there is no value: ValueError.
# --------------------------------------------------------------------------------------------------------------------


def mismatch_log_ratios(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """log w of every scored loss token, row by row."""
    log_ratios = []
    for i in range(mask.shape[0]):
        for t in _loss_tokens(mask, i):
            if math.isnan(float(sampler_logps[i, t])):
                continue
            log_ratios.append(float(old_logps[i, t]) - float(sampler_logps[i, t]))
    return log_ratios


def _scored(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> list[float]:
    log_ratios = mismatch_log_ratios(old_logps, sampler_logps, mask)
    if len(log_ratios) == 0:
        raise ValueError("no loss token has a sampler log-prob")
    return log_ratios


def mismatch_mean_log_ratio(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> float:
    """(1/n) sum log w."""
    log_ratios = _scored(old_logps, sampler_logps, mask)
    total = 0.0
    for log_w in log_ratios:
        total += log_w
    return total / len(log_ratios)


def mismatch_k3(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> float:
    """(1/n) sum (w - 1 - log w), an estimate of KL(mu || pi_old) on tokens sampled from mu."""
    log_ratios = _scored(old_logps, sampler_logps, mask)
    total = 0.0
    for log_w in log_ratios:
        total += math.exp(log_w) - 1.0 - log_w
    return total / len(log_ratios)


def mismatch_shares(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """Shares of the n tokens with w > 2 and with w < 1/2."""
    log_ratios = _scored(old_logps, sampler_logps, mask)
    above = 0
    below = 0
    for log_w in log_ratios:
        if math.exp(log_w) > 2.0:
            above += 1
        if math.exp(log_w) < 0.5:
            below += 1
    return above / len(log_ratios), below / len(log_ratios)


def mismatch_effective_sample_size(old_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2), as a share: 1 where all w are equal, 1/n where one token has all the weight."""
    log_ratios = _scored(old_logps, sampler_logps, mask)
    total = 0.0
    total_of_squares = 0.0
    for log_w in log_ratios:
        w = math.exp(log_w)
        total += w
        total_of_squares += w * w
    return total * total / (len(log_ratios) * total_of_squares)


def quantile(values: list[float], q: float) -> float:
    """v_k of the sorted values v_1 <= ... <= v_n, with the smallest k such that k/n >= q (0 <= q <= 1)."""
    if len(values) == 0 or not 0.0 <= q <= 1.0:
        raise ValueError("quantile takes at least one value and 0 <= q <= 1")
    ordered = sorted(values)
    k = 1
    while k / len(ordered) < q:
        k += 1
    return ordered[k - 1]
