"""PPO runs that are killed and resumed end as the run that was never killed, with policy, critic and coefficient."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from transformers.trainer_utils import get_last_checkpoint

import trl_steady
from tests.tools import resumable, tiny


class Between(transformers.TrainerCallback):
    """Tells auditors of the moment between the first and the second update of the critic in an optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sys.audit("tests.between", f"updates of step {state.global_step + 1}.")


TEXTS = Dataset.from_dict({"text": ["3+4=7", "ab11+12=23", "0", "5+5=10 and 6+6=12", "x"]})
# As in tests/tools/resumable.py: a window is 4 steps, an epoch 12, and the reference moves after 8 and 16. The first
# window and the checkpoint inside it are warm-up.
PPO: dict[str, Any] = {
    "method": "PPO",
    "num_generations": 1,
    "beta": 0.0,
    "kl_coef": 0.1,
    "kl_target": 0.05,
    "kl_horizon": 64,
    "value_updates": 2,
    "value_warmup_steps": 4,
    "value_learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "ptx_coef": 0.1,
    "build": {"train_dataset": tiny.dataset(24), "ptx_dataset": TEXTS, "callbacks": [Between()]},
}
SLOW = pytest.mark.slow


def folder(kind: str, models: dict[str, Path], wide: Path) -> Path:
    return wide if kind == "nf4" else models["dense"]


def build(kind: str, models: dict[str, Path], wide: Path, output: Path, **options: Any) -> Any:
    return resumable.build(kind, folder(kind, models, wide), output, **{**PPO, **options})


class Expected:
    """Ends of runs that nothing kills, each made when it is first asked for."""

    def __init__(self, models: dict[str, Path], wide: Path, factory: pytest.TempPathFactory) -> None:
        self._folders, self._factory = (models, wide), factory
        self._ends: dict[str, Any] = {}

    def __call__(self, kind: str) -> Any:
        if kind not in self._ends:
            output = self._factory.mktemp(kind)
            assert resumable.run(kind, folder(kind, *self._folders), output, **PPO) == 0
            self._ends[kind] = torch.load(output / "state.pt")
        return self._ends[kind]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(models, wide, tmp_path_factory)


KILLS: dict[str, tuple[tuple[str, str, int], int]] = {
    "while a checkpoint is written": (("open", "checkpoint-6/trainer_state.json", 1), 3),
    "between two updates of the critic": (("tests.between", "step 11.", 1), 9),
    "before a checkpoint is in its place": (("os.rename", "checkpoint-18", 4), 15),  # after three files of tensors
}
"""When, and where the resumed run goes on: 3 is inside a window of the warm-up, 6, 9 and 15 are inside others."""


FAST = {("lora", "between two updates of the critic")}


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        pytest.param(kind, moment, marks=[] if (kind, moment) in FAST else SLOW)
        for kind in resumable.KINDS
        for moment in KILLS
    ],
)
def test_a_killed_run_ends_as_if_it_had_not_been(
    kind: str, moment: str, models: dict[str, Path], wide: Path, tmp_path: Path, expected: Expected
) -> None:
    kill, step = KILLS[moment]
    model = folder(kind, models, wide)
    assert resumable.run(kind, model, tmp_path, kill=kill, **PPO) == -signal.SIGKILL
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / f"checkpoint-{step}")
    assert resumable.run(kind, model, tmp_path, **PPO) == 0
    assert resumable.differences(expected(kind), torch.load(tmp_path / "state.pt")) == []


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("lora", (1, 6)),
        ("full", (4,)),
        *(pytest.param(kind, range(1, 10), marks=SLOW) for kind in resumable.KINDS),
    ],
)
def test_every_checkpoint_resumes_exactly(
    kind: str, steps: Sequence[int], models: dict[str, Path], wide: Path, tmp_path: Path
) -> None:
    """In the warm-up, at the end of a window, and inside a window with a coefficient that has moved."""
    whole = tiny.train(build(kind, models, wide, tmp_path, max_steps=10, save_steps=1))
    unsaved = tiny.train(build(kind, models, wide, tmp_path / "unsaved", max_steps=10, save_strategy="no"))
    end = resumable.state(whole)
    assert resumable.differences(end, resumable.state(unsaved)) == []  # a save changes nothing
    assert whole.kl_coef != PPO["kl_coef"]
    for step in steps:
        resumed = build(kind, models, wide, tmp_path / "resumed", max_steps=10, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumable.differences(end, resumable.state(resumed)) == [], step


def test_a_trainer_that_has_trained_resumes_too(models: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """It keeps its optimizers."""
    trainer = tiny.train(build("lora", models, wide, tmp_path, max_steps=5, save_steps=2, save_total_limit=4))
    end = resumable.state(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumable.differences(end, resumable.state(trainer)) == []


def test_values_between_two_logs_are_kept(models: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """Saved after step 7 and logged after steps 5 and 10: the values of steps 6 and 7 are in the second log."""
    options = {"max_steps": 10, "save_steps": 7, "logging_steps": 5}
    whole = tiny.train(build("lora", models, wide, tmp_path, **options))
    resumed = build("lora", models, wide, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    expected, found = (
        [{k: v for k, v in row.items() if k != "loss"} for row in tiny.history(trainer)[:-1]]
        for trainer in (whole, resumed)  # transformers averages the loss over the steps since the resume
    )
    assert found == expected and {"value/loss", "value/grad_norm", "kl_coef", "ptx_loss"} <= found[1].keys()


def test_a_checkpoint_holds_the_critic_once(models: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """PEFT would write an adapter of its own for it, without the head."""
    for kind in ("lora", "full"):
        for moves in (True, False):
            output = tmp_path / f"{kind} {moves}"
            options = {"sync_ref_model": moves, "max_steps": 3, "kl_target": None}
            trainer = tiny.train(build(kind, models, wide, output, **options))
            checkpoint = output / "checkpoint-3"
            assert not [path for path in checkpoint.iterdir() if path.is_dir()]
            saved = load_file(checkpoint / "critic.safetensors")
            assert resumable.differences(trainer.critic.state(), saved) == [] and "score.weight" in saved
            weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
            with safe_open(checkpoint / weights, "pt") as policy:
                assert not [name for name in policy.keys() if "value" in name.split(".") or "score" in name]  # noqa: SIM118


def test_the_best_policy_gets_its_critic_back(models: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    options = {
        "build": {**PPO["build"], "eval_dataset": tiny.dataset(4)},
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "max_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "step",  # the first is the best
        "greater_is_better": False,
        "value_warmup_steps": 0,
    }

    class FirstIsBest(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_step"] = state.global_step

    trainer = build("lora", models, wide, tmp_path, **options)
    trainer.add_callback(FirstIsBest())
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert resumable.differences(trainer.critic.state(), load_file(best / "critic.safetensors")) == []
    last = load_file(tmp_path / "checkpoint-4" / "critic.safetensors")
    assert resumable.differences(trainer.critic.state(), last) != []
    with pytest.warns(UserWarning, match=r"the policy of .*checkpoint-2, which has no critic.*save_only_model"):
        trainer = build("lora", models, wide, tmp_path / "alone", save_only_model=True, **options)
        trainer.add_callback(FirstIsBest())
        trainer.train()


# what a resume refuses

PLAIN: dict[str, Any] = {**PPO, "sync_ref_model": False, "kl_target": None, "value_warmup_steps": 0, "ptx_coef": 0.0}
PLAIN["build"] = {"train_dataset": tiny.dataset(24)}
OF_GRPO = {
    name: value for name, value in PLAIN.items() if name in ("beta", "sync_ref_model", "build") and value is not None
}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with checkpoints after steps 2, inside a window, and 4, at its end."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("lora", "full", "model only", "grpo", "grpo full")}
    steps = {"max_steps": 4, "save_steps": 2}
    for name in ("lora", "full"):
        tiny.train(build(name, models, wide, folders[name], **{**PLAIN, **steps}))
    tiny.train(build("lora", models, wide, folders["model only"], **{**PLAIN, **steps, "save_only_model": True}))
    for name, kind in (("grpo", "lora"), ("grpo full", "full")):
        tiny.train(resumable.build(kind, models["dense"], folders[name], **{**OF_GRPO, **steps}))
    return folders


def refused(trainer: Any, checkpoint: Path, message: str) -> None:
    """A resume is refused with this message, before a step and before the policy is loaded."""
    before = tiny.parameters(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step in (0, int(checkpoint.name.split("-")[1]))
    if "holds" in message:
        assert resumable.differences(before, tiny.parameters(trainer)) == []


@pytest.mark.parametrize(
    ("run", "kind", "step"), [("grpo", "lora", 2), ("grpo full", "full", 4), ("model only", "lora", 4)]
)
def test_a_checkpoint_without_a_critic_is_refused(
    models: dict[str, Path], wide: Path, runs: dict[str, Path], tmp_path: Path, run: str, kind: str, step: int
) -> None:
    message = rf"checkpoint-{step} holds no critic\.safetensors, .*another critic.*save_only_model=False"
    refused(build(kind, models, wide, tmp_path, **PLAIN), runs[run] / f"checkpoint-{step}", message)


def test_another_critic_is_refused(models: dict[str, Path], wide: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    """On other layers, torch would say that a group of the optimizer does not match."""
    for changes in ({"r": 2}, {"target_modules": ["q_proj"]}):
        peft_config = LoraConfig(**{**tiny.LORA, **changes})
        other = {**PLAIN, "build": {**PLAIN["build"], "value_peft_config": peft_config}}
        trainer = build("lora", models, wide, tmp_path, **other)
        message = r"critic\.safetensors holds other weights: \d+ tensors differ .*value_peft_config\) of"
        refused(trainer, runs["lora"] / "checkpoint-4", message)
    smaller = transformers.AutoConfig.from_pretrained(models["dense"], num_hidden_layers=1, num_labels=1)
    value_model = AutoModelForSequenceClassification.from_config(smaller)
    other = {**PLAIN, "build": {**PLAIN["build"], "value_model": value_model}}
    trainer = build("full", models, wide, tmp_path, **other)
    refused(trainer, runs["full"] / "checkpoint-4", r"holds other weights: 12 tensors differ")


CHANGES: dict[str, Any] = {
    "gamma": 0.9,
    "lam": 0.5,
    "value_lam": 1.0,
    "lam_length_alpha": 0.05,
    "kl_coef": 0.2,
    "whiten_advantages": False,
    "whiten_rewards": True,
    "bootstrap_truncated": True,
    "missing_eos_penalty": 1.0,
}
"""Options of PPO that the advantages of a rollout depend on."""
FREE: dict[str, Any] = {
    "cliprange_value": 0.5,
    "value_updates": 3,
    "value_learning_rate": 1e-3,
    "value_warmup_steps": 3,
    "kl_target": 1.0,
    "kl_horizon": 8,
    "ptx_coef": 0.5,
    "value_init": "policy",
}
"""Options of PPO that a resume inside a window may change."""


def test_every_option_of_ppo_is_one_or_the_other() -> None:
    own = {name for name in vars(trl_steady.PPOConfig)["__annotations__"] if not name.startswith("_")}
    assert own - {"num_generations", "beta", "kl_estimator"} == CHANGES.keys() | FREE.keys()  # those are TRL's too


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_the_next_window_has_the_coefficient_of_the_options(
    models: dict[str, Path], wide: Path, runs: dict[str, Path], tmp_path: Path, kl_coef: float
) -> None:
    """Unless the coefficient adapts: then the one of the checkpoint goes on."""
    options = {**PLAIN, "kl_coef": kl_coef, "max_steps": 6}
    trainer = build("lora", models, wide, tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(runs["lora"] / "checkpoint-4"))
    assert trainer.kl_coef == kl_coef
    row = next(row for row in tiny.history(trainer) if row["step"] == 5)
    assert row["kl_coef"] == kl_coef and ("kl" in row) == (kl_coef != 0)
