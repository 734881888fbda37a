"""`PPOConfig`: its defaults, the values and combinations that it refuses, and the warnings."""

import inspect
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trl

from tests.tools import tiny
from trl_steady import GRPOConfig, PPOConfig, PPOTrainer
from trl_steady.config import ppo

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
    assert {own.name for own in fields(PPOConfig)} - {own.name for own in fields(GRPOConfig)} <= DEFAULTS.keys()
    for name in ("loss_type", "epsilon", "trim_padding", "temperature", "scale_rewards"):
        assert getattr(args, name) == getattr(grpos, name)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (1, 3), (3, 1), (8, 4)])
def test_one_completion_of_a_prompt_is_enough(batch: int, accumulation: int, tmp_path: Path) -> None:
    """TRL's config refuses it, whatever the generation batch is."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    args = config(tmp_path, **sizes)
    assert type(args.num_generations) is int and args.num_generations == 1
    assert args.generation_batch_size == batch * accumulation
    with pytest.raises(ValueError, match="at least 2 generations"):
        trl.GRPOConfig(str(tmp_path), num_generations=1, use_cpu=True, bf16=False, **sizes)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "one", None])
def test_a_count_that_is_none_is_refused(count: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^num_generations=.* or 1 or more with PPO\.$"):
        config(tmp_path, num_generations=count)


def test_a_start_of_the_critic_may_be_a_path_or_a_name_on_the_hub(tmp_path: Path) -> None:
    assert config(tmp_path, value_init=tmp_path).value_init == str(tmp_path)
    for start in ("reward", "owner/critic-1.5B"):
        assert config(tmp_path, value_init=start).value_init == start


def test_an_estimator_that_the_reward_does_not_read_is_told(tmp_path: Path) -> None:
    """TRL's former PPO and OpenRLHF read an option of this name there."""
    for estimator in ("k1", "k2", "k3"):
        with pytest.warns(
            UserWarning, match=rf"^kl_estimator='{estimator}' cannot act: .* in the reward is always k1"
        ):
            config(tmp_path, kl_estimator=estimator)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert config(tmp_path, kl_estimator=estimator, beta=0.1, kl_coef=0.0).kl_estimator == estimator
    assert config(tmp_path, beta=0.1, kl_coef=0.0).kl_estimator == "k3"  # unset, as in GRPO


@pytest.mark.parametrize(
    ("alias", "ours"),
    [
        *(("ppo_epochs", "num_iterations"), ("max_epochs", "num_iterations"), ("clip_ratio", "epsilon")),
        *(("eps_clip", "epsilon"), ("target_kl", "kl_target"), ("kl_penalty", "kl_coef"), ("lambd", "lam")),
        *(
            ("kl_loss_coef", "beta"),
            ("n_samples_per_prompt", "num_generations"),
            ("reward_model_path", "reward_funcs"),
        ),
        ("cliprange", "epsilon"),
        ("num_ppo_epochs", "num_iterations"),
        ("num_mini_batches", "steps_per_generation"),
        ("vf_coef", "value_learning_rate"),
        ("init_kl_coef", "kl_coef"),
        ("gae_lambda", "lam"),
        ("critic_warmup", "value_warmup_steps"),
        ("response_length", "max_completion_length"),
        ("value_clip", "cliprange_value"),
    ],
)
def test_names_of_other_packages_are_refused_with_ours(alias: str, ours: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{alias}=0\.5 is an option of another package's PPO\. Set {ours} "):
        config(tmp_path, **{alias: 0.5})


def test_every_name_to_use_exists_and_none_is_taken() -> None:
    options, own = {own.name for own in fields(PPOConfig)}, PPOTrainer.__init__
    arguments = {*inspect.signature(own).parameters, *inspect.signature(own, follow_wrapped=False).parameters}
    for ours in ppo._NAMES:
        assert {*re.sub(r" \(.*\)", "", ours).split(" and ")} <= options | arguments, ours
    assert not ppo._ALIASES.keys() & (options | arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 1.1}, "gamma=1.1 cannot work. Set gamma to between 0 and 1."),
        ({"lam": -0.1}, "lam=-0.1 cannot work"),
        ({"value_lam": 2}, "value_lam=2 cannot work"),
        ({"lam_length_alpha": 0}, "lam_length_alpha=0 cannot work"),
        ({"kl_coef": -1}, "kl_coef=-1 cannot work"),
        ({"kl_target": 0}, "kl_target=0 cannot work"),
        ({"kl_horizon": 0}, "kl_horizon=0 cannot work"),
        ({"cliprange_value": 0}, "cliprange_value=0 cannot work"),
        ({"value_learning_rate": -1e-5}, "value_learning_rate=-1e-05 cannot work"),
        ({"value_warmup_steps": -1}, "value_warmup_steps=-1 cannot work"),
        ({"value_updates": 0}, "value_updates=0 cannot work"),
        ({"value_init": ""}, "value_init='' cannot work"),
        ({"value_init": "polcy"}, "value_init='polcy' cannot work. Set value_init to 'policy', 'reward', an existing"),
        ({"value_init": "runs/no-such/value"}, "value_init='runs/no-such/value' cannot work"),
        ({"missing_eos_penalty": float("nan")}, "missing_eos_penalty=nan cannot work"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 cannot work. Set missing_eos_penalty to a finite"),
        ({"ptx_coef": -1}, "ptx_coef=-1 cannot work"),
        ({"whiten_advantages": "yes"}, "whiten_advantages='yes' cannot work"),
        ({"loss_type": "gspo"}, "loss_type='gspo' does not work with PPO"),
        ({"loss_type": "gmpo"}, "loss_type='gmpo' does not work with PPO"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence' does not work with PPO"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation='normalize_then_sum'"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, "kl_target=6.0 with kl_coef=0"),
        ({"sync_ref_model": True, "kl_coef": 0.0}, "sync_ref_model=True with beta=0.0"),
        ({"optim": "lomo"}, "optim='lomo' takes its steps in backward"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' takes its steps in backward"),
        ({"optim": "apollo_adamw_layerwise"}, "optim='apollo_adamw_layerwise' takes its steps in backward"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ValueError) as error:
            config(tmp_path, **options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo_token"]
)
def test_every_loss_with_token_advantages_is_taken(loss_type: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert config(tmp_path, loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 0.1}, "kl_coef=0.05 and beta=0.1 hold the policy near the reference twice"),
        ({"scale_rewards": "none"}, "scale_rewards='none' cannot act"),
        ({"step_advantage": "process"}, "step_advantage='process' cannot act"),
        ({"lam_length_alpha": 0.05, "lam": 0.9}, "lam=0.9 cannot act"),
        ({"kl_horizon": 5}, "kl_horizon=5 cannot act"),
        (
            {"mask_truncated_completions": True, "missing_eos_penalty": 1.0},
            "missing_eos_penalty=1.0 cannot act",
        ),
    ],
    ids=str,
)
def test_what_does_nothing_is_told_where_the_script_builds_the_config(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=said[:20]) as caught:
        config(tmp_path, **options)
    (own,) = [warning for warning in caught if said in str(warning.message)]
    assert own.filename == __file__


def test_a_reference_may_move_for_the_kl_in_the_reward_alone(tmp_path: Path) -> None:
    assert config(tmp_path, sync_ref_model=True).has_reference
    assert not config(tmp_path, kl_coef=0.0).has_reference
