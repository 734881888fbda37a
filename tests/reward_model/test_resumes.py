"""What a resume of a run with a reward model refuses, and what it may change."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.reward_model.test_checkpoints import build
from tests.tools import resumable, rewarding, tiny
from trl_steady import RewardAdapter
from trl_steady.reward_model.part import RewardModelPart


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after step 2, inside a window; of "refreshed" after step 9, with a history."""
    names = ("lora", "model only", "kept", "grpo full", "refreshed")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    steps = {"max_steps": 2, "save_steps": 2}
    tiny.train(build("lora", models["dense"], folders["lora"], **steps))
    tiny.train(build("lora", models["dense"], folders["model only"], save_only_model=True, **steps))
    tiny.train(build("lora", models["dense"], folders["kept"], retrained=False, **steps))
    tiny.train(resumable.build("full", models["dense"], folders["grpo full"], **steps))
    tiny.train(build("lora", models["dense"], folders["refreshed"], max_steps=9, save_steps=9))
    return {name: path / f"checkpoint-{9 if name == 'refreshed' else 2}" for name, path in folders.items()}


def with_rank(rank: int) -> dict[str, Any]:
    return {"build": {"reward_funcs": RewardAdapter(peft_config=LoraConfig(**{**tiny.LORA, "r": rank}))}}


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no reward model": (
        "grpo full",
        "full",
        {},
        r"without RewardAdapter .*reward_model\.safetensors.*Build the trainer",
    ),
    "no files of a resume": ("model only", "lora", {}, r"without RewardAdapter or with save_only_model=True"),
    "a reward model of another rank": ("lora", "lora", with_rank(2), r"other weights: \d+ tensors .*peft_config"),
    "no retraining": ("kept", "lora", {}, r"without RewardModelRefreshCallback .*reward_refresh\.pt"),
    "a retraining": ("lora", "lora", {"retrained": False}, r"written with RewardModelRefreshCallback .*Build the tr"),
    "another objective": ("lora", "lora", {"changes": {"objective": "pairs"}}, r"'pointwise'.*'pairs'.* same values"),
    "another size of the history": ("refreshed", "lora", {"changes": {"history": 5}}, r"'history': 8.*'history': 5"),
}


def refused(trainer: Any, checkpoint: Path, message: str) -> None:
    """A resume is refused with this message before a step, and before anything is loaded."""
    state = lambda: [tiny.parameters(trainer), resumable.of_reward_model(trainer.part(RewardModelPart))]
    before = state()
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert resumable.differences(before, state()) == []


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
    refused(trainer, runs["lora"], r"written with RewardAdapter \(reward_model\.safetensors\)")


def test_a_reward_model_that_does_not_learn_resumes(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    resumed = build("lora", models["dense"], tmp_path, retrained=False, max_steps=3)
    resumed.train(resume_from_checkpoint=str(runs["kept"]))
    assert resumed.state.global_step == 3


def test_other_options_of_the_retraining_may_change(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    """The history too, before it has examples."""
    changes = {"replay_fraction": 0.5, "epochs": 1, "history": 4, "accept": "held_out_not_worse", "learning_rate": 0.5}
    trainer = build("lora", models["dense"], tmp_path, changes=changes, max_steps=9, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(runs["lora"]))
    assert [refresh.step for refresh in trainer.reward_refreshes] == [8]
    refresher = rewarding.refresher(trainer)
    assert len(refresher.history) == 4
    assert {group["lr"] for group in refresher.learner.optimizer.param_groups} == {0.5}
