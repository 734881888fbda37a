"""What a kept sampling mask cannot do is refused, what will do nothing is said, and so is what goes without it."""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig

import trl_steady
from tests.oracles import sampling as oracle
from tests.tools import sampled, tiny
from tests.tools.headroom import within
from tests.tools.sampled import CLOSE, Sampled, build
from trl_steady.sampling.kept import KeptTokens
from trl_steady.sampling.recording import SetRecording as Recording


def config(output: Path, **options: Any) -> trl_steady.GRPOConfig:
    """Warnings and all."""
    defaults = {"steps_per_generation": 4, "per_device_train_batch_size": 8, "keep_sampling_mask": True, "top_p": 0.9}
    return trl_steady.GRPOConfig(str(output), use_cpu=True, bf16=False, report_to="none", **{**defaults, **options})


def sampling(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func that answers anything: two tokens of the model's, of one of which the engine told nothing, and
    one of somebody else's."""
    prompt_ids = [tiny.tokenizer()(prompt)["input_ids"] for prompt in prompts]
    logprobs: list[list[float | None]] = [[-1.0, -0.1 * number, -9.0] for number in range(len(prompts))]
    logprobs[2][1] = None
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[40 + number, 99, 8] for number in range(len(prompts))],
        "logprobs": logprobs,
        "env_mask": [[1, 1, 0]] * len(prompts),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_transformers_continuous_batching": True},
            r"=True does not work with use_transformers_continuous_batching=True, .*Set it to False, or set keep_",
        ),
        (
            {"generation_kwargs": {"do_sample": False}},
            r"=True does not work with do_sample=False in generation_kwargs, .*Leave do_sample unset, or set keep_",
        ),
        (
            {"generation_kwargs": {"num_beams": 3}},
            r"=True does not work with num_beams=3 in generation_kwargs, .*Leave num_beams unset, or set keep_",
        ),
        (
            {"use_vllm": True, "top_k": 0},
            r"=True does not work with top_k=0: vLLM .*Set top_k=512, for example, in addition to top_p, or set keep_",
        ),
        (
            {"use_vllm": True, "top_k": 50, "generation_kwargs": {"top_k": -1}},
            r"=True does not work with top_k=-1: vLLM .*Set top_k",
        ),
        ({"use_vllm": True}, r"keep_sampling_mask=True does not work with top_k=\S+: vLLM .*Set top_k=512"),
    ],
    ids=str,
)
def test_generation_whose_kept_tokens_nobody_can_tell_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)
    config(tmp_path, **options, keep_sampling_mask=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"torch_compile": True},
            r"keep_sampling_mask=True patches TRL's fused LM head, which torch\.compile.*Set torch_comp",
        ),
        (
            {"build": {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}},
            r"keep_sampling_mask=True does not work with prompt learning, which shifts .*Train LoRA adapters, or",
        ),
        (
            {"build": {"rollout_func": sampling}},
            r"keep_sampling_mask=True does not work with a rollout_func, which returns no kept .*Leave rollout_func",
        ),
    ],
    ids=["torch.compile", "prompt learning", "a rollout_func"],
)
@pytest.mark.filterwarnings("ignore:trim_padding=True does nothing")
def test_trainers_that_cannot_score_among_sets_are_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_p=0.9, **options)


@pytest.mark.parametrize(
    ("option", "active", "idle"),
    [
        ("min_p", 0.1, 0.0),
        ("top_h", 0.5, 1.0),
        ("typical_p", 0.5, 1.0),
        ("epsilon_cutoff", 0.01, 0.0),
        ("eta_cutoff", 0.01, 0.0),
        ("structured_outputs", {"regex": "a+"}, None),
        ("suppress_tokens", [5], None),
        ("no_repeat_ngram_size", 2, 0),
        ("min_new_tokens", 3, None),
    ],
)
def test_what_leaves_tokens_out_is_known(tmp_path: Path, option: str, active: Any, idle: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".* GenerationConfig has no")  # an option of vLLM's
        config(tmp_path, top_p=1.0, generation_kwargs={option: active})
    with pytest.warns(UserWarning, match="keep_sampling_mask=True cannot act"):
        config(tmp_path, top_p=1.0, generation_kwargs={option: idle})


@pytest.mark.parametrize(
    ("option", "active", "idle"),
    [
        ("repetition_penalty", 0.9, 1.0),
        ("encoder_repetition_penalty", 1.1, 1.0),
        ("frequency_penalty", -0.5, 0.0),
        ("presence_penalty", 0.5, 0.0),
        ("logit_bias", {"5": 1.0}, {}),
        ("exponential_decay_length_penalty", (2, 1.5), None),
        ("guidance_scale", 1.5, 1.0),
        ("temperature", 0.7, 1.0),  # where log-probs are at TRL's own
    ],
)
def test_what_moves_probabilities_is_known(tmp_path: Path, option: str, active: Any, idle: Any) -> None:
    with pytest.warns(UserWarning, match=rf"^{option}=.* also changes .* even with keep_sampling_mask=True\.$"):
        config(tmp_path, generation_kwargs={option: active})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".* GenerationConfig has no")
        config(tmp_path, generation_kwargs={option: idle})
        if option != "temperature":  # another one than log-probs are at is never right
            config(tmp_path, generation_kwargs={option: active}, keep_sampling_mask=False)


def refusal(trainer: Any) -> str:
    """Of its first rollout, before the first step."""
    before = tiny.parameters(trainer)
    with pytest.raises(ValueError) as refused:
        tiny.train(trainer)
    assert all(torch.equal(before[name], value) for name, value in tiny.parameters(trainer).items())
    return str(refused.value)


def test_beam_search_of_the_models_own_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_p=0.6)
    trainer.model.generation_config.update(num_beams=2)
    assert re.search(r"keep_sampling_mask=True: .*one token after the other.* Leave beam search", refusal(trainer))


def test_a_token_that_has_not_been_kept_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Recording.of

    def without_one(self: Recording, completions: list[list[int]]) -> KeptTokens:
        sets = own(self, completions).lists()
        place, token = len(completions[0]), completions[1][0]
        assert token in sets[place] and len(sets[place]) > 1
        return KeptTokens.of([*sets[:place], [each for each in sets[place] if each != token], *sets[place + 1 :]])

    monkeypatch.setattr(Recording, "of", without_one)
    message = refusal(tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_p=0.6))
    assert re.search(r"keep_sampling_mask=True: a token of the rollout is not in the.* Set keep_sampling_m", message)


def test_tokens_that_a_subclass_has_changed_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    class Changing(Sampled):
        def generate(self, *arguments: Any, **keywords: Any) -> Any:
            completion_ids, logprobs = super().generate(*arguments, **keywords)
            completion_ids[2][0] += 1
            return completion_ids, logprobs

    message = refusal(build(models["dense"], tmp_path, Changing, top_p=0.6))
    assert re.search(r"keep_sampling_mask=True: sequence 2 of the rollout has other tokens than were rec", message)


def test_a_rollout_of_which_nothing_is_recorded_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    class Own(trl_steady.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            return [[40, 8] for _ in prompt_ids], None

    arguments = tiny.arguments(trl_steady.GRPOConfig, tmp_path, keep_sampling_mask=True, top_p=0.6)
    keywords = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    message = refusal(Own(str(models["dense"]), tiny.reward, arguments, **keywords))
    assert re.search(r"keep_sampling_mask=True: Own made a rollout without calling `generate`.* Override", message)


def test_a_micro_batch_that_has_been_cut_without_its_sets_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    class Cutting(Sampled):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
            cut = {name: inputs[name][:, :-1] for name in ("completion_ids", "completion_mask", "old_per_token_logps")}
            return super().compute_loss(model, {**inputs, **cut}, *others, **options)

    message = refusal(build(models["dense"], tmp_path, Cutting, top_p=0.6, beta=0.0))
    assert re.search(r"4 completions of 7 tokens has kept tokens of 32 positions\. Cut its kept_tokens", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"top_p": 1.0},
            r"keep_sampling_mask=True cannot act: with top_p, top_k and min_p unset, .*Set one of them, or leave k",
        ),
        ({"generation_kwargs": {"top_p": 1.0}}, r"keep_sampling_mask=True cannot act: with top_p"),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, r"keep_sampling_mask=True cannot act: with top_p"),
        (
            {"repetition_penalty": 1.1},
            r"repetition_penalty=1\.1 also changes the probabilities of the kept tokens",
        ),
        (
            {"generation_kwargs": {"sequence_bias": {(5,): 1.0}, "guidance_scale": 1.5}},
            r"sequence_bias=\{.*\}, guidance_scale=1\.5 also changes the probabilities",
        ),
    ],
    ids=str,
)
def test_what_will_do_nothing_or_not_all_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 1.0, "min_p": 0.1},
        {"top_p": 1.0, "top_k": 20},
        {"top_p": 1.0, "generation_kwargs": {"top_k": 20}},
        {"top_p": 1.0, "generation_kwargs": {"typical_p": 0.9}},
        {"use_vllm": True, "top_k": 20},
        {"use_vllm": True, "generation_kwargs": {"top_k": 20}},
        {"repetition_penalty": 1.0, "generation_kwargs": {"guidance_scale": 1, "num_beams": 1, "do_sample": True}},
        {"keep_sampling_mask": False, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_what_acts_is_passed_over_in_silence(tmp_path: Path, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config(tmp_path, **options)


def heard(trainer: Any) -> list[str]:
    """What a run says of sampling."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tiny.train(trainer)
    return [str(each.message) for each in found if "sampl" in str(each.message)]


def figures(message: str) -> list[float]:
    """Kept mass and nats a token, in three digits."""
    ((mass, nats),) = re.findall(
        r"the kept tokens had (\S+) of the probability mass.* are (\S+) nats per token", message
    )
    return [float(mass), float(nats)]


def agree(found: list[float], values: tuple[float, float]) -> bool:
    """To half a unit of the third digit, which is the last one that is printed."""
    return all(
        within(abs(own - value), 1e-5 * value, granted=0.5 * 10.0 ** (math.floor(math.log10(value)) - 2))
        for own, value in zip(found, values, strict=True)
    )


WITHOUT = {"keep_sampling_mask": False, "beta": 0.0}


def of_rollout(trainer: Any) -> tuple[float, float]:
    """The same of its first rollout: the sampler is above the policy by their KL among the sets, and by their mass."""
    (turn,) = trainer.draws[0]
    policy = torch.cat([drawn.logits for drawn in turn]).double() / trainer.args.temperature
    sampler, sets = torch.cat([drawn.scores for drawn in turn]), [each for drawn in turn for each in drawn.sets]
    masses = oracle.kept_mass(policy, sets)
    gaps = oracle.kl(sampler, policy, sets) - masses.log()
    return float(masses.mean()), float(gaps.mean())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"top_p": 0.6}, "top_p=0.6"),
        ({"top_k": 12, "temperature": 0.7}, "top_k=12"),
        (
            {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0, "typical_p": 0.5, "min_p": 0.3}},
            "min_p=0.3, typical_p=0.5",
        ),
        ({"min_p": 0.2, "lora": "attention", "steps_per_generation": 1, "temperature": 1.5}, "min_p=0.2"),
    ],
    ids=str,
)
def test_without_the_option_it_is_said_once_how_far_off_log_probs_are(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    trainer = build(models["dense"], tmp_path, **WITHOUT, max_steps=5, **options)
    (message,) = heard(trainer)
    assert len(trainer.draws) > 1 and message.startswith(f"sampling leaves tokens out ({named}), and log-probs")
    assert message.endswith("Set keep_sampling_mask=True, or sample from the whole vocabulary.")
    assert agree(figures(message), of_rollout(trainer))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repetition_penalty": 0.2}, "repetition_penalty=0.2"),
        ({"temperature": 1.2, "generation_kwargs": {"temperature": 0.6}}, "temperature=0.6"),
    ],
    ids=str,
)
def test_what_is_told_holds_where_probabilities_are_moved_too(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    trainer = build(models["dense"], tmp_path, **WITHOUT, max_steps=1, top_k=12, **options)
    (message,) = heard(trainer)
    assert f"{named} also changes the probabilities of the kept tokens" in message
    assert agree(figures(message), of_rollout(trainer))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"top_p": 0.6, "keep_sampling_mask": True},
        {"keep_sampling_mask": True},
    ],
    ids=str,
)
def test_nothing_is_said_where_nothing_is_off(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    assert heard(build(models["dense"], tmp_path, **{**WITHOUT, "max_steps": 1, **options})) == []


def test_evaluation_says_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """Nor does it keep training from saying it."""
    build_ = {"eval_dataset": tiny.dataset(4)}
    trainer = build(models["dense"], tmp_path, **WITHOUT, top_p=0.6, max_steps=1, build=build_)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.evaluate()
    assert trainer.draws
    trainer.draws.clear()
    (message,) = heard(trainer)
    assert agree(figures(message), of_rollout(trainer))


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 1}], ids=str)
def test_of_a_rollout_func_its_own_log_probs_tell(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Where the old policy's are there to compare with, and of what the model has sampled."""
    build_ = {"rollout_func": sampling}
    trainer = build(models["dense"], tmp_path, **WITHOUT, top_p=0.6, max_steps=1, build=build_, **options)
    (message,) = heard(trainer)
    output = trainer.rollouts[0][1]
    if options:
        assert "The difference has not been measured." in message and "old_per_token_logps" not in output
        return
    expected = torch.tensor([[-1.0, -0.1 * number] for number in range(16)]).double()
    apart = output["old_per_token_logps"][:, :2].double() - expected
    apart = torch.cat([apart[:2].flatten(), apart[2, :1], apart[3:].flatten()])
    assert agree(figures(message), (float(apart.exp().mean()), -float(apart.mean())))


def test_sets_that_are_too_large_are_counted_and_not_kept(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens have log-probs of the whole vocabulary."""
    limit = 15
    sampled.limit_sets(monkeypatch, limit)
    trainer = build(models["dense"], tmp_path, top_p=0.6, max_steps=5)
    (message,) = heard(trainer)
    assert len(trainer.draws) == 2
    (turn,) = trainer.draws[0]
    sizes = [len(each) for drawn in turn for each in drawn.sets]
    large = sum(size > limit for size in sizes)
    assert 0 < large < len(sizes)
    assert message.startswith(f"{large} of {len(sizes)} tokens were sampled among more than 4096 tokens or among all")
    assert message.endswith("Set top_k to bound the number of kept tokens.")
    assert tiny.history(trainer)[0]["sampling_mask/fallback"] == pytest.approx(large / len(sizes), rel=1e-12)
    kept = {tuple(drawn.ids): [each if len(each) <= limit else [] for each in drawn.sets] for drawn in turn}
    policy = sampled.models(models["dense"], trainer)
    for update in trainer.updates[:2]:
        for row in sampled.rows(update):
            assert row.sets == kept[tuple(row.ids)]
            expected = sampled.log_probs(sampled.scores(policy(update.weights), row), row)
            torch.testing.assert_close(row.values["logps"].double(), expected, **CLOSE)
