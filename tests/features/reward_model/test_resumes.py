"""What a resume of a run with a reward model refuses, and what it may change."""

from pathlib import Path
from typing import Any

import pytest

from tests.features.reward_model.test_checkpoints import build
from tests.tools import resumable, tiny


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after step 2, inside a window; of "refreshed" after step 9, with a history."""
    names = ("lora", "kept", "grpo full", "refreshed")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    steps = {"max_steps": 2, "save_steps": 2}
    tiny.train(build("lora", models["dense"], folders["lora"], **steps))
    tiny.train(build("lora", models["dense"], folders["kept"], retrained=False, **steps))
    tiny.train(resumable.build("full", models["dense"], folders["grpo full"], **steps))
    tiny.train(build("lora", models["dense"], folders["refreshed"], max_steps=9, save_steps=9))
    return {name: path / f"checkpoint-{9 if name == 'refreshed' else 2}" for name, path in folders.items()}


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no reward model": ("grpo full", "full", {}, r"holds no reward_model\.safetensors"),
    "a retraining": ("lora", "lora", {"retrained": False}, r"has reward_refresh\.pt, .*Build the trainer"),
    "another objective": ("lora", "lora", {"changes": {"objective": "pairs"}}, r"'pointwise'.*'pairs'.* same values"),
    "another size of the history": (
        "refreshed",
        "lora",
        {"changes": {"history": 5}},
        r"'pointwise', 8.*'pointwise', 5",
    ),
}


def refused(trainer: Any, checkpoint: Path, message: str) -> None:
    """A resume is refused with this message, before a step."""
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step in (0, int(checkpoint.name.split("-")[1]))


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_another_reward_model_is_refused(
    case: str, models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    name, kind, options, message = REFUSED[case]
    refused(build(kind, models["dense"], tmp_path, **options), runs[name], message)


def test_a_trainer_without_a_reward_model_refuses_a_checkpoint_with_one(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = resumable.build("lora", models["dense"], tmp_path)
    refused(trainer, runs["lora"], r"has reward_model\.safetensors, .*Build the trainer")


def test_a_reward_model_that_does_not_learn_resumes(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    resumed = build("lora", models["dense"], tmp_path, retrained=False, max_steps=3)
    resumed.train(resume_from_checkpoint=str(runs["kept"]))
    assert resumed.state.global_step == 3
