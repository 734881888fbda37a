"""Advantages per token: of a critic (`gae`), or of step rewards, with a baseline per group or per step.

Axes: `B` completions, `S` steps, `T` tokens. Each prompt has `group_size` consecutive completions. Rewards are (B, S),
in the order of the steps, and NaN where a completion has no such step. A row of NaN is an unscored completion: it
enters no mean, and its advantage is 0.

With one step per completion (outcome supervision), `process` and `return_to_go` return TRL's advantages bit for bit,
and exactly 0 for equal rewards.
"""

import torch
from torch import Tensor

from trl_steady.functional.masks import check_mask

_EPSILON = 1e-4  # TRL adds it to every standard deviation


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Return generalised advantage estimates (arXiv 1506.02438, section 3, equation 16) over action tokens only.

    Tokens of tools and environments are skipped: the action after them follows the action before them.

    Args:
        rewards: (B, T) reward of each action token. Never read where `mask` is False.
        values: (B, T) the critic's value of the state in which each token is chosen. Never read where `mask` is False.
        mask: (B, T) bool, True = action token.
        gamma: Discount.
        lam: Lambda, or (B, 1) for one lambda per sequence.
        bootstrap: (B,) value of the state after the last action token, for a sequence that was cut off; 0 where the
            episode ended. None: all episodes ended.

    Returns:
        (B, T), the dtype of `values`, 0 where `mask` is False.

    Raises:
        ValueError: The shapes differ, or `mask` is not boolean.

    >>> rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    >>> gae(rewards, values, torch.tensor([[True, False, True]]), gamma=1.0, lam=0.5).tolist()
    [[0.125, 0.0, 0.75]]
    """
    check_mask(mask, rewards, values)
    count, width = mask.shape
    if isinstance(lam, Tensor):
        lam = lam.expand(count, 1)  # otherwise torch would take (B,) for one lambda per token if B = T
    end = values.new_zeros(count) if bootstrap is None else bootstrap.to(values.dtype)
    token = torch.arange(width, device=mask.device).expand_as(mask).where(mask, width)
    no_token = token.new_full((count, 1), width)
    later_tokens = torch.cat([token[:, 1:], no_token], dim=1)
    following = later_tokens.flip(1).cummin(1).values.flip(1)  # the next action token behind each column
    values_and_end = torch.cat([values.where(mask, 0), end.unsqueeze(1)], dim=1)
    after = values_and_end.gather(1, following)
    advantages = (rewards + gamma * after - values).where(mask, 0)
    decay = torch.where(mask, gamma * lam, values.new_ones(())).to(values.dtype)
    # doubling: after a round with `step`, each entry has the terms of the next 2 * step tokens
    step = 1
    while step < width:
        later = torch.nn.functional.pad(advantages[:, step:], (0, step))
        advantages = advantages + decay * later
        decay = decay * torch.nn.functional.pad(decay[:, step:], (0, step))
        step *= 2
    return advantages.where(mask, 0)


def total_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of rewards over their functions, as TRL adds them up; NaN where no function gave a reward.

    Args:
        rewards: (..., K) rewards by function. NaN: no reward.
        weights: (K,) weights of the functions.

    >>> total_rewards(torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan]]), torch.tensor([0.5, 2.0])).tolist()
    [0.5, nan]
    """
    totals = (rewards * weights.to(rewards)).nansum(-1)
    return totals.masked_fill(rewards.isnan().all(-1), torch.nan)


def over_mean(advantages: Tensor, group_rewards: Tensor) -> Tensor:
    """Return advantages, rewards less the mean of their group, divided by this mean; 0 where it is 0.

    Source: MaxRL (arXiv 2602.02710). In expectation, the gradient is that of a truncated expansion of the
    log-likelihood of a right answer, so that hard problems count more.

    Args:
        advantages: (B,) or (B, T).
        group_rewards: (B, G) rewards of 0 or above, of all answers to the prompt of each completion. NaN: no reward.

    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> over_mean(rewards - rewards.mean(), rewards.expand(4, 4)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    mean = group_rewards.nanmean(1).nan_to_num(0).to(advantages.dtype)
    if advantages.dim() == 2:
        mean = mean.unsqueeze(1)
    return (advantages / mean).where(mean > 0, 0)


def process(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """Return DeepSeekMath's process advantages (arXiv 2402.03300, section 4.1.3): sums of normalised rewards.

    The rewards of all steps in a group are pooled and normalised. The advantage of a step is the sum of the normalised
    rewards of this step and of all later steps.

    Each extra step subtracts the mean once more, so the formula is biased toward stopping early or late: see
    `docs/step-rewards.md`.

    Args:
        rewards: (B, S), NaN = no such step.
        group_size: Completions per prompt.
        scale: Divisor of the rewards. `"group"`: the standard deviation of the group's step rewards, plus 1e-4.
            `"batch"`: that of the batch's step rewards, plus 1e-4. `"none"`: no division.

    Returns:
        (B, S), 0 where there is no such step.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0], [0.0, 0.0]])  # means 1/3 and 1/2
    >>> process(rewards.double(), group_size=2, scale="none").mul(3).round(decimals=2).tolist()  # in thirds
    [[1.0, -1.0], [-1.0, 0.0], [3.0, 1.5], [-3.0, -1.5]]
    """
    pools = rewards.reshape(-1, group_size * rewards.size(1))
    normalised = (pools - pools.nanmean(1, keepdim=True)).masked_fill(all_equal(pools, 1, keepdim=True), 0)
    if scale != "none":
        pools = {"group": pools, "batch": pools.reshape(1, -1)}[scale]
        normalised = normalised / (_deviation(pools) + _EPSILON)
    return _sums_from_each_on(normalised.view_as(rewards))


def return_to_go(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """Return each step's return minus the mean return of the group's other completions from the same step on.

    A return is the sum of the rewards from a step on. The baseline of step j is the mean return over the *other*
    completions that have a step j, or 0 if there are none. It does not depend on what the completion itself does from
    step j on. Without scaling it therefore leaves the expected gradient unchanged, however many steps follow.

    All advantages are multiplied by (G - 1) / G, where G is the number of scored completions in the group. With one
    step per completion this equals TRL, which subtracts the mean of all G completions, the completion itself included.

    All of this holds only if every token belongs to a step. Tokens after the last reward must form a step of reward 0.

    The spread at step j is the standard deviation of the returns from j on. For a completion that is alone in its
    group at step j, it is the size of its advantage. The standard deviation of the totals alone would not do: it is 0
    if all totals are equal, and would blow up the advantages of steps that differ.

    With skewed rewards, dividing by the spread of the completion's own group favours stopping or going on, as it does
    with totals: see `docs/step-rewards.md`.

    Args:
        rewards: As for `process`.
        group_size: As for `process`.
        scale: Divisor of the advantages. `"group"`: the largest spread at any step in the group, plus 1e-4.
            `"batch"`: the largest spread at any step in the batch, plus 1e-4. `"none"`: no division.

    Returns:
        (B, S), 0 where there is no such step.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0]])  # returns from each step on: 1 0, 0, 2 1
    >>> return_to_go(rewards.double(), group_size=3, scale="none").mul(3).round().tolist()  # in thirds
    [[0.0, -2.0], [-3.0, 0.0], [3.0, 2.0]]
    """
    groups = rewards.reshape(-1, group_size, rewards.size(1))
    has_step = ~groups.isnan()
    returns = _sums_from_each_on(groups).where(has_step, torch.nan)
    scored = has_step.any(-1, keepdim=True).sum(1, keepdim=True).to(rewards.dtype)
    others = has_step.sum(1, keepdim=True).to(rewards.dtype) - 1
    # R - mean of the others = n / (n - 1) (R - mean of all n). If all G have the step, the two factors cancel exactly.
    factor = ((scored - 1) * (others + 1)) / (scored * others)
    with_others = (returns - returns.nanmean(1, keepdim=True)) * factor
    without_others = (returns * ((scored - 1) / scored)).where(has_step & (others == 0), 0)
    with_others = with_others.masked_fill(all_equal(returns, 1, keepdim=True), 0)
    advantages = with_others.where(has_step & (others > 0), without_others)
    if scale != "none":
        pools = {"group": returns, "batch": returns.flatten(0, 1).unsqueeze(0)}[scale]
        deviations = _deviation(pools.transpose(1, 2).flatten(0, 1)).view(len(pools), -1)
        largest_deviation = deviations.nan_to_num(nan=0.0).amax(1)
        largest_without = without_others.abs().view(len(pools), -1).amax(1)
        spread = torch.maximum(largest_deviation, largest_without)
        advantages = advantages / (spread.view(-1, 1, 1) + _EPSILON)
    return advantages.view_as(rewards)


def token_baseline(advantages: Tensor, energies: Tensor, *, group_size: int) -> Tensor:
    """Return advantages with the optimal token baseline in place of the group's mean (arXiv 2602.07078).

    The baseline of token t is B_t = sum_i G_i W_it / sum_i W_it over the group's completions that have a token t.
    W_it is the sum of the energies of completion i up to t. The group's mean stays the baseline where no other
    completion has a token t.

    Args:
        advantages: (B,) equal to (G - mean) / scale, with any scale. They give the same G - B_t, divided by it.
        energies: (B, T) 1 - 2 pi + the sum of pi^2, 0 or above. NaN where there is no token, and for a completion
            without a reward.
        group_size: Completions per prompt.

    Returns:
        (B, T), 0 where there is no token.

    >>> energies = torch.tensor([[0.5, 0.5], [1.0, torch.nan]])  # W is 0.5, 1, and 1
    >>> token_baseline(torch.tensor([0.5, -0.5]), energies, group_size=2).mul(3).round(decimals=3).tolist()  # B = 1/3
    [[2.0, 1.5], [-1.0, 0.0]]
    """
    is_token = ~energies.isnan()
    weights = energies.nan_to_num(nan=0.0).cumsum(1) + 1e-8  # all may be 0
    groups = weights.where(is_token, 0).view(-1, group_size, energies.size(1))
    baselines = (groups * advantages.view(-1, group_size, 1)).sum(1, keepdim=True) / groups.sum(1, keepdim=True)
    has_others = is_token.view_as(groups).sum(1, keepdim=True) > 1
    by_token = advantages.view(-1, group_size, 1) - baselines.where(has_others, 0)
    return by_token.view_as(energies).where(is_token, 0)


def with_teacher(advantages: Tensor, log_ratio: Tensor, *, mode: str, coef: float) -> Tensor:
    """Return advantages with a teacher's part, from d = log π_T - log π_old of the sampled tokens.

    - `"add"`: A + coef d, the sampled reverse KL as a reward of tokens (on-policy distillation).
    - `"weight"`: A ((1 - coef) + coef clip(exp(sign(A) d), 0.8, 1.2)) of RLSD (arXiv 2604.03128, equations 13 to 15).
      The sign of A stays.

    Args:
        advantages: (B,) or (B, T).
        log_ratio: (B, T) d, in nats; 0 where the teacher has no part.
        mode: `"add"` or `"weight"`.
        coef: 0 or above.

    Returns:
        (B, T).

    >>> advantages, log_ratio = torch.tensor([1.0, -2.0]), torch.tensor([[0.1, 9.0], [0.1, -9.0]])
    >>> with_teacher(advantages, log_ratio, mode="add", coef=0.5).tolist()
    [[1.0499999523162842, 5.5], [-1.9500000476837158, -6.5]]
    >>> with_teacher(advantages, log_ratio, mode="weight", coef=0.5).mul(1e3).round().tolist()
    [[1053.0, 1100.0], [-1905.0, -2200.0]]
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    if mode == "add":
        return advantages + coef * log_ratio
    weights = (advantages.sign() * log_ratio).exp().clamp(0.8, 1.2)
    return advantages * (1 - coef + coef * weights)


def per_token(advantages: Tensor, ends: Tensor, tokens: int) -> Tensor:
    """Return each token's advantage: that of the first step that ends after the token, or 0 if there is none.

    `advantages` (B, S) are 0 where there is no such step. `ends` (B, S) are exclusive, in increasing order, and
    `tokens` or more where there is no such step. It returns (B, T) in the dtype of `advantages`, with T = `tokens`.

    >>> per_token(torch.tensor([[0.5, -1.0]]), torch.tensor([[2, 3]]), 5).tolist()
    [[0.5, 0.5, -1.0, 0.0, 0.0]]
    """
    positions = torch.arange(tokens, device=ends.device).expand(len(ends), -1).contiguous()
    ended = torch.searchsorted(ends.contiguous(), positions, right=True)
    with_zero = torch.cat([advantages, advantages.new_zeros(len(advantages), 1)], 1)
    return with_zero.gather(1, ended)


def all_equal(values: Tensor, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    """Return bool, True where the numbers along `dim` are equal, without NaN. (Their mean may round, and not tell.)

    Sums of several functions' rewards round too: 0.6 + 0.1 is not 0.7 in float32.

    >>> rewards = torch.tensor([[0.6, 0.7, 0.7], [0.1, torch.nan, 0.1]]) + torch.tensor([0.1, 0, 0])
    >>> all_equal(rewards, 1).tolist()
    [True, False]
    """
    over = () if dim is None else dim
    missing = values.isnan()
    lowest = values.masked_fill(missing, torch.inf).amin(over, keepdim)
    highest = values.masked_fill(missing, -torch.inf).amax(over, keepdim)
    size = torch.maximum(lowest.abs(), highest.abs())
    rounding = 2 * torch.finfo(values.dtype).eps * size.where(size.isfinite(), 0)
    return ~(lowest < highest - rounding)


def group_variances(rewards: Tensor) -> Tensor:
    """Return the (J,) variances in float64, with n - 1, of rewards (J, G), NaN = unscored; 0 for equal ones.

    >>> group_variances(torch.tensor([[0.0, 1.0, 2.0], [0.1, 0.1, 0.1], [torch.nan, 3.0, 5.0]])).tolist()
    [1.0, 0.0, 2.0]
    """
    return _variance(rewards.double()).squeeze(1).masked_fill(all_equal(rewards, 1), 0)


def least_variance(variances: Tensor, share: float = 0.9) -> Tensor:
    """Return the variance from which on groups hold a share of the sum (RAGEN-2, arXiv 2604.06268, top-p selection).

    Groups of the same variance stay or go together, so that the order of the groups decides nothing.

    Args:
        variances: (J,) 0 or above.
        share: The kept share of their sum, above 0 and below 1.

    Returns:
        A scalar, less a billionth for rounding; 0 if all variances are 0.

    >>> round(least_variance(torch.tensor([0.25, 1.0, 0.0, 0.0625])).item(), 3)  # 1 + 0.25 are 95 % of 1.3125
    0.25
    """
    ordered = variances.sort(descending=True).values
    sums = ordered.cumsum(0)
    return ordered[(sums < share * sums[-1]).sum()] * (1 - 1e-9)


def _deviation(values: Tensor) -> Tensor:
    """Return the (rows, 1) standard deviations as TRL computes them: with n - 1, NaN for fewer than two values."""
    return _variance(values).sqrt()


def _variance(values: Tensor) -> Tensor:
    variance = ((values - values.nanmean(1, keepdim=True)) ** 2).nanmean(1, keepdim=True)
    count = (~values.isnan()).sum(1, keepdim=True).to(values.dtype)
    return (variance * (count / (count - 1))).where(count > 1, torch.nan)


def _sums_from_each_on(rewards: Tensor) -> Tensor:
    """Return the (..., S) sums of the rewards from each step on, with NaN as 0."""
    return rewards.nan_to_num(nan=0.0).flip(-1).cumsum(-1).flip(-1)
