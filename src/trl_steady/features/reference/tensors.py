"""Pair the tensors of policy and reference, and refresh, gather and restore those of the reference.

An adapter and a full copy have the same form here, a list of `Pair`. Tensors may be plain, sharded by FSDP2
(`DTensor`) or partitioned by DeepSpeed ZeRO-3. A refresh never gathers a DTensor.
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
    if reference is None:
        policy_tensors, reference_tensors = _adapter_tensors(policy)
    else:
        policy_tensors, reference_tensors = _tensors(policy), _tensors(reference)
    if policy_tensors.keys() != reference_tensors.keys() or not policy_tensors:
        raise ValueError(
            f"policy and reference do not have the same tensors ({len(policy_tensors)} and {len(reference_tensors)}). "
            "Use LoRA, or full fine-tuning."
        )
    return [Pair(name, tensor, reference_tensors[name]) for name, tensor in policy_tensors.items()]


def _adapter_tensors(model: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the adapters `default` and `ref`, both by the name in the first."""
    policy: dict[str, Tensor] = {}
    reference: dict[str, Tensor] = {}
    for name, tensor in _tensors(model).items():
        parts = name.split(".")
        if POLICY_ADAPTER in parts:
            policy[name] = tensor
        if REFERENCE_ADAPTER in parts:
            for i, part in enumerate(parts):
                if part == REFERENCE_ADAPTER:
                    parts[i] = POLICY_ADAPTER
            reference[".".join(parts)] = tensor
    return policy, reference


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    models.reshard(model)
    return dict(itertools.chain(model.named_parameters(), model.named_buffers()))


@torch.no_grad()
def refresh(pairs: Iterable[Pair], alpha: float) -> None:
    """Set each parameter of the reference to `alpha` * policy + (1 - `alpha`) * reference.

    Source: TR-DPO, arXiv 2404.09656, section 3. With `alpha=1` the reference is a copy of the policy. Buffers are
    always copied. A plain reference takes the policy's dtype, which a cast after its creation may have changed. A
    sharded reference keeps its own dtype.
    """
    for _, policy, reference in pairs:
        with _gathered((policy, reference), write=True):
            if reference.dtype != policy.dtype and not _is_sharded(reference):
                reference.data = reference.data.to(policy.dtype)
            source = _local(policy)
            target = _local(reference)
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
        with _gathered((reference,), write=False):
            whole = models.whole(reference)
            if keep:
                tensors[name] = whole.to("cpu", copy=True).contiguous()
    return tensors


@torch.no_grad()
def restore(pairs: Sequence[Pair], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors that `gather` returned back into the reference. Every process must call it."""
    # a ZeRO-3 partition's own shape is (0,)
    expected = {pair.name: getattr(pair.reference, "ds_shape", pair.reference.shape) for pair in pairs}
    refuse_other_shapes(tensors, expected, "the saved reference")
    for name, _, reference in pairs:
        with _gathered((reference,), write=True):
            if _is_sharded(reference):
                models.assign(reference, tensors[name])
            else:  # restores the dtype too
                reference.data = tensors[name].to(reference.device, copy=True)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _gathered(tensors: tuple[Tensor, ...], *, write: bool) -> Generator[None]:
    """Gather parameters that DeepSpeed ZeRO-3 has partitioned, until the context ends."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None):
        yield
