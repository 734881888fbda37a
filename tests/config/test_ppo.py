"""`PPOConfig`: its defaults, the values and combinations that it refuses, and the warnings."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.config.wrong_options import INVALID_PPO
from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES
from trl_steady import GRPOConfig, PPOConfig

DEFAULTS = {
    **{"num_generations": 1, "gamma": 1.0, "lam": 0.95, "value_lam": None, "kl_coef": 0.05, "kl_target": None},
    **{"kl_horizon": 10000, "beta": 0.0, "cliprange_value": 0.2, "value_learning_rate": None, "ptx_coef": 0.0},
    **{"value_warmup_steps": 0, "value_init": "policy", "whiten_advantages": True, "whiten_rewards": False},
    **{"bootstrap_truncated": False, "missing_eos_penalty": None},
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


def test_one_completion_of_a_prompt_is_enough(tmp_path: Path) -> None:
    args = config(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert type(args.num_generations) is int and args.num_generations == 1 and args.generation_batch_size == 12


def test_the_start_of_the_critic_may_be_a_path(tmp_path: Path) -> None:
    assert config(tmp_path, value_init=tmp_path).value_init == str(tmp_path)


def test_an_unset_estimator_is_grpos_where_the_loss_has_a_kl(tmp_path: Path) -> None:
    assert config(tmp_path, beta=0.1, kl_coef=0.0).kl_estimator == "k3"
    assert config(tmp_path, beta=0.1, kl_coef=0.0, kl_estimator="k1").kl_estimator == "k1"


@pytest.mark.parametrize("option", INVALID_PPO)
def test_invalid_values_are_refused_by_name(option: str, tmp_path: Path) -> None:
    for value in INVALID_PPO[option]:
        with pytest.raises(ValueError, match=rf"^{option}={re.escape(repr(value))} cannot work\. Set {option} to \S"):
            config(tmp_path, **{option: value})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": "gspo"}, r"loss_type='gspo' with .* does not work with PPO.*'gspo_token'"),
        ({"importance_sampling_level": "sequence"}, r"importance_sampling_level='sequence' does not work with PPO"),
        ({"optim": "galore_adamw_layerwise"}, r"optim='galore_adamw_layerwise' takes"),
        ({"beta_column": "strength", "beta": 0.1}, r"beta_column='strength' scales beta, not kl_coef=0\.05\. Set kl"),
        (
            {"skip_old_pass": True, "steps_per_generation": 1},
            r"skip_old_pass=True does not work with kl_coef=0\.05: the KL in the rew",
        ),
        ({"dynamic_sampling": True}, r"num_generations=1: the rewards of one answer cannot differ"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_loss_with_token_advantages_is_taken(tmp_path: Path) -> None:
    for loss_type in (*NATIVE_LOSS_TYPES, "gspo_token"):
        assert config(tmp_path, loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale_rewards": "none"}, r"scale_rewards='none' has no effect because the critic"),
        ({"kl_estimator": "k3"}, r"kl_estimator='k3' has no effect because beta=0\.0"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, r"kl_target=6\.0 has no effect because kl_coef=0\.0"),
        ({"kl_horizon": 5}, r"kl_horizon=5 has no effect because kl_target=None"),
        ({"mask_truncated_completions": True, "missing_eos_penalty": 1.0}, r"=1\.0 has no effect because mask_trunc"),
    ],
    ids=str,
)
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
