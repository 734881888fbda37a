"""fp16 on a CPU. accelerate leaves it out there without a word, although torch has its autocast and loss scaler."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

SCALE = 65536.0  # accelerate's first loss scale


@contextmanager
def fp16_on_cpu(scale: float = SCALE, growth_interval: int = 2000) -> Generator[None]:
    """Let trainers with `fp16=True` use autocast and a loss scaler on a CPU.

    Args:
        scale: The scaler's first loss scale.
        growth_interval: Steps without an overflow after which the scale doubles.
    """
    own = Accelerator.__init__

    def init(accelerator: Any, *arguments: Any, **keywords: Any) -> None:
        own(accelerator, *arguments, **keywords)
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            accelerator.native_amp = True
            is_sharded = accelerator.distributed_type == DistributedType.FSDP
            kind = ShardedGradScaler if is_sharded else GradScaler  # accelerate's choice
            accelerator.scaler = kind("cpu", init_scale=scale, growth_interval=growth_interval)

    with patch.object(Accelerator, "__init__", init):
        yield
