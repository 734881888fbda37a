"""Copies to a device for which the CPU does not wait."""

import torch
from torch import Tensor


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device. A GPU gets it from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
