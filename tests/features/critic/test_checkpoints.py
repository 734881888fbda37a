"""PPO runs that are resumed end as the run that was never stopped, with policy, critic and coefficient."""

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file

import trl_steady
from tests.features.critic.tools import refused
from tests.tools import resumable, tiny
from trl_steady.config.options import InRollout, marked

TEXTS = ["3+4=7", "ab11+12=23", "0", "5+5=10 and 6+6=12", "x"]
# As in tests/tools/resumable.py: a window is 4 steps, an epoch 12, and the reference moves after 8 and 16. The first
# window and the checkpoint inside it are warm-up.
PPO: dict[str, Any] = {
    "method": "PPO",
    "num_generations": 1,
    "beta": 0.0,
    "kl_coef": 0.1,
    "kl_target": 0.05,
    "kl_horizon": 64,
    "value_warmup_steps": 4,
    "value_learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "ptx_coef": 0.1,
    "build": {"train_dataset": tiny.dataset(24), "ptx_dataset": Dataset.from_dict({"text": TEXTS})},
}


def build(kind: str, model_of: Any, output: Path, **options: Any) -> Any:
    return resumable.build(kind, model_of(kind), output, **{**PPO, **options})


def test_a_checkpoint_resumes_exactly_and_a_save_changes_nothing(model_of: Any, tmp_path: Path) -> None:
    """Inside a window of the warm-up, and inside one with a coefficient that has moved."""
    whole = tiny.train(build("lora", model_of, tmp_path, max_steps=10, save_steps=3))
    unsaved = tiny.train(build("lora", model_of, tmp_path / "unsaved", max_steps=10, save_strategy="no"))
    end = resumable.state(whole)
    assert resumable.differences(end, resumable.state(unsaved)) == []
    assert whole.kl_coef != PPO["kl_coef"]
    for step in (3, 6):
        resumed = build("lora", model_of, tmp_path / "resumed", max_steps=10, save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumable.differences(end, resumable.state(resumed)) == [], step


def test_a_checkpoint_holds_the_critic_once(model_of: Any, tmp_path: Path) -> None:
    """PEFT would write an adapter of its own for it, without the head."""
    for kind in ("lora", "full"):
        for moves in (True, False):
            output = tmp_path / f"{kind} {moves}"
            options = {"sync_ref_model": moves, "max_steps": 1, "save_steps": 1, "kl_target": None}
            trainer = tiny.train(build(kind, model_of, output, **options))
            checkpoint = output / "checkpoint-1"
            assert not [path for path in checkpoint.iterdir() if path.is_dir()]
            saved = load_file(checkpoint / "critic.safetensors")
            assert resumable.differences(trainer.critic.state(), saved) == [] and "score.weight" in saved
            weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
            with safe_open(checkpoint / weights, "pt") as policy:
                assert not [name for name in policy.keys() if "value" in name.split(".") or "score" in name]  # noqa: SIM118


# what a resume refuses

PLAIN: dict[str, Any] = {
    **{**PPO, "sync_ref_model": False, "kl_target": None, "value_warmup_steps": 0, "ptx_coef": 0.0},
    "build": {"train_dataset": tiny.dataset(24)},
}


@pytest.fixture(scope="module")
def runs(model_of: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with checkpoints after steps 2, inside a window, and 4, at its end."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("lora", "model only", "grpo")}
    steps = {"max_steps": 4, "save_steps": 2}
    tiny.train(build("lora", model_of, folders["lora"], **{**PLAIN, **steps}))
    tiny.train(build("lora", model_of, folders["model only"], **{**PLAIN, **steps, "save_only_model": True}))
    of_grpo = {name: PLAIN[name] for name in ("beta", "sync_ref_model", "build")}
    tiny.train(resumable.build("lora", model_of("lora"), folders["grpo"], **of_grpo, **steps))
    return folders


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("run", "step", "why"),
    [
        ("grpo", 2, r"holds no critic\.safetensors, .*another critic.*save_only_model=False"),
        ("model only", 4, "is incomplete: it holds no optimizer .*save_only_model=True"),
    ],
)
def test_a_checkpoint_without_a_critic_is_refused(
    model_of: Any, runs: dict[str, Path], tmp_path: Path, run: str, step: int, why: str
) -> None:
    refused(build("lora", model_of, tmp_path, **PLAIN), runs[run] / f"checkpoint-{step}", f"checkpoint-{step} {why}")


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 2}, r"critic\.safetensors holds other weights: \d+ tensors differ .*value_peft_config\) of"),
        ({"lora_alpha": 16}, r"critic\.safetensors holds an adapter with\s+lora_alpha=8; this run has lora_alpha=16"),
        ({"use_rslora": True}, r"critic\.safetensors holds an adapter with\s+use_rslora=False.*\s.*value_peft_config"),
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [2, 4])
def test_another_critic_is_refused(
    model_of: Any, runs: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str, step: int
) -> None:
    other = {**PLAIN, "build": {**PLAIN["build"], "value_peft_config": LoraConfig(**{**tiny.LORA, **change})}}
    refused(build("lora", model_of, tmp_path, **other), runs["lora"] / f"checkpoint-{step}", message)


def test_the_critics_dropout_may_change(
    model_of: Any, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LoraConfig(**{**tiny.LORA, "lora_dropout": 0.1})
    trainer = build("lora", model_of, tmp_path, **{**PLAIN, "build": {**PLAIN["build"], "value_peft_config": config}})
    trainer.checkpoints.load(runs["lora"] / "checkpoint-4")
    assert re.search(r"critic\.safetensors holds .*\s+lora_dropout=0.0; .* lora_dropout=0.1", capsys.readouterr().out)


def test_every_option_of_ppo_is_one_or_the_other() -> None:
    FREE = {
        *("cliprange_value", "value_learning_rate", "value_warmup_steps", "value_init", "ptx_coef"),
        *("kl_target", "kl_horizon", "num_generations", "kl_estimator"),
    }

    own = {name for name in vars(trl_steady.PPOConfig)["__annotations__"] if not name.startswith("_")}
    in_rollout = marked(trl_steady.PPOConfig, InRollout).keys() - marked(trl_steady.GRPOConfig, InRollout).keys()
    assert own == in_rollout | FREE


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_the_next_window_has_the_coefficient_of_the_options(
    model_of: Any, runs: dict[str, Path], tmp_path: Path, kl_coef: float
) -> None:
    """Unless the coefficient adapts: then the one of the checkpoint goes on."""
    options = {**PLAIN, "kl_coef": kl_coef, "max_steps": 6}
    trainer = build("lora", model_of, tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(runs["lora"] / "checkpoint-4"))
    assert trainer.kl_coef == kl_coef
    row = next(row for row in tiny.history(trainer) if row["step"] == 5)
    assert row["kl_coef"] == kl_coef and ("kl" in row) == (kl_coef != 0)
