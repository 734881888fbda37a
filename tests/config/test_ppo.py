"""`PPOConfig`: its defaults, the values and combinations that it refuses, and the warnings."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trl

from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES
from tests.tools.wrong_options import CONTRADICTIONS_PPO, IDLE_PPO, INVALID_PPO
from trl_steady import GRPOConfig, PPOConfig, PPOTrainer
from trl_steady.host.mistakes import PPO_NAMES

DEFAULTS = {
    "num_generations": 1,
    "gamma": 1.0,
    "lam": 0.95,
    "value_lam": None,
    "lam_length_alpha": None,
    "kl_coef": 0.05,
    "kl_target": None,
    "kl_horizon": 10000,
    "beta": 0.0,
    "cliprange_value": 0.2,
    "value_learning_rate": None,
    "value_warmup_steps": 0,
    "value_updates": 1,
    "value_init": "policy",
    "whiten_advantages": True,
    "whiten_rewards": False,
    "bootstrap_truncated": False,
    "missing_eos_penalty": None,
    "ptx_coef": 0.0,
}


def config(tmp_path: Path, **options: Any) -> PPOConfig:
    defaults = {"report_to": "none", "use_cpu": True, "bf16": False}
    return PPOConfig(str(tmp_path), **{**defaults, **options})


def test_the_defaults_are_those_of_the_documentation_and_grpos(tmp_path: Path) -> None:
    args = config(tmp_path)
    grpos = tiny.arguments(GRPOConfig, tmp_path)
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    assert {each.name for each in fields(PPOConfig)} - {each.name for each in fields(GRPOConfig)} <= DEFAULTS.keys()
    for name in ("loss_type", "epsilon", "trim_padding", "temperature", "scale_rewards"):
        assert getattr(args, name) == getattr(grpos, name)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (3, 1), (8, 4)])
def test_one_completion_of_a_prompt_is_enough(batch: int, accumulation: int, tmp_path: Path) -> None:
    """TRL's config refuses it, whatever the generation batch is."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    args = config(tmp_path, **sizes)
    assert type(args.num_generations) is int and args.num_generations == 1
    assert args.generation_batch_size == batch * accumulation
    with pytest.raises(ValueError, match="at least 2 generations"):
        trl.GRPOConfig(str(tmp_path), num_generations=1, use_cpu=True, bf16=False, **sizes)


def test_a_start_of_the_critic_may_be_a_path_or_a_name_on_the_hub(tmp_path: Path) -> None:
    assert config(tmp_path, value_init=tmp_path).value_init == str(tmp_path)
    for start in ("reward", "owner/critic-1.5B"):
        assert config(tmp_path, value_init=start).value_init == start


def test_an_unset_estimator_is_grpos_where_the_loss_has_a_kl(tmp_path: Path) -> None:
    assert config(tmp_path, beta=0.1, kl_coef=0.0).kl_estimator == "k3"
    assert config(tmp_path, beta=0.1, kl_coef=0.0, kl_estimator="k1").kl_estimator == "k1"


def test_names_of_other_packages_are_refused_with_ours(tmp_path: Path) -> None:
    for alias, ours in (("ppo_epochs", "num_iterations"), ("cliprange", "epsilon"), ("target_kl", "kl_target")):
        with pytest.raises(ValueError, match=rf"^{alias} is an option of another package's PPO\. Set {ours}\b"):
            config(tmp_path, **{alias: 0.5})


def test_every_name_to_use_exists_and_none_is_taken() -> None:
    options, construct = {each.name for each in fields(PPOConfig)}, PPOTrainer.__init__
    known = options.union(*(inspect.signature(construct, follow_wrapped=w).parameters for w in (True, False)))
    for ours, names in PPO_NAMES.items():
        assert {*re.sub(r" \(.*\)", "", ours).split(" and ")} <= known, ours
        assert not known & {*names.split()}


@pytest.mark.parametrize("option", INVALID_PPO)
def test_invalid_values_are_refused_by_name(option: str, tmp_path: Path) -> None:
    for value in INVALID_PPO[option]:
        with pytest.raises(ValueError, match=rf"^{option}={re.escape(repr(value))} cannot work\. Set {option} to \S"):
            config(tmp_path, **{option: value})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("options", "said"), CONTRADICTIONS_PPO, ids=str)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_loss_with_token_advantages_is_taken(tmp_path: Path) -> None:
    for loss_type in (*NATIVE_LOSS_TYPES, "gspo_token"):
        assert config(tmp_path, loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(("options", "said"), IDLE_PPO, ids=str)
def test_an_option_without_effect_warns_where_the_script_builds_the_config(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        config(tmp_path, **options)
    (warning,) = [each for each in caught if each.category is UserWarning]
    assert warning.filename == __file__


def test_a_reference_may_move_for_the_kl_in_the_reward_alone(tmp_path: Path) -> None:
    assert config(tmp_path, sync_ref_model=True).has_reference
    assert not config(tmp_path, kl_coef=0.0).has_reference
