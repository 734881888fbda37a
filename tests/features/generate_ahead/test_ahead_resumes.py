"""Generation ahead across saves: a checkpoint has the answers that are ahead, and a killed run goes on bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from tests.features.dynamic_sampling import tools as rounds
from tests.features.generate_ahead import tools as ahead
from tests.features.generate_ahead.tools import Watched
from tests.tools import tiny
from tests.tools.cases import cases
from tests.tools.engines import MASKED, ROUTED, Server
from tests.tools.resumable import differences

# a window is 4 steps, an epoch 16
SAVED: dict[str, Any] = {
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 18,
    "save_strategy": "steps",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"),
    cases(
        {
            "evaluations": {
                "eval_strategy": "steps",
                "eval_steps": 2,
                "per_device_eval_batch_size": 4,
                "num_generations_eval": 4,
                "build": {"eval_dataset": tiny.dataset(1)},
            },
            # three rollouts a pass, in another order each time
            "a stream": {"build": {"train_dataset": tiny.dataset(12).to_iterable_dataset()}},
            "dynamic sampling": {"dynamic_sampling": True, "build": {"reward_funcs": rounds.planted}},
            "R3 and kept sets": {
                **{"lora": True, "router_replay": "R3", "keep_sampling_mask": True, "top_k": 50, "top_p": 0.9},
                "generation_kwargs": {"logit_bias": {50: 1.0}},  # int keys
            },
            # two rollouts an epoch
            "an order of each epoch": {"build": {"train_dataset": tiny.dataset(8)}},
        }.items(),
        fast=1,
    ),
)
def test_a_resume_from_each_step_equals_the_whole_run(
    models: dict[str, Path],
    tmp_path: Path,
    server: Server,
    watched: Watched,
    mixture: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    own: dict[str, Any],
) -> None:
    options = {**SAVED, "save_steps": 1, **own}

    class Epochs(RepeatSampler):
        """TRL's sampler, in an order that the number of the epoch decides."""

        def set_epoch(self, epoch: int) -> None:
            self.generator.manual_seed(epoch)

    if "order" in kind:
        monkeypatch.setattr(grpo_trainer, "RepeatSampler", Epochs)
    server.config = {"model_config": {MASKED: "top_p" in options, ROUTED: "router_replay" in options}}
    model = mixture if "router_replay" in options else models["dense"]
    watched.seconds = 0.1  # so that a save has to wait
    torch.manual_seed(0)
    whole = tiny.train(ahead.build(server.url, model, tmp_path, **options))
    expected, count = ahead.state(whole), len(watched.asked)
    for step in (1, 11, 16) if kind != "a stream" else (1, 11):  # later passes are refused
        watched.asked.clear()
        trainer = ahead.build(server.url, model, tmp_path / "again", **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert differences(expected, ahead.state(trainer)) == [], step
        assert len(watched.asked) < count  # what is in the checkpoint is not asked again
        shutil.rmtree(tmp_path / "again")


def test_the_engine_of_a_resumed_run_is_compared(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    """In its second rollout, since the engine before it gave the answers of the first."""
    options = {"per_device_train_batch_size": 16, "steps_per_generation": 1, "save_strategy": "steps", "save_steps": 1}
    torch.manual_seed(0)
    tiny.train(ahead.build(server.url, models["dense"], tmp_path, **options))
    trainer = ahead.build(server.url, models["dense"], tmp_path / "again", **options, engine_check=1e-6)
    with pytest.raises(ValueError, match="engine_check=1e-06: engine and policy differ"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
