"""A checkpoint that an earlier version wrote (commit f4c8c51, LoRA, a moving reference, inside a window) resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.tools import tiny
from tests.tools.headroom import within

DATA = Path(__file__).parents[1] / "data" / "f4c8c51"
OPTIONS: dict[str, Any] = {
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "ref_model_sync_steps": 2,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "logging_steps": 2,
    "loss_type": "gspo",
    "off_policy_mask_threshold": 0.01,
    "save_strategy": "steps",
    "save_steps": 4,
    "build": {"train_dataset": tiny.dataset(6)},
}


def test_it_goes_on_with_its_rollout_its_metrics_and_the_move_that_is_due(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Update 4 is the last of the window. Before update 5 the reference moves, which was due at 2."""
    checkpoint = shutil.copytree(DATA / "checkpoint-3", tmp_path / "checkpoint-3")
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True, max_steps=5, **OPTIONS)
    rollouts = torch.load(checkpoint / "rollouts_0.pt", weights_only=True)
    with safe_open(checkpoint / "reference.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["trl_steady"])["due"] == "steps"
    generated: list[int] = []
    rollout = trainer.rollout
    trainer.rollout = lambda inputs: (generated.append(trainer.state.global_step), rollout(inputs))[1]
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 5 and generated == [4]
    assert [(step, rule) for step, _, rule in trainer.reference_refreshes] == [(4, "steps")]

    # update 4 was computed from the rollout, the optimizer and the reference of the checkpoint: what it reached then
    expected = load_file(DATA / "step-4.safetensors")
    found = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    before = load_file(checkpoint / "adapter_model.safetensors")
    for name, value in expected.items():
        # other kernels round the gradient, which Adam divides by its size: a hundredth of a step of 1e-2
        assert within((found[name] - value).abs().max(), 1e-4), name
    assert max((before[name] - value).abs().max() for name, value in expected.items()) > 1e-3

    # the log of step 4 is of updates 3 and 4: it has the metrics that the checkpoint held
    row = next(row for row in trainer.state.log_history if row["step"] == 4)
    mean, count = rollouts["pool"]["mean", "dropped/off_policy"]
    assert count == 4  # sequences of update 4
    assert row["dropped/off_policy"] * 2 * count >= mean
    assert row["kl"] > 0 and "ratio/sequence_min" in row
