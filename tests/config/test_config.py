"""Defaults of the paper, refusals with the way out, warnings of what cannot act."""

import dataclasses
import inspect
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import trl
from transformers import HfArgumentParser
from trl import TrlParser

import trl_steady
from tests.tools import tiny
from tests.tools.losses import NATIVE_LOSS_TYPES

if TYPE_CHECKING:
    from collections.abc import Hashable

OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}


def config(tmp_path: Path, **options: Any) -> trl_steady.GRPOConfig:
    return trl_steady.GRPOConfig(output_dir=str(tmp_path), **{**OFF_POLICY, **options})


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (3e-4, 4e-4)),
        ({"epsilon": 1e-3}, (1e-3, None)),  # TRL's rule: None is epsilon
        ({"epsilon_high": 1e-3}, (3e-4, 1e-3)),
        ({"epsilon": 1e-3, "epsilon_high": 2e-3}, (1e-3, 2e-3)),
    ],
)
def test_clip_range_is_the_papers_where_the_user_set_none(
    tmp_path: Path, loss_type: str, given: dict[str, float], expected: tuple[float, float | None]
) -> None:
    args = config(tmp_path, loss_type=loss_type, **given)
    assert (args.epsilon, args.epsilon_high) == expected


@pytest.mark.parametrize("loss_type", NATIVE_LOSS_TYPES)
def test_a_native_loss_has_every_default_of_trl(tmp_path: Path, loss_type: str) -> None:
    ours, theirs = (
        package.GRPOConfig(output_dir=str(tmp_path), loss_type=loss_type, use_cpu=True, per_device_train_batch_size=8)
        for package in (trl_steady, trl)
    )
    added = {
        "kl_estimator": "k3",
        "kl_ratio_denominator": "old",
        "off_policy_mask_level": "sequence",
        "step_advantage": "return_to_go",
        "geometric_mask_range": None,
        "token_veto_threshold": None,
        "ref_model_sync_kl": None,
        "ref_model_sync_reset_optimizer": False,
        "trim_padding": True,
        "token_budget": None,
        "share_prompts": False,
        "router_replay": None,
        "router_replay_reference": False,
        "keep_sampling_mask": False,
        "adapter_dtype": None,
        "vllm_adapter_sync": None,
        "engine_check": 1.0,
    }
    assert ours.to_dict() == {**theirs.to_dict(), **added}
    assert trl_steady.GRPOConfig.loss_type == trl.GRPOConfig.loss_type


def test_trl_parser_reads_our_fields_from_yaml_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nloss_type: gspo\nepsilon: 3e-3\nuse_cpu: true\nbf16: false\n")
    command = ["--config", str(path), "--epsilon_high", "5e-3", "--steps_per_generation", "8"]
    command += ["--geometric_mask_range", "0.99", "1.01"]
    (args,) = TrlParser(trl_steady.GRPOConfig).parse_args_and_config(command)
    assert (args.loss_type, args.epsilon, args.epsilon_high) == ("gspo", 3e-3, 5e-3)
    assert args.geometric_mask_range == [0.99, 1.01]
    path.write_text(path.read_text() + "geometric_mask_range: [0.98, 1.02]\noff_policy_mask_threshold: .inf\n")
    (args,) = TrlParser(trl_steady.GRPOConfig).parse_args_and_config(["--config", str(path)])
    assert args.geometric_mask_range == [0.98, 1.02] and args.off_policy_mask_threshold == float("inf")
    assert args.importance_sampling_level == "sequence"


@dataclass
class Tagged(trl_steady.GRPOConfig):
    """Has an annotation that only type checkers resolve, and an option whose type it narrows."""

    tag: "Hashable | None" = None
    min_p: "Hashable" = 0.0


def test_annotations_of_a_subclass_need_not_resolve(tmp_path: Path) -> None:
    args = Tagged(str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, tag="a", min_p=None)
    assert args.tag == "a"
    with pytest.raises(ValueError, match="beta=None cannot work"):
        Tagged(str(tmp_path), use_cpu=True, bf16=False, beta=None)


def test_options_of_other_losses_pass_with_those_losses(tmp_path: Path) -> None:
    config(tmp_path, loss_type="sapo", sapo_temperature_pos=2.0)
    config(tmp_path, loss_type="cispo", epsilon_high=5.0)
    config(tmp_path, loss_type="cispo", epsilon_high=float("inf"))  # no cap


def test_0_generations_of_evaluation_are_as_many_as_of_training(tmp_path: Path) -> None:
    """As TRL reads it."""
    assert config(tmp_path, num_generations_eval=0).num_generations_eval == 0


def test_an_adapter_that_would_not_train_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = tiny.trainer(models["dense"], tmp_path, lora=True).model
    adapter.save_pretrained(tmp_path / "adapter")
    base = adapter.unload()
    frozen = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        tiny.trainer(frozen, tmp_path)


def warned(tmp_path: Path, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(tmp_path, **options)
    return [str(w.message) for w in caught if w.category is UserWarning]


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "num_iterations", "on_policy"),
    [(1, 1, 1, True), (4, 4, 1, True), (4, 2, 1, True), (4, 2, 2, True), (4, 16, 1, False), (4, 4, 2, False)],
)
def test_a_loss_that_cannot_act_says_so_once(
    tmp_path: Path, loss_type: str, accumulation: int, steps_per_generation: int, num_iterations: int, on_policy: bool
) -> None:
    options = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps_per_generation,
        "num_iterations": num_iterations,
    }
    messages = warned(tmp_path, loss_type=loss_type, **options)
    if on_policy:
        (message,) = messages
        assert f"loss_type={loss_type!r} cannot act" in message
        # the advice, taken, works
        for name in ("steps_per_generation", "num_iterations"):
            value = int(re.findall(rf"(?:Set |or ){name}=(\d+)", message)[-1])
            assert warned(tmp_path, loss_type=loss_type, **{**options, name: value}) == []
    else:
        assert messages == []
    assert warned(tmp_path, loss_type="grpo", **options) == []


def test_the_advice_fits_a_user_who_sets_the_generation_batch(tmp_path: Path) -> None:
    sized = {"loss_type": "gspo", "steps_per_generation": None, "gradient_accumulation_steps": 2}
    (message,) = warned(tmp_path, generation_batch_size=8, **sized)
    assert "generation_batch_size=32, if you set that instead) for four updates" in message
    assert warned(tmp_path, generation_batch_size=32, **sized) == []


def test_an_off_policy_mask_that_cannot_act_says_so(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"loss_type": "grpo", "off_policy_mask_threshold": 0.1}
    with pytest.warns(UserWarning, match=r"off_policy_mask_threshold=0.1 cannot act"):
        trainer = tiny.trainer(models["dense"], tmp_path, steps_per_generation=1, **options)
    assert trainer.args.way_off_policy.startswith("Set steps_per_generation=4 ")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tiny.trainer(models["dense"], tmp_path, steps_per_generation=4, **options)
        # an environment may bring log-probs of its own
        tiny.trainer(models["dense"], tmp_path, steps_per_generation=1, build={"rollout_func": print}, **options)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kl_estimator": "k2"}, "kl_estimator='k2' cannot act: with beta=0.0 there is no KL. Set beta above 0, or"),
        ({"kl_ratio_denominator": "sampler"}, "kl_ratio_denominator='sampler' cannot act: with beta=0.0"),
        (
            {"kl_ratio_denominator": "sampler", "beta": 0.1, "use_bias_correction_kl": False},
            "with use_bias_correction_kl=False the KL has no ratio. Set use_bias_correction_kl=True, or leave",
        ),
        (
            {"off_policy_mask_level": "token"},
            "off_policy_mask_level='token' cannot act: with off_policy_mask_threshold=None there is no mask. Set",
        ),
    ],
)
def test_an_option_of_something_that_is_off_says_so(
    tmp_path: Path, options: dict[str, Any], why: str, loss_type: str
) -> None:
    (message,) = warned(tmp_path, loss_type=loss_type, **options)
    assert why in message


def test_a_formula_for_steps_under_a_sequences_ratio_says_so(tmp_path: Path) -> None:
    for options in ({"loss_type": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}):
        (message,) = warned(tmp_path, step_advantage="process", epsilon=1e-3, **options)
        assert message.startswith(
            "step_advantage='process' cannot act: with one ratio per sequence, StepRewards are refused"
        )
        assert message.endswith("Set loss_type='gspo_token', or leave step_advantage unset.")
    assert warned(tmp_path, step_advantage="process", loss_type="gspo_token") == []


def test_a_level_of_the_mask_under_gspo_says_so(tmp_path: Path) -> None:
    options = {"off_policy_mask_threshold": 1e-4, "off_policy_mask_level": "token"}
    (message,) = warned(tmp_path, loss_type="gspo", **options)
    assert (
        "'token' cannot act: with loss_type='gspo' a sequence has one advantage. Set loss_type='gspo_token'" in message
    )
    assert warned(tmp_path, loss_type="gspo_token", **options) == []


def test_a_sweep_over_beta_may_have_0(tmp_path: Path) -> None:
    estimator, correction = warned(tmp_path, loss_type="grpo", kl_estimator="k1", use_bias_correction_kl=False)
    assert "kl_estimator='k1' cannot act" in estimator and "use_bias_correction_kl=False cannot act" in correction


def test_a_denominator_of_no_ratio_needs_no_engine(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"kl_ratio_denominator": "sampler", "use_bias_correction_kl": False, "beta": 0.1}
    tiny.trainer(models["dense"], tmp_path, loss_type="grpo", **options)


def test_a_mask_that_gspos_own_clip_makes_idle_says_so(models: dict[str, Path], tmp_path: Path) -> None:
    """From -log(1 - epsilon) on, unless an engine has sampled; at infinity it is there to be seen in the metrics."""
    idle = (
        r"=0.5 cannot act with one advantage per sequence: from -log\(1 - epsilon\) = (0.000300045|0.223144) on, the "
        "lower"
    )
    for options in (
        {"loss_type": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    ):
        with pytest.warns(UserWarning, match=idle):
            tiny.trainer(models["dense"], tmp_path, off_policy_mask_threshold=0.5, **options)
    engine = {"build": {"rollout_func": print}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for options in (
            {"loss_type": "gspo", "off_policy_mask_threshold": 0.5, **engine},
            {"loss_type": "gspo", "off_policy_mask_threshold": 2e-4},
            {"loss_type": "gspo", "off_policy_mask_threshold": float("inf")},
            {"loss_type": "gspo", "off_policy_mask_threshold": 0.5, "epsilon": 0.9},
            {"loss_type": "gspo_token", "off_policy_mask_threshold": 0.5},  # where the signs of tokens may differ
            {"loss_type": "grpo", "off_policy_mask_threshold": 0.5},
            {"loss_type": "sapo", "off_policy_mask_threshold": 0.5, "importance_sampling_level": "sequence"},
            {"loss_type": "grpo", "off_policy_mask_threshold": float("inf"), "steps_per_generation": 1},
        ):
            tiny.trainer(models["dense"], tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_ratio_denominator": "sampler", "beta": 0.1},
        {"geometric_mask_range": (0.9, 1.1)},
        {"token_veto_threshold": 1e-4},
    ],
)
def test_what_needs_an_engine_is_refused_without_one(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    option = next(iter(options))
    with pytest.raises(ValueError, match=rf"{option}=.* with the engine that samples.*Set use_vllm=True, or leave"):
        tiny.trainer(models["dense"], tmp_path, loss_type="grpo", **options)

    def no_log_probs(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": [[60, 61]] * len(prompts), "logprobs": None}

    trainer = tiny.trainer(
        models["dense"], tmp_path, loss_type="grpo", build={"rollout_func": no_log_probs}, **options
    )
    with pytest.raises(ValueError, match=rf"{option}=.* this rollout has none. Return 'logprobs' from rollout_func"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "gspo", "epsilon": 0.2}, "epsilon=0.2"),
        ({"loss_type": "gspo_token", "epsilon_high": 0.01}, "epsilon_high=0.01"),
        ({"loss_type": "gspo", "epsilon": 0.2, "epsilon_high": 0.28}, "epsilon=0.2 and epsilon_high=0.28"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "epsilon=0.2"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "epsilon=0.2"),
    ],
)
def test_a_clip_range_of_token_scale_under_a_sequence_ratio_warns_with_the_papers(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    (message,) = warned(tmp_path, **options)
    assert named in message and "epsilon=0.0003 and epsilon_high=0.0004" in message


def test_no_warning_where_nothing_is_wrong(tmp_path: Path) -> None:
    for loss_type in ("gspo", "gspo_token", *NATIVE_LOSS_TYPES):
        options = {"epsilon_high": 5.0} if loss_type == "cispo" else {}  # where TRL's default caps every ratio
        assert warned(tmp_path, loss_type=loss_type, **options) == []
    assert warned(tmp_path, loss_type="sapo", importance_sampling_level="sequence") == []  # clips nothing
    assert warned(tmp_path, pad_to_multiple_of=128) == []  # the default on Neuron, and generation pads by it
    assert warned(tmp_path, generation_kwargs={"temperature": None, "max_new_tokens": None}) == []
    assert warned(tmp_path, max_completion_length=None, generation_kwargs={"max_new_tokens": 64}) == []


@pytest.mark.parametrize("config", [trl_steady.GRPOConfig, trl_steady.RLOOConfig])
def test_the_docstring_has_the_text_of_each_option_of_ours(config: Any) -> None:
    """Each option is documented once, in its field; the docstring, `--help` and the site take it from there."""
    text = " ".join(config.__doc__.split())
    bases = [base for base in config.__mro__ if base.__module__.startswith("trl_steady")]
    annotated = {name for base in bases for name in inspect.get_annotations(base)}
    ours = [own for own in dataclasses.fields(config) if own.name in annotated]
    assert len(ours) >= 9 and "{options}" not in text
    for own in ours:
        assert f"{own.name}: {' '.join(own.metadata['help'].split())}" in text
    help_text = " ".join(HfArgumentParser(config).format_help().split())
    assert "Leave out of the policy term" not in text or "Leave out of the policy term" in help_text
