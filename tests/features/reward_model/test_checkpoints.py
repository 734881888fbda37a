"""Runs that retrain their reward model end as the run that was never killed, wherever they were killed and resumed."""

import contextlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from tests.features.critic import tools as critics
from tests.features.critic.tools import refused
from tests.features.reward_model import tools as rewarding
from tests.features.reward_model.tools import build_resumable as build
from tests.features.reward_model.tools import resumable_options
from tests.tools import resumable, tiny
from tests.tools.cases import cases
from trl_steady.features.reward_model.feature import RewardModel


@pytest.mark.parametrize("kind", cases(resumable.KINDS, fast=0))
def test_a_killed_run_ends_as_if_it_had_not_been(kind: str, model_of: Any, tmp_path: Path) -> None:
    """Both have retrained the reward model twice, the second time with examples of the first."""
    model, killed, options = model_of(kind), tmp_path / "killed", resumable_options(kind)
    between_updates = ("tests.update", "retraining 2.", 2)
    assert resumable.run(kind, model, killed, kill=between_updates, **options) == -signal.SIGKILL
    assert get_last_checkpoint(str(killed)) == str(killed / "checkpoint-15")
    assert resumable.run(kind, model, killed, **options) == 0
    expected = resumable.state(tiny.train(build(kind, model, tmp_path / "whole")))
    assert resumable.differences(expected, torch.load(killed / "state.pt")) == []
    first, second = expected["reward model"]["refreshes"]
    assert (first[0], second[0]) == (8, 16) == tuple(step for step, _, _ in expected["refreshes"])
    assert first[2] == 0 < second[2] and first[1] > 0 < second[1]
    assert expected["reward model"]["completions"] and expected["reward model"]["rollouts"] == 5


def test_every_checkpoint_resumes_exactly(models: dict[str, Path], tmp_path: Path) -> None:
    """With answers of an iteration, right before the reward model is retrained, and after that."""
    whole = tiny.train(build("lora", models["dense"], tmp_path, max_steps=12, save_steps=1))
    end = resumable.state(whole)
    for step in (4, 8, 9):
        resumed = build("lora", models["dense"], tmp_path / f"resumed at {step}", max_steps=12, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumable.differences(end, resumable.state(resumed)) == [], step


def test_a_trainer_that_has_trained_resumes_too(models: dict[str, Path], tmp_path: Path) -> None:
    """It has a reward model, an optimizer and a history that are ahead of the checkpoint."""
    trainer = tiny.train(build("lora", models["dense"], tmp_path, max_steps=9, save_steps=6, changes={"history": 100}))
    end = resumable.state(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumable.differences(end, resumable.state(trainer)) == []


def test_dropout_of_the_base_acts_in_the_training_of_the_reward_model_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """A resumed run may begin with a retraining, before transformers has switched the model to training."""
    model = tmp_path / "model"
    shutil.copytree(models["dense"], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    whole = build("lora", model, tmp_path, max_steps=9, save_steps=8)
    feature, answers = whole.feature(RewardModel), [list(range(60, 68)), list(range(80, 88))]
    whole.model.train()
    feature._prompt_ids = [[70, 71], [72]]
    first, second = (feature.adapter(["", ""], ["", ""], answers) for _ in range(2))
    assert first == second and first[0] != first[1]
    rewarding.refresher(whole)._completions.clear()
    whole.train()
    resumed = build("lora", model, tmp_path / "resumed", max_steps=9, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert resumable.differences(resumable.state(whole), resumable.state(resumed)) == []
    without = build("lora", models["dense"], tmp_path / "without", max_steps=9, save_strategy="no")
    without.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    weights = [resumable.state(trainer)["reward model"]["weights"] for trainer in (whole, without)]
    assert resumable.differences(*weights) != []  # dropout acted


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("saves_model_only", [False, True])
def test_the_best_policy_gets_its_reward_model_and_critic_back(
    models: dict[str, Path], tmp_path: Path, saves_model_only: bool
) -> None:
    options: dict[str, Any] = {
        **{"method": "PPO", "num_generations": 1, "beta": 0.0, "kl_coef": 0.1},
        **{"eval_strategy": "steps", "save_steps": 4, "eval_steps": 4, "max_steps": 10},
        **{"metric_for_best_model": "step", "greater_is_better": False},
        **{"load_best_model_at_end": True, "save_only_model": saves_model_only},
        **{
            "build": {"train_dataset": tiny.dataset(24), "eval_dataset": tiny.dataset(4)},
            "per_device_eval_batch_size": 4,
        },
    }
    trainer = build("lora", models["dense"], tmp_path, **options)

    class Stamp(transformers.TrainerCallback):
        """Makes the first evaluation the best."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_step"] = state.global_step

    trainer.add_callback(Stamp())
    says = pytest.warns(UserWarning, match="which has no reward model")
    with says if saves_model_only else contextlib.nullcontext():
        trainer.train()
    best = tmp_path / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best) and len(trainer.reward_refreshes) == 1
    if not saves_model_only:
        assert critics.same(trainer.reward_model.state(), load_file(best / "reward_model.safetensors"))
        assert critics.same(trainer.critic.state(), load_file(best / "critic.safetensors"))


# what a resume refuses, and what it may change


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


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("name", "kind", "options", "message"),
    [
        pytest.param("grpo full", "full", {}, r"holds no reward_model\.safetensors", id="no reward model"),
        pytest.param(
            "lora", "lora", {"retrained": False}, r"has reward_refresh\.pt, .*Build the trainer", id="a retraining"
        ),
        pytest.param(
            "lora",
            "lora",
            {"changes": {"objective": "pairs"}},
            r"'pointwise'.*'pairs'.* same values",
            id="another objective",
        ),
        pytest.param(
            "refreshed",
            "lora",
            {"changes": {"history": 5}},
            r"'pointwise', 8.*'pointwise', 5",
            id="another size of the history",
        ),
    ],
)
def test_a_checkpoint_of_another_reward_model_is_refused(
    name: str,
    kind: str,
    options: dict[str, Any],
    message: str,
    models: dict[str, Path],
    runs: dict[str, Path],
    tmp_path: Path,
) -> None:
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
