"""Defaults of the paper, refusals with the way out, warnings of what cannot act."""

import copy
import dataclasses
import functools
import importlib
import inspect
import math
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
import trl
from transformers import HfArgumentParser
from trl import TrlParser

import trl_steady
from tests.config.wrong_options import INVALID, INVALID_PPO, NAN
from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES
from trl_steady.config.options import own_options

OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}

ON_POLICY = {"steps_per_generation": 1}


def config(tmp_path: Path, **options: Any) -> trl_steady.GRPOConfig:
    return trl_steady.GRPOConfig(output_dir=str(tmp_path), **{**OFF_POLICY, **options})


def test_clip_range_is_the_papers_where_the_user_set_none(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, float], tuple[float, float | None]]] = [
        ({}, (3e-4, 4e-4)),
        ({"epsilon": 1e-3}, (1e-3, None)),  # TRL's rule: None is epsilon
        ({"epsilon_high": 1e-3}, (3e-4, 1e-3)),
        ({"epsilon": 1e-3, "epsilon_high": 2e-3}, (1e-3, 2e-3)),
    ]
    for given, expected in cases:
        args = config(tmp_path, loss_type="gspo", **given)
        assert (args.epsilon, args.epsilon_high) == expected


@pytest.mark.parametrize("loss_type", NATIVE_LOSS_TYPES)
def test_a_native_loss_has_every_default_of_trl(tmp_path: Path, loss_type: str) -> None:
    ours, theirs = (
        package.GRPOConfig(output_dir=str(tmp_path), loss_type=loss_type, use_cpu=True, per_device_train_batch_size=8)
        for package in (trl_steady, trl)
    )
    off = "async_generate dynamic_sampling keep_sampling_mask log_line ref_model_sync_reset_optimizer"
    off += " router_replay_reference share_prompts skip_zero_weight training_report"
    unset = "adapter_dtype beta_column geometric_mask_range ref_model_sync_kl router_replay skip_old_pass token_budget"
    unset += (
        " eval_generation eval_metrics token_veto_threshold vllm_adapter_sync vllm_engine_kwargs vllm_request_seeds"
    )
    added = {**dict.fromkeys(off.split(), False), **dict.fromkeys(unset.split())}
    added |= {"kl_estimator": "k3", "kl_ratio_denominator": "old", "off_policy_mask_level": "sequence"}
    added |= {
        "step_advantage": "return_to_go",
        "advantage_baseline": "group",
        "trim_padding": True,
        "engine_check": 1.0,
        "skip_nonfinite_steps": 3,
    }
    added |= {"dynamic_sampling_max_rounds": 3, "dynamic_sampling_filter": "zero_std"}
    added |= {"teacher": None, "teacher_coef": 0.5, "teacher_mode": "weight", "teacher_prompt": None}
    added |= {"dppo_divergence": "tv", "sampler_penalty": 0.0, "m2po_budget": 0.04}
    assert ours.to_dict() == {**theirs.to_dict(), **added}
    assert trl_steady.GRPOConfig.loss_type == trl.GRPOConfig.loss_type


def test_trl_parser_reads_our_fields_from_yaml_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nloss_type: gspo\nepsilon: 3e-3\nuse_cpu: true\nbf16: false\n")
    command = ["--config", str(path), "--epsilon_high", "5e-3", "--steps_per_generation", "8"]
    command += ["--geometric_mask_range", "0.99", "1.01", "--vllm_engine_kwargs", '{"enforce_eager": true}']
    (args,) = TrlParser(trl_steady.GRPOConfig).parse_args_and_config(command)
    assert (args.loss_type, args.epsilon, args.epsilon_high) == ("gspo", 3e-3, 5e-3)
    assert args.geometric_mask_range == [0.99, 1.01] and args.vllm_engine_kwargs == {"enforce_eager": True}
    assert args.dynamic_sampling_filter == "zero_std"
    more = "dynamic_sampling: true\ndynamic_sampling_filter: [0.1, 0.9]\n"
    path.write_text(path.read_text() + more + "geometric_mask_range: [0.98, 1.02]\noff_policy_mask_threshold: .inf\n")
    (args,) = TrlParser(trl_steady.GRPOConfig).parse_args_and_config(["--config", str(path)])
    assert args.dynamic_sampling_filter == [0.1, 0.9]
    assert args.geometric_mask_range == [0.98, 1.02] and args.off_policy_mask_threshold == float("inf")
    assert args.importance_sampling_level == "sequence"


@pytest.mark.parametrize("option", INVALID)
def test_invalid_values_are_refused_by_name(tmp_path: Path, option: str) -> None:
    for value in INVALID[option]:
        with pytest.raises(ValueError, match=rf"^{option}={re.escape(repr(value))} cannot work\. Set {option} to \S"):
            config(tmp_path, **{option: value})


def test_numbers_of_trl_that_our_methods_calculate_with_are_checked_too(tmp_path: Path) -> None:
    for option in ("off_policy_mask_threshold", "delta", "beta", "temperature", "ref_model_mixup_alpha"):
        for value in ("0.1", [0.1], NAN):
            said = rf"^{option}={re.escape(repr(value))} cannot work\. Set {option} to a number"
            with pytest.raises(ValueError, match=said):
                config(tmp_path, **{option: value})
    numbers = {"beta": np.float32(0.1), "delta": torch.tensor(4.0), "off_policy_mask_threshold": math.inf}
    assert config(tmp_path, loss_type="grpo", ref_model_sync_steps=np.int64(3), **numbers).beta == np.float32(0.1)


def test_a_misspelt_option_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    class Own(trl_steady.GRPOConfig):
        """A config of a script, with a constructor of its own."""

        def __init__(self, mine: int, **options: Any) -> None:
            self.mine = mine
            super().__init__(**options)

    args = config(tmp_path)
    for wrong in (lambda: config(tmp_path, los_type="gspo"), lambda: dataclasses.replace(args, los_type="gspo")):
        with pytest.raises(TypeError, match=r"^GRPOConfig has no option los_type\. Did you mean loss_type\?$"):
            wrong()
    with pytest.raises(TypeError, match=r"^RLOOConfig has no option xyzzy\.$"):
        trl_steady.RLOOConfig(str(tmp_path), xyzzy=1)
    own = Own(mine=1, output_dir=str(tmp_path), **OFF_POLICY)
    assert own.mine == 1 and copy.deepcopy(args).to_dict() == pickle.loads(pickle.dumps(args)).to_dict()
    assert next(iter(inspect.signature(trl_steady.GRPOConfig).parameters)) == "output_dir"


def test_a_warning_of_python_c_names_its_line(tmp_path: Path) -> None:
    names = {"__name__": "__main__", "config": trl_steady.GRPOConfig, "options": {**OFF_POLICY, "kl_estimator": "k2"}}
    with pytest.warns(UserWarning, match="kl_estimator") as caught:
        exec(f"config({str(tmp_path)!r}, **options)", names)
    assert "<string>" in [each.filename for each in caught]


def test_a_decorator_may_take_other_options(tmp_path: Path) -> None:
    class Renamed(trl_steady.GRPOConfig):
        """A config of a script, with a decorator that changes options."""

        @functools.wraps(trl_steady.GRPOConfig.__init__)
        def __init__(self, *arguments: Any, lr: float, **options: Any) -> None:
            super().__init__(*arguments, learning_rate=lr, **options)

    assert cast(Any, Renamed)(str(tmp_path), lr=0.5, **OFF_POLICY).learning_rate == 0.5


@pytest.mark.parametrize("base", [trl_steady.GRPOConfig, trl_steady.RLOOConfig, trl_steady.PPOConfig])
def test_annotations_of_a_script_may_be_for_a_type_checker_only(base: type[Any], tmp_path: Path) -> None:
    """As those of types that are imported under `TYPE_CHECKING`."""

    class Mixin:
        path: "Elsewhere"  # noqa: F821

    @dataclasses.dataclass
    class Own(Mixin, base):
        where: "Somewhere | None" = None  # noqa: F821
        beta: "Small" = 0.25  # noqa: F821  # TRL's option
        engine_check: "Limit" = 0.5  # noqa: F821  # ours

    @dataclasses.dataclass
    class Below(Own):
        what: "somewhere.Kind" = 1  # noqa: F821

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it has no engine
        own = Below(str(tmp_path), where=3, **OFF_POLICY)
    assert (own.where, own.beta, own.engine_check) == (3, 0.25, 0.5)
    for option, value in (("beta", "0.1"), ("engine_check", -1.0), ("ref_model_sync_kl", "a")):
        with pytest.raises(ValueError, match=rf"^{option}={value!r} cannot work"):
            Below(str(tmp_path), **OFF_POLICY, **{option: value})
    assert own_options(Below) == own_options(base)


def test_a_warning_names_the_line_of_the_script(models: dict[str, Path], tmp_path: Path) -> None:
    """The script builds a config, a copy of it, or a trainer."""

    @dataclasses.dataclass
    class Derived(trl_steady.GRPOConfig):
        """A config of a script, whose constructor Python writes."""

        mine: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()

    def line() -> int:
        caller = inspect.currentframe()
        assert caller and caller.f_back
        return caller.f_back.f_lineno

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [line() + 1]
        args = Derived(str(tmp_path), neftune_noise_alpha=5, kl_estimator="k2", **OFF_POLICY)
        lines.append(line() + 1)
        args = dataclasses.replace(args, mine=2, generation_batch_size=None)
        lines.append(line() + 1)
        trl_steady.GRPOTrainer(str(models["dense"]), tiny.reward, args, tiny.dataset())
    found = [each for each in caught if re.match("kl_estimator|trim_padding", str(each.message))]
    assert [(each.filename, each.lineno) for each in found] == [(__file__, number) for number in lines]


def test_the_table_has_every_option_of_ours() -> None:
    assert own_options(trl_steady.PPOConfig).keys() == INVALID.keys() | INVALID_PPO.keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kl_estimator": "k1", "use_bias_correction_kl": False, "beta": 0.1}, r"adds noise.*'k2' or 'k3'"),
        ({"sync_ref_model": True}, r"sync_ref_model=True with beta=0\.0"),
        (
            {"adapter_dtype": "float32", "use_transformers_continuous_batching": True},
            "adapter_dtype='float32' does not",
        ),
        (
            {"fp16": True, "use_transformers_continuous_batching": True},
            r"fp16=True does not work with use_transformers_continuous_batching=True: .*use bf16=True",
        ),
        (
            {"keep_sampling_mask": True, "use_transformers_continuous_batching": True},
            "keep_sampling_mask=True does not",
        ),
        (
            {
                **{"keep_sampling_mask": True, "use_vllm": True, "top_k": 50, "top_p": 0.9},
                "eval_generation": {"top_k": 0},
            },
            r"eval_generation=\{'top_k': 0\} does not work with keep_sampling_mask=True and vLLM",
        ),
        ({"importance_sampling_level": "token"}, r"='token' contradicts loss_type='gspo'.*Leave importance_s"),
        (
            {"scale_rewards": "mean", "multi_objective_aggregation": "normalize_then_sum"},
            r"scale_rewards='mean' contradicts multi_objective_aggregation='normalize_then_sum'",
        ),
        ({"token_budget": 512, "trim_padding": False}, r"token_budget=512 does not work with trim_padding=False"),
        ({"share_prompts": True, "trim_padding": False}, r"share_prompts=True does not work with trim_padding"),
        ({"token_budget": 512, "loss_type": "bnpo"}, r"token_budget=512 does not work with loss_type='bnpo'"),
        ({"token_budget": 512, "entropy_coef": 0.1}, r"does not work with entropy_coef=0\.1"),
        ({"token_budget": 512, "top_entropy_quantile": 0.2}, r"does not work with top_entropy_quantile=0\.2"),
        ({"skip_zero_weight": True, "beta": 0.1}, r"skip_zero_weight=True does not work with beta=0\.1"),
        ({"skip_zero_weight": True, "sampler_penalty": 0.1}, r"=True does not work with sampler_penalty=0\.1"),
        (
            {"skip_zero_weight": True, "entropy_coef": 0.1},
            r"skip_zero_weight=True does not work with entropy_coef=0\.1",
        ),
        (
            {"skip_zero_weight": True, "use_adaptive_entropy": True},
            r"=True does not work with use_adaptive_entropy=True",
        ),
        (
            {"skip_zero_weight": True, "top_entropy_quantile": 0.2},
            r"=True does not work with top_entropy_quantile=0\.2",
        ),
        (
            {"skip_old_pass": True},
            r"skip_old_pass=True does not work with gradient_accumulation_steps=1, which is no multi",
        ),
        (
            {"skip_old_pass": True, **ON_POLICY, "router_replay": "R2"},
            r"skip_old_pass=True does not .*router_replay='R2'",
        ),
        (
            {"skip_old_pass": True, **ON_POLICY, "neftune_noise_alpha": 5},
            r"skip_old_pass=True does not .*alpha=5, whose",
        ),
        ({"top_k": None}, r"top_k=None: transformers takes it for 50"),
        (
            {"use_vllm": True, "vllm_engine_kwargs": '{"model": "a"}'},
            r"vllm_engine_kwargs has model='a', .*Leave it out\.$",
        ),
        (
            {"use_vllm": True, "vllm_engine_kwargs": {"seed": "a"}},
            r"vllm_engine_kwargs has seed='a', .*Set seed to 0, 1",
        ),
        ({"use_vllm": True, "vllm_engine_kwargs": {"seed": -1}}, r"vllm_engine_kwargs has seed=-1, which cannot work"),
        (
            {"use_vllm": True, "vllm_engine_kwargs": {"max_num_seqs": 8, "max_model_len": 512}},
            r"vllm_engine_kwargs has max_model_len=512, .*Leave it out, and set vllm_max_model_length\.",
        ),
        (
            {"use_vllm": True, "vllm_engine_kwargs": {"quantization": "fp8"}},
            r"quantization='fp8', and a quantised .*set vllm_adapter_sync=True",
        ),
        ({"async_generate": True}, r"async_generate=True does not work with use_vllm=False.*Set use_vllm=True"),
        ({"teacher": "m"}, r"teacher='m' does not work with loss_type='gspo', .*Set loss_type='gspo_token'"),
        (
            {"teacher": "http://t", "temperature": 0.7, "loss_type": "grpo"},
            r"teacher='http://t' scores at temperature 1 .*Set temperature=1\.0",
        ),
        (
            {"teacher": "https://t", "keep_sampling_mask": True, "top_p": 0.9, "loss_type": "grpo"},
            r"teacher='https://t' scores .*keep_sampling_mask=False",
        ),
        (
            {"teacher": "reference", "sync_ref_model": True, "ref_model_sync_kl": 0.1, "loss_type": "grpo"},
            r"ref_model_sync_kl=0\.1 does not work with beta=0\.0",
        ),
        (
            {"skip_old_pass": True, "teacher": "m", "loss_type": "grpo", **ON_POLICY},
            r"skip_old_pass=True does not work with teacher='m', which",
        ),
        ({"async_generate": True, "use_vllm": True}, r"does not work with use_vllm=True, vllm_mode='colocate'"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **{"loss_type": "gspo", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ON_POLICY,
            r"loss_type='gspo' has no effect because each rollout is used for one update.* Raise steps_per_gener.*"
            r", or set loss_type='grpo', which then trains the same\.",
        ),
        (
            {**ON_POLICY, "router_replay": "R2", "loss_type": "grpo"},
            r"router_replay='R2' has no effect because each rollout is used for one update",
        ),
        ({"epsilon_high": 0.28}, r"epsilon_high=0\.28 are for token ratios.*Set epsilon=3e-4 and epsilon_high=4e-4"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, r"epsilon=0\.2 .* A sequence ratio"),
        ({"kl_estimator": "k2"}, r"kl_estimator='k2' has no effect because beta=0\.0"),
        ({"skip_nonfinite_steps": 5, "optim": "lomo"}, r"skip_nonfinite_steps=5 has no effect because optim='lomo'"),
        ({"kl_ratio_denominator": "sampler"}, r"has no effect because beta=0\.0"),
        ({"beta_column": "strength"}, r"beta_column='strength' has no effect because beta=0\.0"),
        ({"teacher_mode": "add"}, r"teacher_mode='add' has no effect because teacher=None\. Set teacher,"),
        (
            {"kl_ratio_denominator": "sampler", "beta": 0.1, "use_bias_correction_kl": False},
            r"='sampler' has no effect because use_bias_correction_kl=False",
        ),
        ({"off_policy_mask_level": "token"}, r"='token' has no effect because off_policy_mask_threshold=None"),
        (
            {"off_policy_mask_level": "token", "off_policy_mask_threshold": 0.0},
            r"off_policy_mask_level='token' has no effect because loss_type='gspo'",
        ),
        (
            {"step_advantage": "process"},
            r"step_advantage='process' has no effect because the ratio of loss_type='gspo'",
        ),
        ({"loss_type": "gmpo", "epsilon": 0.2}, r"epsilon=0\.2 is for token ratios, .*set epsilon=0\.4"),
        (
            {**ON_POLICY, "loss_type": "grpo", "off_policy_mask_threshold": 0.1},
            r"off_policy_mask_threshold=0\.1 has no effect because each rollout",
        ),
        (
            {"sync_ref_model": True, "beta": 0.1, "max_steps": 100},
            r"sync_ref_model=True has no effect because .*max_steps=100.*ref_model_sync_steps=512",
        ),
        (
            {"ref_model_sync_kl": 0.1, "beta": 0.1},
            r"ref_model_sync_kl=0\.1 has no effect because sync_ref_model=False",
        ),
        ({"ref_model_sync_reset_optimizer": True}, r"has no effect because sync_ref_model=False"),
        ({"vllm_adapter_sync": True}, r"vllm_adapter_sync=True has no effect because use_vllm=False"),
        (
            {**ON_POLICY, "loss_type": "dppo"},
            r"loss_type='dppo' has no effect because each rollout .*unless a rollout_func.*set loss_type='dr_grpo'",
        ),
        (
            {**ON_POLICY, "loss_type": "grpo", "sampler_penalty": 0.1},
            r"sampler_penalty=0\.1 has no effect because each rollout",
        ),
        ({"dppo_divergence": "kl"}, r"dppo_divergence='kl' has no effect because loss_type='gspo'"),
        ({"m2po_budget": 0.1}, r"m2po_budget=0\.1 has no effect because loss_type='gspo'"),
        (
            {**ON_POLICY, "loss_type": "grpo", "skip_old_pass": True},
            r"skip_old_pass=True has no effect because use_vllm=False",
        ),
        ({"vllm_engine_kwargs": {"seed": 1}}, r"vllm_engine_kwargs={'seed': 1} has no effect because use_vllm=False"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_engine_kwargs": {"quantization": "fp8"}},
            r"vllm_engine_kwargs={'quantization': 'fp8'} has no effect because vllm_mode='server'",
        ),
        ({"vllm_request_seeds": True}, r"vllm_request_seeds=True has no effect because use_vllm=False"),
        ({"engine_check": 0.5}, r"engine_check=0\.5 has no effect because use_vllm=False and no rollout_func"),
        ({"router_replay_reference": True}, r"router_replay_reference=True has no effect because router_replay=None"),
        ({"router_replay_reference": True, "router_replay": "R2"}, r"has no effect because beta=0\.0"),
        ({"keep_sampling_mask": True}, r"keep_sampling_mask=True has no effect because top_p, top_k and min_p keep"),
    ],
    ids=str,
)
def test_an_option_without_effect_warns_once(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    (message,) = warned(tmp_path, **{"loss_type": "gspo", **options})
    assert re.search(said, message) and re.search(r"(Set|Raise|Give|Leave) ", message)


def test_options_with_effect_do_not_warn(tmp_path: Path) -> None:
    for options in [
        {"loss_type": "gspo_token"},
        {"loss_type": "grpo"},
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},  # clips nothing
        {"loss_type": "gspo_token", "off_policy_mask_threshold": 1e-4, "off_policy_mask_level": "token"},
        {"loss_type": "gspo_token", "step_advantage": "process"},
        {"loss_type": "gmpo", "token_budget": 512},
        {"loss_type": "dppo", "dppo_divergence": "kl", "sampler_penalty": 1e-3},
        {"loss_type": "m2po", "m2po_budget": 0.1, "scale_rewards": "mean"},
        {"loss_type": "dppo", **ON_POLICY, "use_vllm": True, "sampler_penalty": 1e-3},
        {"loss_type": "gspo", "gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 2},
        {"loss_type": "grpo", **ON_POLICY},
        {"loss_type": "gspo", **ON_POLICY, "top_entropy_quantile": 0.3},  # GSPO's gradient still has all tokens
        {"loss_type": "gmpo", **ON_POLICY, "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "grpo", **ON_POLICY, "skip_old_pass": False},
        {"loss_type": "grpo", "kl_estimator": "k1", "beta": 0.1},
        {"router_replay": "R2", "router_replay_reference": True, "beta": 0.1},
        {"keep_sampling_mask": True, "top_p": 0.9},
        {"use_vllm": True, "vllm_engine_kwargs": {"max_num_batched_tokens": 8192, "quantization": None}},
        {"use_vllm": True, "vllm_engine_kwargs": {"quantization": "fp8"}, "vllm_adapter_sync": True},
        {"use_vllm": True, "vllm_engine_kwargs": {"seed": 7}},
        {"use_vllm": True, "vllm_request_seeds": True},
        {"use_vllm": True, "vllm_mode": "server", "async_generate": True},
    ]:
        assert warned(tmp_path, **{"loss_type": "gspo", **options}) == [], options


def warned(tmp_path: Path, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(tmp_path, **options)
    return [str(w.message) for w in caught if w.category is UserWarning]


def test_a_config_can_be_looked_at_without_a_trainer(tmp_path: Path) -> None:
    args = config(tmp_path)
    assert not hasattr(args, "place_model_on_device") and dict(inspect.getmembers(args))["loss_type"] == "dapo"
    with pytest.raises(ValueError, match="a trainer that is not trl-steady's"):
        getattr(args, "place_model_on_device")  # noqa: B009


def test_top_k_of_none_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    """transformers would take the model's, or 50."""
    for options in ({"top_k": None}, {"top_k": 20, "generation_kwargs": {"top_k": None}}):
        with pytest.raises(ValueError, match=r"top_k=None: transformers takes it for 50"):
            config(tmp_path, **options)
    config(tmp_path, top_k=None, generation_kwargs={"top_k": 20})


def test_a_limit_of_the_kl_needs_a_kl_that_is_measured(tmp_path: Path) -> None:
    moves: dict[str, Any] = {"teacher": "reference", "sync_ref_model": True, "ref_model_sync_kl": 0.1}
    with pytest.raises(ValueError, match=r"ref_model_sync_kl=0\.1 does not work with beta=0\.0"):
        tiny.arguments(trl_steady.PPOConfig, tmp_path, kl_coef=0.0, **moves)
    for measured in ({"kl_coef": 0.1}, {"kl_coef": 0.0, "beta": 0.1}):
        tiny.arguments(trl_steady.PPOConfig, tmp_path, **measured, **moves)


def test_generation_ahead_is_refused_where_nothing_corrects_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="async_generate=True does not work with RLOO, whose trainer drops"):
        tiny.arguments(trl_steady.RLOOConfig, tmp_path, use_vllm=True, vllm_mode="server", async_generate=True)


@pytest.mark.parametrize("config", [trl_steady.PPOConfig, trl_steady.RLOOConfig])
def test_the_command_line_and_the_site_have_the_text_of_each_option_of_ours(config: Any) -> None:
    pytest.importorskip("griffe")
    documentation = importlib.import_module("docs.hooks.defaults").documentation
    said, ours = " ".join(documentation(config).split()), own_options(config)
    help_text = " ".join(HfArgumentParser(config).format_help().split())
    texts = {each.name: each.metadata["help"] for each in dataclasses.fields(config) if each.name in ours}
    assert len(texts) >= 9
    for name, text in texts.items():
        assert f"{name}: {text}" in said and text[:30] in help_text


def test_choices_are_in_the_types_so_that_an_editor_completes_them() -> None:
    assert own_options(trl_steady.PPOConfig)["router_replay"] == Literal["R2", "R3"] | None
    with pytest.raises(SystemExit):
        HfArgumentParser(trl_steady.GRPOConfig).parse_args(["--router_replay", "R4"])
