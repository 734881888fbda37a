"""Stages of one policy in one process: each is as if it had begun from a saved policy."""

from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from peft import LoraConfig

from tests.tools import resumable, tiny
from tests.tools.cases import cases
from trl_steady import RewardAdapter

PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1}
MOVING: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4}
STAGES: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "grpo": {"beta": 0.1},
    "moving": MOVING,
    "rloo": {"method": "RLOO", "beta": 0.1},
    "ppo, another critic": {**PPO, "build": {"value_peft_config": LoraConfig(r=2, target_modules=["k_proj"])}},
    "reward model": {"beta": 0.1, "reward model": True},
}

LEFT_ALONE = {
    ("ppo", "grpo"),
    ("grpo", "moving"),
}  # the first makes no adapter of the second's: its reference is the base


def build(model: Any, folder: Path, stage: str, reward: Path, **options: Any) -> Any:
    settings = {**STAGES[stage], **options}
    if settings.pop("reward model", False):
        settings["build"] = {"reward_funcs": [RewardAdapter(reward), tiny.reward]}
    return tiny.trainer(model, folder, **settings)


@pytest.fixture(scope="module")
def reward(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = transformers.AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    folder = tmp_path_factory.mktemp("reward")
    peft.get_peft_model(base, LoraConfig(**tiny.LORA, task_type="SEQ_CLS")).save_pretrained(folder)
    return folder


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("first", "second"),
    cases(
        [
            *(("ppo", "ppo"), ("ppo", "grpo"), ("grpo", "moving"), ("moving", "ppo"), ("reward model",) * 2),
            *(("ppo, another critic", "ppo"), ("moving", "moving"), ("moving", "rloo"), ("moving", "grpo")),
        ],
        (("ppo", "ppo"), ("moving", "grpo"), ("reward model",) * 2),
    ),
)
def test_a_second_stage_is_that_of_the_saved_policy(
    models: dict[str, Path], tmp_path: Path, reward: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reference is the policy at its start, its critic is new, and it resumes exactly."""
    trained = build(models["dense"], tmp_path / "first", first, reward, max_steps=3, lora=True)
    trained.train()
    trained.save_model(str(tmp_path / "saved"))
    capsys.readouterr()
    ends = []
    for name in ("saved", "same", "resumed"):
        policy = trained.model
        if name == "saved":
            base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
            policy = peft.PeftModel.from_pretrained(base, tmp_path / "saved", is_trainable=True)
        options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
        trainer = build(policy, tmp_path / name, second, reward, **options)
        replaced = "this run replaces the adapter" in capsys.readouterr().out
        assert replaced == (name == "resumed" or (name == "same" and (first, second) not in LEFT_ALONE))
        checkpoint = None if name != "resumed" else str(tmp_path / "same" / "checkpoint-2")
        trainer.train(resume_from_checkpoint=checkpoint)
        end = resumable.state(trainer)
        end["policy"] = {key: value for key, value in end["policy"].items() if ".default." in key}
        ends.append({key: end[key] for key in ("policy", "reference", "critic", "reward model", "history")})
    assert resumable.differences(ends[0], ends[1]) == []
    assert resumable.differences(ends[0], ends[2]) == []


def test_the_policys_own_adapter_is_not_replaced(models: dict[str, Path], tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    model = peft.get_peft_model(base, LoraConfig(**tiny.LORA), adapter_name="value")
    with pytest.raises(ValueError, match=r"the policy's adapter is named 'value'\. Load it under another name"):
        tiny.trainer(model, tmp_path, **PPO, kl_coef=0.0)
    assert list(model.peft_config) == ["value"]
