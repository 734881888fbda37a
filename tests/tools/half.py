"""fp16 on a CPU, with scalers whose first scale and growth a test chooses."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from recipes.common.half import SCALE, fp16_on_cpu
from torch.amp.grad_scaler import GradScaler

from trl_steady.features.critic.feature import Critic
from trl_steady.features.reward_model.feature import RewardModel
from trl_steady.features.scalar_head import optimizer


@contextmanager
def allowed(scale: float = SCALE, growth_interval: int = 2000, own_scale: float | None = None) -> Generator[None]:
    """Let trainers with `fp16=True` use autocast and a loss scaler on a CPU.

    `scale` and `growth_interval` are those of each scaler. `own_scale` is that of a critic's or a reward model's.
    """
    of_heads = partial(GradScaler, init_scale=own_scale or scale, growth_interval=growth_interval)
    with fp16_on_cpu(scale, growth_interval), patch.object(optimizer, "GradScaler", of_heads):
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
