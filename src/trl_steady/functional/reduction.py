"""Reduce one value per token to one per sequence, or to a loss by a (B, T) matrix of weights."""

import torch
from torch import Tensor


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` over each sequence's loss tokens, or 0 for a sequence that has none.

    `values` (B, T) are never read where `mask` (B, T) is False. It returns (B, 1) in the dtype of `values`.

    >>> values = torch.tensor([[1.0, 3.0, torch.nan], [5.0, torch.nan, torch.nan]])
    >>> sequence_mean(values, torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [[2.0], [0.0]]
    """
    check_mask(mask, values)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    return values.where(mask, 0).sum(-1, keepdim=True) / count


def sequence_mean_weights(mask: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weights 1 / (B |y_i|) of the mean over sequences of the mean over their loss tokens.

    Source: GRPO (arXiv 2402.03300, eq. 3), GSPO (arXiv 2507.18071, section 4.1). A sequence without loss tokens counts
    in B, as in TRL. `dtype` should be that of the values, to avoid rounding.

    >>> sequence_mean_weights(torch.tensor([[True, True], [True, False]])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    return token_weights(mask, mask.sum(-1, keepdim=True).clamp(min=1) * len(mask), dtype=dtype)


def sequence_sum_weights(mask: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weights 1 / B of the mean over sequences of the sum over their tokens, as in LUSPO.

    >>> sequence_sum_weights(torch.tensor([[True, True], [True, False]])).tolist()
    [[0.5, 0.5], [0.5, 0.0]]
    """
    return token_weights(mask, len(mask), dtype=dtype)


def token_weights(mask: Tensor, tokens: Tensor | float, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weight 1 / `tokens` for every loss token, 0 where `mask` (B, T) is False.

    BNPO takes the number of loss tokens in the batch, and Dr. GRPO a constant. Divisors below 1 count as 1.

    >>> token_weights(torch.tensor([[True, True], [True, False]]), 4).tolist()
    [[0.25, 0.25], [0.25, 0.0]]
    """
    check_mask(mask)
    return mask.to(dtype) / torch.as_tensor(tokens, device=mask.device).clamp(min=1)


def check_mask(mask: Tensor, *values: Tensor) -> None:
    """Raise a ValueError for shapes that would broadcast: if B = T, a (B,) tensor would follow the wrong axis."""
    if mask.dim() != 2 or mask.dtype != torch.bool or any(each.shape != mask.shape for each in values):
        raise ValueError(
            "expected a boolean (B, T) mask and values like the mask, got shapes "
            f"{[tuple(each.shape) for each in (mask, *values)]} and a mask of {mask.dtype}."
        )
