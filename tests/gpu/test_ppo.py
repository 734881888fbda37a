"""PPO's critic in bf16 is that in float32, and what it costs beside GRPO."""

import argparse
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import critic

from tests.gpu import models
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from trl_steady.features.critic.feature import Critic


@everywhere
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_a_critic_in_bf16_is_that_in_float32(place: Place, lora: bool, tmp_path: Path, figures: Figures) -> None:
    place.need_bf16()
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, models.MIDDLE))

    def step(*, bf16: bool) -> tuple[torch.Tensor, list[Any]]:
        """The values of the first rollout, and the critic's gradients in the first micro-batch."""
        options = {**place.arguments, "bf16": bf16, "num_generations": 1, "max_grad_norm": 0.0, "max_steps": 1}
        trainer = tiny.trainer(folder, tmp_path / "out", method="PPO", lora=lora, **options)
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(trainer.critic.head.weight.shape, generator=draw)
        trainer.critic.head.weight.data.copy_(0.1 * weight)  # from 0, nothing would reach the adapter
        inputs = models.batch(place)
        trainer.model.train()
        trainer.feature(Critic).optimizer.enable(True)
        with trainer.until_backward():
            values = trainer.values(trainer.critic, inputs)
            is_token = inputs["completion_mask"].bool()
            (0.5 * (values - 1).square())[is_token].mean().backward()
        assert values.dtype == torch.float32
        named = dict(trainer.critic.named_parameters())
        others = [p for p in trainer.model.parameters() if id(p) not in {id(own) for own in named.values()}]
        assert all(p.grad is None for p in others)
        return values.detach()[is_token], [p.grad.float() for p in named.values() if p.grad is not None]

    exact, gradients = step(bf16=False)
    rounded, off = step(bf16=True)
    assert any(gradient.any() for gradient in gradients)
    error = float((rounded - exact).abs().max() / exact.abs().max())
    distance = models.apart(off, gradients)
    # A rounding to bf16 is at most 2**-9 of a number, 0.2 %, and some tens of them follow each other.
    assert 0 < error < 0.1
    assert distance < 0.1
    figures("largest error of a value, of the largest value", error, "")
    figures("gradient of the critic, distance from float32 of its length", distance, "")


@everywhere(slow=True)
@pytest.mark.parametrize("kind", ["NF4", "LoRA"])
def test_what_a_critic_costs(place: Place, kind: str, figures: Figures) -> None:
    """1.2 billion random weights on a GPU."""
    place.need_bf16()
    options = argparse.Namespace(
        **{"rounds": place.choose(2, 4), "batch": 8, "window": place.choose(1, 2), "rank": 16},
        **{"scale": place.choose(0.1, 0.5), "random": not place.is_cuda, "large": place.is_cuda},
    )
    found = critic.measured(kind, options)
    size, peaks = found["bytes"], found["peak_bytes"]
    assert size["critic"] == pytest.approx(size["policy"], rel=0.01)  # an adapter like the policy's, and a head
    assert peaks["PPO"] > 0 and len(found["seconds"]["PPO"]) == options.rounds
    figures("bytes of the critic, of the base", size["critic"] / size["base"], "")
    figures("peak memory of a step, of GRPO's", peaks["PPO"] / peaks["GRPO"], "")
    figures("seconds of a step, of GRPO's, median", found["ratio"]["median"], "")
    figures("seconds of a step", statistics.median(found["seconds"]["PPO"]), "s")
