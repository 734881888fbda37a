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
    """Folders with checkpoints after steps 2, inside a window, and 4, at its end."""
    names = ("lora", "full", "model only", "kept", "grpo", "grpo full")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    steps = {"max_steps": 4, "save_steps": 2}
    for name in ("lora", "full"):
        tiny.train(build(name, models["dense"], folders[name], **steps))
    tiny.train(build("lora", models["dense"], folders["model only"], save_only_model=True, **steps))
    tiny.train(build("lora", models["dense"], folders["kept"], retrained=False, **steps))
    for name, kind in (("grpo", "lora"), ("grpo full", "full")):
        tiny.train(resumable.build(kind, models["dense"], folders[name], **steps))
    return folders


def refused(trainer: Any, checkpoint: Path, message: str) -> None:
    """A resume is refused with this message before a step, and before anything is loaded."""
    state = lambda: [tiny.parameters(trainer), resumable.of_reward_model(trainer.part(RewardModelPart))]
    before = state()
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert resumable.differences(before, state()) == []


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize(("name", "kind"), [("grpo", "lora"), ("grpo full", "full"), ("model only", "lora")])
def test_a_checkpoint_without_a_reward_model_is_refused(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, name: str, kind: str, step: int
) -> None:
    message = (
        rf"checkpoint-{step} holds no reward_model\.safetensors: it was written without a RewardAdapter, or with "
        r"save_only_model=True, and a resume would begin with another reward model\. Begin a new run from its model\."
    )
    refused(build(kind, models["dense"], tmp_path), runs[name] / f"checkpoint-{step}", message)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_trainer_without_a_reward_model_refuses_a_checkpoint_with_one(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, kind: str, step: int
) -> None:
    message = (
        rf"checkpoint-{step} holds a reward model \(reward_model\.safetensors\), and reward_funcs has no "
        r"RewardAdapter\. Build the trainer as in the run that wrote it\."
    )
    trainer = resumable.build(kind, models["dense"], tmp_path)
    refused(trainer, runs[kind] / f"checkpoint-{step}", message)


@pytest.mark.parametrize("changes", [{"r": 2}, {"target_modules": ["q_proj"]}])
def test_another_reward_model_is_refused(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    adapter = RewardAdapter(peft_config=LoraConfig(**{**tiny.LORA, **changes}))
    trainer = build("lora", models["dense"], tmp_path, build={"reward_funcs": adapter})
    message = r"reward_model\.safetensors holds other weights: \d+ tensors differ .*configurations \(peft_config"
    refused(trainer, runs["lora"] / "checkpoint-4", message)


def test_retraining_neither_begins_nor_ends_with_a_resume(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    message = (
        r"checkpoint-4 holds no reward_refresh\.pt: the run that wrote it did not retrain its reward model\. Resume "
        r"without RewardModelRefreshCallback, or begin a new run from its model\."
    )
    refused(build("lora", models["dense"], tmp_path), runs["kept"] / "checkpoint-4", message)
    message = (
        r"checkpoint-4 holds a reward model that learns \(reward_refresh\.pt\), and in this run nothing trains it\. "
        r"Add a RewardModelRefreshCallback, as in the run that wrote it\."
    )
    trainer = build("lora", models["dense"], tmp_path, retrained=False)
    refused(trainer, runs["lora"] / "checkpoint-4", message)
    resumed = build("lora", models["dense"], tmp_path, retrained=False, max_steps=5)
    resumed.train(resume_from_checkpoint=str(runs["kept"] / "checkpoint-4"))
    assert resumed.state.global_step == 5


def test_another_objective_is_refused(models: dict[str, Path], runs: dict[str, Path], tmp_path: Path) -> None:
    """The history has pairs or single answers. A batch of both would be read as one of them."""
    trainer = build("lora", models["dense"], tmp_path, changes={"objective": "pairs"})
    message = r"checkpoint-4 holds examples of objective='pointwise', and this run has objective='pairs'\. Set it to"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(runs["lora"] / "checkpoint-4"))


def test_other_options_of_the_retraining_may_change(
    models: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    changes = {"replay_fraction": 0.5, "epochs": 1, "history": 4, "accept": "held_out_not_worse"}
    trainer = build("lora", models["dense"], tmp_path, changes=changes, max_steps=17, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(runs["lora"] / "checkpoint-2"))
    assert [refresh.step for refresh in trainer.reward_refreshes] == [8, 16]
    assert len(rewarding.refresher(trainer).history) == 4


@pytest.fixture(scope="module")
def refreshed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after step 9, of a run that has retrained the reward model once."""
    output = tmp_path_factory.mktemp("refreshed")
    tiny.train(build("lora", models["dense"], output, max_steps=9, save_steps=9))
    return output / "checkpoint-9"


def test_another_size_of_the_history_is_refused(models: dict[str, Path], tmp_path: Path, refreshed: Path) -> None:
    """A smaller one would not be uniform over what was seen."""
    trainer = build("lora", models["dense"], tmp_path, changes={"history": 5})
    with pytest.raises(ValueError, match=r"holds examples of history=8, and this run has history=5\. Set it to"):
        trainer.train(resume_from_checkpoint=str(refreshed))


def test_a_resume_may_change_the_learning_rate(models: dict[str, Path], tmp_path: Path, refreshed: Path) -> None:
    trainer = build("lora", models["dense"], tmp_path, changes={"learning_rate": 0.5}, max_steps=10)
    trainer.train(resume_from_checkpoint=str(refreshed))
    optimizer = rewarding.refresher(trainer).optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] and optimizer.state
