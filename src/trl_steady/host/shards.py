"""Tensors of a model that FSDP2 may shard: how they are stored, gathered and set. Every process must call these."""

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["assign", "reshard", "whole"]


def reshard(model: torch.nn.Module) -> None:
    """Let the model's parameters be those that the optimizer knows.

    A forward without a backward leaves unsharded copies in their place, and writes to them are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, gathered if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, values: Tensor) -> None:
    """Set a tensor to whole values. A sharded one takes those of the first process."""
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        target.to_local().copy_(distribute_tensor(values.to(target.device), mesh, placements).to_local())
    else:
        target.copy_(values)
