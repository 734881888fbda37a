"""Reduce one value per token to one per sequence, or to a loss by a (B, T) matrix of weights."""

import torch
from torch import Tensor

__all__ = ["sequence_mean", "sequence_mean_weights", "sequence_sum_weights", "token_weights"]


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` over each sequence's loss tokens, or 0 for a sequence that has none.

    |y_i| counts loss tokens only.

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


def sequence_mean_weights(mask: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weights 1 / (B |y_i|) of the mean over sequences of the mean over their loss tokens.

    Source: GRPO (arXiv 2402.03300, eq. 3), GSPO (arXiv 2507.18071, section 4.1). A sequence without loss tokens counts
    in B, as in TRL. `dtype` should be that of the values, to avoid rounding.

    >>> import torch
    >>> sequence_mean_weights(torch.tensor([[True, True], [True, False]])).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    return token_weights(mask, mask.sum(-1, keepdim=True).clamp(min=1) * len(mask), dtype=dtype)


def sequence_sum_weights(mask: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weights 1 / B of the mean over sequences of the sum over their tokens, as in LUSPO.

    >>> import torch
    >>> sequence_sum_weights(torch.tensor([[True, True], [True, False]])).tolist()
    [[0.5, 0.5], [0.5, 0.0]]
    """
    return token_weights(mask, len(mask), dtype=dtype)


def token_weights(mask: Tensor, tokens: Tensor | float, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the (B, T) weight 1 / `tokens` for every loss token, 0 where `mask` (B, T) is False.

    BNPO takes the number of loss tokens in the batch, and Dr. GRPO a constant. Divisors below 1 count as 1.

    >>> import torch
    >>> token_weights(torch.tensor([[True, True], [True, False]]), 4).tolist()
    [[0.25, 0.25], [0.25, 0.0]]
    """
    _check(mask)
    return mask.to(dtype) / torch.as_tensor(tokens, device=mask.device).clamp(min=1)


def _check(mask: Tensor, values: Tensor | None = None) -> None:
    """Raise on shapes that would broadcast: if B == T, a (B,) tensor would silently follow the wrong axis."""
    shape = mask.shape if values is None else values.shape
    if mask.dim() != 2 or mask.dtype != torch.bool or shape != mask.shape:
        raise ValueError(
            f"expected a boolean (B, T) mask and values like the mask, got a mask of shape {tuple(mask.shape)} and "
            f"{mask.dtype}, and values of shape {tuple(shape)}."
        )
