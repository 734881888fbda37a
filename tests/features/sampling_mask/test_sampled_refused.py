"""Refusals and warnings of `keep_sampling_mask`."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import PromptTuningConfig
from transformers import AutoModelForCausalLM

import trl_steady
from tests.features.sampling_mask.tools import Sampled, build
from tests.tools import tiny


def config(output: Path, **options: Any) -> trl_steady.GRPOConfig:
    defaults = {"steps_per_generation": 4, "per_device_train_batch_size": 8, "keep_sampling_mask": True, "top_p": 0.9}
    return trl_steady.GRPOConfig(str(output), use_cpu=True, bf16=False, report_to="none", **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": True, "top_k": 0}, "top_k=0: vLLM"),
        ({"use_vllm": True, "top_k": 50, "generation_kwargs": {"top_k": -1}}, "top_k=-1: vLLM"),
    ],
    ids=str,
)
def test_options_whose_kept_tokens_are_not_known_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"keep_sampling_mask=True does not work with {message}"):
        config(tmp_path, **options)
    config(tmp_path, **options, keep_sampling_mask=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile": True}, "torch.compile"),
        (
            {"build": {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}},
            "prompt learning",
        ),
        ({"build": {"rollout_func": lambda *_: {}}}, "a rollout_func"),
    ],
    ids=["torch.compile", "prompt learning", "a rollout_func"],
)
@pytest.mark.filterwarnings("ignore:trim_padding=True has no effect")
def test_trainers_that_cannot_score_among_sets_are_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"keep_sampling_mask=True does not work here: {message}"):
        tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_p=0.9, **options)


@pytest.mark.filterwarnings("ignore:.* GenerationConfig has no")  # options of vLLM's
def test_the_config_knows_which_settings_exclude_tokens_and_warns_of_those_that_reweight_them(tmp_path: Path) -> None:
    excludes: dict[str, tuple[Any, Any]] = {
        "min_p": (0.1, 0.0),
        "typical_p": (0.5, 1.0),
        "structured_outputs": ({"regex": "a+"}, None),
        "min_new_tokens": (3, None),
    }
    reweights: dict[str, tuple[Any, Any]] = {
        "repetition_penalty": (0.9, 1.0),
        "logit_bias": ({"5": 1.0}, {}),
        "exponential_decay_length_penalty": ((2, 1.5), None),
        "temperature": (0.7, 1.0),  # log-probs are at TRL's own
    }
    for option, values in excludes.items():
        active, idle = (config(tmp_path, top_p=1.0, generation_kwargs={option: value}) for value in values)
        assert [name.split("=")[0] for name in active.truncations] == [option] and not idle.truncations
    for option, (value, idle_value) in reweights.items():
        with pytest.warns(UserWarning, match=rf"^{option}=.* also changes .* even with keep_sampling_mask=True\.$"):
            config(tmp_path, generation_kwargs={option: value})
        assert not config(tmp_path, generation_kwargs={option: idle_value}).weightings


def test_the_config_warns_if_no_token_is_excluded(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="keep_sampling_mask=True has no effect because top_p, top_k and min_p"):
        config(tmp_path, top_p=1.0, top_k=0, min_p=0.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("changing", "keep_sampling_mask=True: sequence 2 of the rollout has other tokens than were recorded"),
        ("cutting", "4 completions of 7 tokens has kept tokens of 32 positions. Cut its kept_tokens"),
    ],
)
def test_a_subclass_whose_tokens_are_not_those_of_the_sets_is_refused(
    models: dict[str, Path], tmp_path: Path, kind: str, message: str
) -> None:
    class Changing(Sampled):
        def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
            completion_ids, logprobs = super()._generate_single_turn(*arguments, **keywords)
            completion_ids[2][0] += 1
            return completion_ids, logprobs

    class Cutting(Sampled):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
            cut = {name: inputs[name][:, :-1] for name in ("completion_ids", "completion_mask", "old_per_token_logps")}
            return super().compute_loss(model, {**inputs, **cut}, *others, **options)

    kinds = {"changing": Changing, "cutting": Cutting}
    with pytest.raises(ValueError, match=message):
        build(models["dense"], tmp_path, kinds[kind], top_p=0.6, beta=0.0).train()


@pytest.mark.parametrize("is_on", [False, True])
def test_the_trainer_warns_of_truncated_sampling_without_the_option(
    models: dict[str, Path], tmp_path: Path, is_on: bool
) -> None:
    options = {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0, "typical_p": 0.5, "min_p": 0.3}}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=is_on, **options)
    messages = [str(each.message).partition(")")[0] for each in found if "leaves tokens out" in str(each.message)]
    assert messages == ([] if is_on else ["sampling leaves tokens out (min_p=0.3, typical_p=0.5"])


@pytest.mark.parametrize(
    ("of_model", "options", "said"),
    [
        ({"min_p": 0.3}, {}, "min_p=0.3 of the model's generation_config"),
        ({"no_repeat_ngram_size": 2}, {}, "no_repeat_ngram_size=2 of the model's generation_config"),
        ({"min_p": 0.3}, {"min_p": 0.0}, ""),  # as is top_k, which TRL always sets
        ({"top_k": 20}, {}, ""),
    ],
)
def test_truncation_in_the_models_own_settings_is_seen(
    models: dict[str, Path], tmp_path: Path, of_model: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    """Generation takes them where no option is set."""
    model = AutoModelForCausalLM.from_pretrained(models["dense"])
    model.generation_config.update(**of_model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = tiny.trainer(model, tmp_path, **options)
    messages = [str(each.message) for each in found if "leaves tokens out" in str(each.message)]
    assert [f"({said})" in message for message in messages] == [True] * bool(said)
    acting = model._prepare_generation_config(trainer.generation_config)[0]
    assert {name: getattr(acting, name) for name in of_model} == (of_model if said else dict.fromkeys(of_model, 0))


def test_several_completions_of_one_prompt_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL repeats each prompt itself. Two completions belong to no prompt, in the option or in the model's own."""
    message = "keep_sampling_mask=True: generation returned 32 completions for 16 prompts.* num_return_sequences"
    for options in ({"generation_kwargs": {"num_return_sequences": 2}}, {}):
        trainer = tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_p=0.9, **options)
        if not options:
            trainer.generation_config.num_return_sequences = 2
        with pytest.raises(ValueError, match=message):
            trainer.train()
