"""From the rewards of steps to one advantage per token: DeepSeekMath's formula, and one with a baseline by step.

Axes: `B` completions, `group_size` of them in a row for each prompt, `S` steps, `T` tokens. Rewards are (B, S), in the
order of the steps and NaN where a completion has no such step; a row of NaN is a completion without a verdict, which
takes no part in any mean and has the advantage 0. One step for each completion is outcome supervision: both functions
then give, bit for bit, the advantages of TRL.
"""

import torch
from torch import Tensor

__all__ = ["per_token", "process", "return_to_go"]

_EPSILON = 1e-4  # TRL's, added to every standard deviation


def process(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """DeepSeekMath's process supervision (arXiv 2402.03300, section 4.1.3): sums of normalised rewards.

    The rewards of all steps in a group are pooled and normalised; the advantage of a step is the sum of its own
    normalised reward and those of the steps after it. A completion with more steps has more terms less the mean, so
    that ending early or late is rewarded by itself: see `docs/step-rewards.md`.

    Args:
        rewards: (B, S), NaN = no such step.
        group_size: Completions of a prompt.
        scale: What the rewards are divided by, plus 1e-4: the standard deviation of the `"group"`'s or of the
            `"batch"`'s step rewards, or nothing (`"none"`).

    Returns:
        (B, S), 0 where there is no such step.

    Raises:
        ValueError: B is no multiple of `group_size`, S is 0, or `scale` is unknown.

    >>> import torch
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0], [0.0, 0.0]])  # means 1/3 and 1/2
    >>> process(rewards.double(), group_size=2, scale="none").mul(3).round(decimals=2).tolist()  # in thirds
    [[1.0, -1.0], [-1.0, 0.0], [3.0, 1.5], [-3.0, -1.5]]
    """
    pools = _groups(rewards, group_size).flatten(1)
    normalised = pools - pools.nanmean(1, keepdim=True)
    if _divides(scale):
        normalised = normalised / (_deviation(pools if scale == "group" else pools.reshape(1, -1)) + _EPSILON)
    return _sums_from_each_on(normalised.view_as(rewards))


def return_to_go(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """The sum of the rewards from a step on, less what the group's other completions got from the same step on.

    The baseline of step j is the mean over the *other* completions that have a step j, 0 if there is none: it does not
    depend on what the completion itself does from there on, so that, unscaled, it takes nothing away from the expected
    gradient and adds nothing to it, however many steps follow. All advantages are (G - 1) / G times that, with G the
    group's completions that have a verdict: TRL subtracts the mean of all G, itself included, which is the same.

    Every token must belong to a step for this to hold: tokens after the last reward are a step of reward 0.

    Args:
        rewards: (B, S), NaN = no such step.
        group_size: Completions of a prompt.
        scale: What the advantages are divided by, plus 1e-4: the largest spread at any step in the `"group"` or in the
            `"batch"`, or nothing (`"none"`). The spread at step j is the standard deviation of the returns from j on;
            of a completion that is alone in its group at j, its advantage. That of the totals alone would blow up
            where totals are equal and the ways there are not. Dividing by the own group favours stopping, or going on,
            where rewards are skewed, as it does with totals: see `docs/step-rewards.md`.

    Returns:
        (B, S), 0 where there is no such step.

    Raises:
        ValueError: B is no multiple of `group_size`, S is 0, or `scale` is unknown.

    >>> import torch
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0]])  # returns from each step on: 1 0, 0, 2 1
    >>> return_to_go(rewards.double(), group_size=3, scale="none").mul(3).round().tolist()  # in thirds
    [[0.0, -2.0], [-3.0, 0.0], [3.0, 2.0]]
    """
    groups = _groups(rewards, group_size)
    running = ~groups.isnan()
    returns = _sums_from_each_on(groups).where(running, torch.nan)
    scored = running.any(-1, keepdim=True).sum(1, keepdim=True).to(rewards.dtype)
    others = running.sum(1, keepdim=True).to(rewards.dtype) - 1
    # R - mean of the others = n / (n - 1) (R - mean of all n); with all G running the two factors cancel exactly
    beside_others = (returns - returns.nanmean(1, keepdim=True)) * (((scored - 1) * (others + 1)) / (scored * others))
    alone = (returns * ((scored - 1) / scored)).where(running & (others == 0), 0)
    advantages = beside_others.where(running & (others > 0), alone)
    if _divides(scale):
        pools = returns if scale == "group" else returns.flatten(0, 1).unsqueeze(0)
        deviations = _deviation(pools.transpose(1, 2).flatten(0, 1)).view(len(pools), -1)
        spread = torch.maximum(deviations.nan_to_num(nan=0.0).amax(1), alone.abs().view(len(pools), -1).amax(1))
        advantages = advantages / (spread.view(-1, 1, 1) + _EPSILON)
    return advantages.view_as(rewards)


def per_token(advantages: Tensor, ends: Tensor, tokens: int) -> Tensor:
    """The advantage of each token: that of the first step that ends after it, 0 if there is none.

    Args:
        advantages: (B, S), 0 where there is no such step.
        ends: (B, S) integer, exclusive, in increasing order; `tokens` or more where there is no such step.
        tokens: T.

    Returns:
        (B, T), the dtype of `advantages`.

    >>> import torch
    >>> per_token(torch.tensor([[0.5, -1.0]]), torch.tensor([[2, 3]]), 5).tolist()
    [[0.5, 0.5, -1.0, 0.0, 0.0]]
    """
    positions = torch.arange(tokens, device=ends.device).expand(len(ends), -1).contiguous()
    ended = torch.searchsorted(ends.contiguous(), positions, right=True)
    return torch.cat([advantages, advantages.new_zeros(len(advantages), 1)], 1).gather(1, ended)


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """(groups, group_size, S)."""
    if rewards.dim() != 2 or not rewards.numel() or len(rewards) % group_size:
        raise ValueError(
            f"expected rewards of shape (B, S), S at least 1 and B a multiple of group_size={group_size}, got "
            f"{tuple(rewards.shape)}."
        )
    return rewards.reshape(-1, group_size, rewards.size(1))


def _divides(scale: str) -> bool:
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale={scale!r} is unknown. Set it to 'group', 'batch' or 'none'.")
    return scale != "none"


def _deviation(values: Tensor) -> Tensor:
    """(rows, 1), of each row, with n - 1; NaN for fewer than two values. TRL's arithmetic."""
    variance = ((values - values.nanmean(1, keepdim=True)) ** 2).nanmean(1, keepdim=True)
    count = (~values.isnan()).sum(1, keepdim=True).to(values.dtype)
    return (variance * (count / (count - 1))).where(count > 1, torch.nan).sqrt()


def _sums_from_each_on(rewards: Tensor) -> Tensor:
    """(..., S): the sum of the rewards from each step on, NaN as 0."""
    return rewards.nan_to_num(nan=0.0).flip(-1).cumsum(-1).flip(-1)
