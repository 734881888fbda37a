"""An outer iteration with a reward model on the policy's base: its scores in bf16, and what it costs."""

from pathlib import Path

import torch

from tests.features.reward_model import tools as rewarding
from tests.gpu import models
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from trl_steady.features.reward_model.feature import RewardModel


@everywhere
def test_scores_in_bf16_are_those_in_float32(place: Place, tmp_path: Path, figures: Figures) -> None:
    place.need_bf16()
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, models.MIDDLE))

    def scores(*, bf16: bool) -> torch.Tensor:
        trainer = rewarding.build("lora", folder, tmp_path / "out", **{**place.arguments, "bf16": bf16})
        rewarding.stir(trainer, by=0.05)
        draw = torch.Generator().manual_seed(0)
        lengths = torch.linspace(2, place.choose(12, 96), 8).long().tolist()
        prompts, answers = (
            [torch.randint(50, 200, (length,), generator=draw).tolist() for length in of]
            for of in (lengths[::-1], lengths)
        )
        with torch.no_grad():
            return trainer.feature(RewardModel).scorer.scores(
                prompts, answers, [[1, length] for length in lengths], batch_size=4
            )

    exact, rounded = scores(bf16=False), scores(bf16=True)
    assert rounded.dtype == torch.float32 and exact.unique().numel() == exact.numel()
    error = float((rounded - exact).abs().max() / exact.abs().max())
    assert 0 < error < 0.1  # a rounding to bf16 is at most 0.2 % of a number, and some tens of them follow each other
    figures("largest error of a score, of the largest score", error, "")


@everywhere(slow=True)
def test_an_outer_iteration_and_its_memory(place: Place, tmp_path: Path, figures: Figures) -> None:
    large = {**models.LARGE, "vocab_size": tiny.SIZES["vocab_size"]}  # the rule reads the text of the answers
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, large))
    options = {**place.arguments, "ref_model_sync_steps": 1, "max_steps": 5, "steps_per_generation": 1}
    trainer = rewarding.refreshed("lora", folder, tmp_path / "out", per_device_train_batch_size=8, **options)
    own = {id(parameter): parameter.nbytes for _, parameter in trainer.reward_model.named_parameters()}
    adapters = ("default", "ref", "reward")
    base = sum(p.nbytes for name, p in trainer.model.named_parameters() if not {*name.split(".")} & {*adapters})
    if place.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    tiny.train(trainer)
    assert len(trainer.reward_refreshes) == 4 and all(record.samples for record in trainer.reward_refreshes)
    figures("bytes of the reward model, of a second model", sum(own.values()) / base, "")
    if place.is_cuda:
        assert sum(own.values()) < 0.05 * base
        figures("peak memory of four outer iterations", torch.cuda.max_memory_allocated() / 2**20, "MiB")
    else:
        assert sum(own.values()) < base
    assert [refresh.step for refresh in trainer.reference_refreshes] == [1, 2, 3, 4]
