"""FSDP2, ZeRO-2 and ZeRO-3 on processes without an accelerator, over gloo.

torch and DeepSpeed can shard on CPU. Only accelerate chooses DDP there, whatever a script asks for. `enable` changes
this choice. Everything else is what runs on GPUs: the script's options, the engine, and how it saves and loads.

`enable` knows attributes of accelerate that are not public. It was written for accelerate 1.15.
"""

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

FSDP2 = Path(__file__).parents[2] / "recipes/accelerate/fsdp2.yaml"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def enable(engine: str) -> None:
    """Let every trainer of this process use the engine of its options. Call it before the first config is built."""
    if engine == "FSDP2":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        _after(AcceleratorState, _choose_fsdp)
    elif engine.startswith("ZeRO"):
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
        _after(PartialState, _start_deepspeed)
        _after(AcceleratorState, _choose_deepspeed)


def _after(state: Any, change: Any) -> None:
    """Call `change` when a shared state has been filled, which happens once per config."""
    fill = state.__init__

    def filled(self: Any, *arguments: Any, **options: Any) -> None:
        is_filled = state is PartialState and bool(state._shared_state)
        is_filled |= state is AcceleratorState and "_mixed_precision" in state._shared_state
        fill(self, *arguments, **options)
        if not is_filled and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.DEEPSPEED):
            change(self, options)

    state.__init__ = filled


def _choose_fsdp(state: Any, options: dict[str, Any]) -> None:
    if options.get("fsdp_plugin") is not None:
        state.fsdp_plugin = options["fsdp_plugin"]
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _start_deepspeed(state: Any, _: dict[str, Any]) -> None:
    from deepspeed import comm  # pyright: ignore[reportMissingImports]

    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    state.distributed_type = DistributedType.DEEPSPEED


def _choose_deepspeed(state: Any, options: dict[str, Any]) -> None:
    plugins = options.get("deepspeed_plugin")
    if plugins is None:
        return
    each = list(plugins.values()) if isinstance(plugins, dict) else [plugins]
    for plugin in each:
        plugin.set_mixed_precision("no")
    each[0].select(_from_accelerator_state=True)
    state.deepspeed_plugins = plugins


def options(engine: str, *, saves_shards: bool = False, stays_whole: bool = False) -> dict[str, Any]:
    """Return what a script gives its config to train with an engine, in float32.

    FSDP2 may write one file per process (`saves_shards`), or keep parameters whole until backward (`stays_whole`).
    """
    if engine == "FSDP2":
        config = yaml.safe_load(FSDP2.read_text())["fsdp_config"]
        if saves_shards:
            config["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        config["fsdp_reshard_after_forward"] = not stays_whole
        return {"fsdp": True, "fsdp_config": config}
    if engine == "DDP":
        return {}
    zero: dict[str, Any] = {"stage": int(engine[-1])}
    if engine == "ZeRO-3":
        # every tensor is partitioned, also the small ones that ZeRO-3 would keep whole
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    batches = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    automatic = dict.fromkeys((*batches, "gradient_clipping"), "auto")
    return {"deepspeed": {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **automatic}}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this process' part of a tensor."""
    return part(tensor).clone()


def part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor, which shares its memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor).detach()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as bytes. Packed 4-bit weights that are stored as float32 contain NaN, which equals nothing."""
    return tensor.contiguous().flatten().view(torch.uint8)


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather tensors, one after another. All processes must call this."""
    found = {}
    for name, tensor in tensors.items():
        with contextlib.ExitStack() as stack:
            if hasattr(tensor, "ds_id"):
                import deepspeed  # pyright: ignore[reportMissingImports]

                stack.enter_context(deepspeed.zero.GatheredParameters([tensor]))
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = full.detach().clone()
    return found
