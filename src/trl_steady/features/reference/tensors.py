"""Pair the tensors of policy and reference, and move, gather and restore those of the reference.

An adapter and a full copy have the same form here, a list of `Pair`. Tensors may be plain, sharded by FSDP2
(`DTensor`) or partitioned by DeepSpeed ZeRO-3. A move never gathers a DTensor.
"""

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trl_steady.core.tensor_file import refuse_other_shapes
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.models import POLICY_ADAPTER, REFERENCE_ADAPTER


class Pair(NamedTuple):
    """A tensor of the policy and the tensor of the reference that follows it, of the same shape."""

    name: str
    policy: Tensor
    reference: Tensor


def paired(policy: torch.nn.Module, reference: torch.nn.Module | None = None) -> list[Pair]:
    """Return the parameters and buffers of two models of one architecture, paired by name, with tied weights once.

    Without `reference`, pair those of the adapters `default` and `ref` in one PEFT model. An adapter's name is a whole
    component of a tensor's name, in the middle (`lora_A.default.weight`) or at the end (`lora_embedding_A.default`).
    """
    ours = _tensors(policy)
    theirs = ours if reference is None else _tensors(reference)
    if reference is None:
        ours = {name: tensor for name, tensor in ours.items() if POLICY_ADAPTER in name.split(".")}
        theirs = {
            ".".join(POLICY_ADAPTER if part == REFERENCE_ADAPTER else part for part in name.split(".")): tensor
            for name, tensor in theirs.items()
            if REFERENCE_ADAPTER in name.split(".")
        }
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(
            f"policy and reference do not have the same tensors ({len(ours)} and {len(theirs)}). Use LoRA, or full "
            "fine-tuning."
        )
    return [Pair(name, tensor, theirs[name]) for name, tensor in ours.items()]


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    models.reshard(model)
    return dict(itertools.chain(model.named_parameters(), model.named_buffers()))


@torch.no_grad()
def move(pairs: Iterable[Pair], alpha: float) -> None:
    """Set each parameter of the reference to `alpha` * policy + (1 - `alpha`) * reference.

    Source: TR-DPO, arXiv 2404.09656, section 3. With `alpha=1` the reference is a copy of the policy. Buffers are
    always copied. A plain reference takes the policy's dtype, which a cast after its creation may have changed. A
    sharded reference keeps its own dtype.
    """
    for _, policy, reference in pairs:
        with _whole((policy, reference), write=True):
            if reference.dtype != policy.dtype and not _is_sharded(reference):
                reference.data = reference.data.to(policy.dtype)
            source, target = _local(policy), _local(reference)
            if alpha == 1 or not isinstance(policy, torch.nn.Parameter):
                target.copy_(source)
            else:
                target.mul_(1 - alpha).add_(source.to(target.dtype), alpha=alpha)


@torch.no_grad()
def gather(pairs: Iterable[Pair], *, keep: bool = True) -> dict[str, Tensor]:
    """Return the reference's tensors, whole and on the CPU. Every process must call it.

    With `keep=False` a process only helps to gather them, one at a time.
    """
    tensors: dict[str, Tensor] = {}
    for name, _, reference in pairs:
        with _whole((reference,), write=False):
            whole = models.whole(reference)
            if keep:
                tensors[name] = whole.to("cpu", copy=True).contiguous()
    return tensors


@torch.no_grad()
def restore(pairs: Sequence[Pair], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors that `gather` returned back into the reference. Every process must call it."""
    # a ZeRO-3 partition's own shape is (0,)
    expected = {name: getattr(reference, "ds_shape", reference.shape) for name, _, reference in pairs}
    refuse_other_shapes(tensors, expected, "the saved reference")
    for name, _, reference in pairs:
        with _whole((reference,), write=True):
            if _is_sharded(reference):
                models.assign(reference, tensors[name])
            else:  # restores the dtype too
                reference.data = tensors[name].to(reference.device, copy=True)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _whole(tensors: tuple[Tensor, ...], *, write: bool) -> Generator[None]:
    """Gather parameters that DeepSpeed ZeRO-3 has partitioned, until the context ends."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None):
        yield
