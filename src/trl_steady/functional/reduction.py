"""From one value per token to one per sequence."""

import torch
from torch import Tensor

__all__ = ["sequence_mean"]


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over each sequence's loss tokens; 0 for a sequence that has none.

    Averaged over sequences it is the reduction of GRPO (arXiv 2402.03300, eq. 3) and GSPO (arXiv 2507.18071, section
    4.1), 1/B sum_i 1/|y_i| sum_t, where |y_i| counts loss tokens only. A sequence without any still counts in B, as in
    TRL.

    Args:
        values: (B, T), any float dtype. Never read where `mask` is False.
        mask: (B, T) bool, True = loss token.

    Returns:
        (B, 1), the dtype of `values`.

    Raises:
        ValueError: the two shapes differ, or `mask` is not boolean.

    >>> import torch
    >>> values = torch.tensor([[1.0, 3.0, torch.nan], [5.0, torch.nan, torch.nan]])
    >>> sequence_mean(values, torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [[2.0], [0.0]]
    """
    _check(mask, values)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    return values.where(mask, 0).sum(-1, keepdim=True) / count


def _check(mask: Tensor, *others: Tensor) -> None:
    """Refuse what would broadcast: at B == T a (B,) tensor would go along the wrong axis without a word."""
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(f"mask must be a boolean (B, T) tensor, got {tuple(mask.shape)} of {mask.dtype}.")
    for other in others:
        if other.shape != mask.shape:
            raise ValueError(f"expected shape (B, T) = {tuple(mask.shape)} like the mask, got {tuple(other.shape)}.")
