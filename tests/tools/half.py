"""fp16 on a CPU. accelerate leaves it out there without a word, although torch has its autocast and loss scaler."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from torch.amp.grad_scaler import GradScaler

from trl_steady.features.critic import optimizer
from trl_steady.features.critic.feature import Critic
from trl_steady.features.reward_model.feature import RewardModel


@contextmanager
def allowed(scale: float = 65536.0, growth_interval: int = 2000, own_scale: float | None = None) -> Generator[None]:
    """Let trainers with `fp16=True` use autocast and a loss scaler on a CPU.

    `scale` and `growth_interval` are those of each scaler. `own_scale` is that of a critic's or a reward model's.
    """
    own = Accelerator.__init__
    at_first = partial(GradScaler, growth_interval=growth_interval)

    def init(accelerator: Any, *arguments: Any, **keywords: Any) -> None:
        own(accelerator, *arguments, **keywords)
        if accelerator.mixed_precision == "fp16":
            accelerator.native_amp = True
            accelerator.scaler = at_first("cpu", init_scale=scale)

    of_heads = partial(at_first, init_scale=own_scale or scale)
    with patch.object(Accelerator, "__init__", init), patch.object(optimizer, "GradScaler", of_heads):
        yield


def scalers(trainer: Any) -> dict[str, GradScaler]:
    """The loss scalers of a trainer, by the names in its output."""
    found = {"policy": trainer.accelerator.scaler}
    if hasattr(trainer, "critic"):
        found["critic"] = trainer.feature(Critic).optimizer.scaler
    refresher = trainer.feature(RewardModel).refresher
    if refresher is not None:
        found["reward model"] = refresher.optimizer.scaler
    return found
