"""GSPO's ratio in the first update on a rollout: 1 on paper, and how far from 1 under bf16 and packing.

The policy has not changed when the first update begins, so only rounding moves the ratio. GSPO clips at 3e-4.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import padding
from torch import Tensor

import trl_steady
from tests.gpu import models
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools import tiny
from tests.tools.headroom import within

CLIP = 3e-4


class Scored(trl_steady.GRPOTrainer):
    """Keeps the old policy's mean log-prob of each sequence of its rollout."""

    means: Tensor

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"]
        self.means = (output["old_per_token_logps"] * mask).sum(-1) / mask.sum(-1)
        assert output["old_per_token_logps"].dtype == torch.float32
        return output


@everywhere(slow=True)
@pytest.mark.parametrize(
    ("weights", "bf16"),
    [("float32", False), ("float32", True), ("bfloat16", True)],
    ids=["float32", "autocast", "bf16 weights"],
)
@pytest.mark.parametrize(
    "passes",
    [
        pytest.param({}, id="packed"),
        pytest.param({"token_budget": 500}, id="packed by tokens"),
        pytest.param({"token_budget": 500, "share_prompts": True}, id="shared prompts"),
        pytest.param({"trim_padding": False}, id="padded"),
    ],
)
def test_the_ratio_of_the_first_update_is_1_within_rounding(
    place: Place,
    passes: dict[str, Any],
    weights: str,
    bf16: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: Figures,
) -> None:
    if bf16:
        place.need_bf16()
    folder = models.save_model(tmp_path / "model", place.choose(models.SMALL, models.MIDDLE))
    monkeypatch.setattr(trl_steady, "GRPOTrainer", Scored, raising=False)

    def first_update(weights: str, bf16: bool, **options: Any) -> tuple[dict[str, float], Tensor]:
        """Return the log of the first of two updates on a rollout, and the mean log-probs of its sequences."""
        source = padding.Source()
        settings = models.bench_options(place)
        settings.window = 4
        source.rollout = padding.rollouts("lognormal", settings)
        trainer = tiny.trainer(
            folder,
            tmp_path,
            **{**place.arguments, "bf16": bf16, "loss_type": "gspo", "max_steps": 1, "learning_rate": 1e-6},
            **{"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 8},
            **{"num_generations": 8, "max_completion_length": 400, "model_init_kwargs": {"dtype": weights}},
            **{"build": {"rollout_func": source}, **options},
        )
        trainer.train()
        (row,) = [row for row in trainer.state.log_history if "ratio/sequence_max" in row]
        return row, trainer.means

    # the padded passes in float32 are the truth: nothing of ours runs in them
    _, true = first_update("float32", False, trim_padding=False)
    row, means = first_update(weights, bf16, **passes)
    off = max(row["ratio/sequence_max"] - 1, 1 - row["ratio/sequence_min"])
    # sorted: the trainer may order the sequences by length
    error = float((means.sort().values - true.sort().values).abs().max())
    # A mean log-prob of 6 nats in float32 is a sum of roundings of 3e-7. In bf16, a logit of 4 rounds by up to 0.008.
    assert within(error, 1e-5) if not bf16 else 0 < error < 0.03
    # The ratio compares two passes whose log-probs are each off by about `error`. The maximum is over other sequences'
    # errors of the same size, so a factor of 2 is left. float32 has 24 bits: log-probs of 8 nats round at 5e-7.
    assert 0 <= off <= 4 * error + 5e-6
    assert 0 <= row["clip_ratio/region_mean"] <= 1 and (off > CLIP or row["clip_ratio/region_mean"] == 0)
    figures("largest |ratio - 1|", off, "")
    figures("largest |ratio - 1| over the clip range of 3e-4", off / CLIP, "")
    figures("share of the sequences that are clipped", row["clip_ratio/region_mean"], "")
    figures("largest error of a sequence's mean log-prob", error, "nats")
