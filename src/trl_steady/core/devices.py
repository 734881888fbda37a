"""Copies to a device for which the CPU does not wait."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device. A GPU gets it from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def padded(sequences: Sequence[Sequence[int]], value: int, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sequences of numbers as a padded tensor, and its mask."""
    tensors = [torch.as_tensor(sequence, dtype=torch.long) for sequence in sequences]
    masks = list(map(torch.ones_like, tensors))
    pad = functools.partial(pad_sequence, batch_first=True, padding_side=side)
    return copy_async(pad(tensors, padding_value=value), device), copy_async(pad(masks), device)
