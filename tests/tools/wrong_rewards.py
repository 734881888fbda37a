"""What a user's functions return wrongly in a rollout, with what each message says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.tools import tiny
from tests.tools.wrong_inputs import Input, Make, answering, trainer
from trl_steady import StepRewards
from trl_steady.rewards import by_blank_line

INF, NAN = float("inf"), float("nan")


def returning(returned: Any, **options: Any) -> Make:
    """A reward function `careless` that returns this, or what it makes of the completions."""

    def careless(completions: list[str], **_: Any) -> Any:
        return returned(completions) if callable(returned) else returned

    return answering(careless, **options)


def each(reward: Any, **options: Any) -> Make:
    """The same for every completion."""
    return returning(lambda completions: [reward() if callable(reward) else reward] * len(completions), **options)


def steps(make: Callable[[], StepRewards], **options: Any) -> Make:
    return each(make, **{"loss_type": "gspo_token", **options})


def rolling(change: dict[str, Any], **options: Any) -> Make:
    """A rollout_func of three tokens a completion, with this changed."""

    def own(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [[50, 51]] * len(prompts), "completion_ids": [[60, 61, 62]] * len(prompts)}
        return {**ids, "logprobs": None, **change}

    return trainer(build={"rollout_func": own}, **options)


async def judge(completions: list[str], **_: Any) -> list[float]:
    return [0.0, INF, *[0.0] * (len(completions) - 2)]


async def unsure(completions: list[str], **_: Any) -> list[float]:
    return [NAN] * len(completions)


def scoring(score: float) -> Make:
    """A reward model that scores all of them so."""

    def make(models: dict[str, Path], folder: Path) -> Any:
        model = Qwen2ForSequenceClassification(Qwen2Config(**{**tiny.SIZES, "num_labels": 1, "name_or_path": "rm"}))
        model.score.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, score))
        build = {"reward_funcs": [model], "reward_processing_classes": [tiny.tokenizer()]}
        return tiny.trainer(models["dense"], folder, build=build)

    return make


def said(name: str, make: Make, message: str, kind: type = ValueError, is_ours: bool = True) -> Input:
    return Input(name, make, message, kind, "rollout", is_ours)


ITEM = r"for completion 0\. Return a float or None\. For step rewards return"
A_LIST = r"Return a list with one reward for each completion"
REWARDS = [
    said("a float", returning(1.0), rf"'careless' returned 1\.0\. {A_LIST}"),
    said("nothing", returning(None), rf"'careless' returned None\. {A_LIST}"),
    said("a text", returning("1" * 16), rf"'careless' returned '1+'\. {A_LIST}"),
    said("a dict", returning({"a": 1}), rf"'careless' returned {{'a': 1}}\. {A_LIST}"),
    said("a set", returning({1.0, 2.0}), rf"'careless' returned {{.*}}\. {A_LIST}"),
    said("steps alone", returning(StepRewards([1.0], [1])), rf"'careless' returned StepRewards\(.*\. {A_LIST}"),
    said("a coroutine", returning(lambda _: judge([])), r"'careless' returned <coroutine.*Use async def"),
    said("texts", each("good"), rf"'careless' returned 'good' {ITEM}"),
    said("numbers as texts", each("1"), rf"'careless' returned '1' {ITEM}"),
    said("dicts", each({"score": 1.0}), rf"'careless' returned {{'score': 1\.0}} {ITEM}"),
    said("lists", each([1.0, 0.0]), rf"'careless' returned \[1\.0, 0\.0\] {ITEM}"),
    said("a column vector", returning(lambda texts: torch.ones(len(texts), 1)), rf"returned \[1\.0\] {ITEM}"),
    said("vectors", each(torch.ones(2)), rf"returned tensor\(\[1\., 1\.\]\) {ITEM}"),
    said("complex numbers", each(1j), rf"'careless' returned 1j {ITEM}"),
    said("a huge number", each(10**400), rf"'careless' returned 10+\.\.\.0+ {ITEM}"),
    said("a splitter's steps", each(by_blank_line()("a")), rf"returned Steps\(.* {ITEM}.*splitter's Steps"),
    said("too few", returning(lambda texts: [1.0] * 3), r"'careless' returned 3 .* 16 .*Make sure", is_ours=False),
    said("too many", returning(lambda texts: [1.0] * 17), r"'careless' returned 17 .*Make sure", is_ours=False),
    said(
        "inf",
        returning(lambda texts: [0.0] * 15 + [INF]),
        r"'careless' returned inf for completion 15, .*Return a fin",
    ),
    said("minus inf", each(-INF), r"'careless' returned -inf for completion 0, .*Return a finite number, or None"),
    said(
        "beyond float32",
        each(1e39),
        r"'careless' returned inf for completion 0, after conversion to float32\. Return a fin",
    ),
    said("async inf", answering(judge), r"'judge' returned inf for completion 1, .*Return a finite number"),
    said("a model's inf", scoring(INF), r"'rm' returned inf for completion 0, .*Return a finite number, or None"),
    said(
        "nan", returning(lambda texts: [0.0] * 15 + [NAN]), r"'careless' returned nan, .*Return None if", UserWarning
    ),
    said("async nan", answering(unsure), r"'unsure' returned nan, .*Return None if you mean that", UserWarning),
    said("a model's nan", scoring(NAN), r"'rm' returned nan, .*Check the reward model", UserWarning),
]

STEPS = [
    said(
        "gspo",
        steps(lambda: StepRewards([1.0], [1]), loss_type="gspo"),
        r"'careless' returned StepRewards, .*with loss_type='gspo'.*Set loss_type='gspo_token'",
    ),
    said(
        "normalised each",
        steps(lambda: StepRewards([1.0], [1]), multi_objective_aggregation="normalize_then_sum"),
        r"'careless' returned StepRewards, .*='normalize_then_sum'.*Set multi_objective_aggregation='sum_then_n",
    ),
    said(
        "falling ends",
        steps(lambda: StepRewards([1, 1], [4, 4])),
        r"has ends\[1\]=4, .* not after ends\[0\]=4\. Give exclusive ends that increase",
    ),
    said(
        "no length",
        steps(lambda: StepRewards([1], [0])),
        r"has ends\[0\]=0, which is not after 0\. Give exclusive ends",
    ),
    said("too few ends", steps(lambda: StepRewards([1, 1], [4])), r"has 2 values and 1 ends\. Give one end for each"),
    said("half an end", steps(lambda: StepRewards([1], [1.5])), r"has ends\[0\]=1\.5\. Give whole numbers"),
    said("ends as text", steps(lambda: StepRewards([1], "4")), r"has ends='4'\. Give a list of numbers"),
    said("one value", steps(lambda: StepRewards(1.0, [4])), r"has values=1\.0\. Give a list of numbers"),
    said(
        "inf in steps",
        steps(lambda: StepRewards([INF], [4])),
        r"has values\[0\]=inf\. Give finite numbers.*return None",
    ),
    said("nan in steps", steps(lambda: StepRewards([NAN], [4])), r"has values\[0\]=nan\. Give finite numbers"),
    said("None in steps", steps(lambda: StepRewards([None], [4])), r"has values\[0\]=None\. Give finite numbers"),
    said(
        "an infinite sum",
        steps(lambda: StepRewards.at_tokens([3e38] * 2, [1, 2])),
        r"'careless' returned inf for completion 0, .*Return a finite",
    ),
    said(
        "closed tokens",
        steps(lambda: StepRewards([1], [4], closed=True, unit="tokens")),
        r"closed=True with ends in tokens.*Leave closed unset",
    ),
    said(
        "another unit",
        steps(lambda: StepRewards([1], [4], unit="words")),
        r"has the unknown unit='words'\. Use StepRewards\.at_tokens",
    ),
    said(
        "beyond the tokens",
        steps(lambda: StepRewards.at_tokens([1], [99])),
        r"'careless': StepRewards has ends\[0\]=99, but completion 0 has .*return",
    ),
    said(
        "beyond the text",
        steps(lambda: StepRewards([1], [999])),
        r"'careless': StepRewards has ends\[0\]=999, but completion 0 .*return",
    ),
    said(
        "too many turns",
        steps(lambda: StepRewards.per_turn([1, 1])),
        r"'careless': StepRewards\.per_turn has 2 values.*Give one value",
    ),
    said(
        "no steps",
        steps(lambda: StepRewards([], [])),
        r"no completion of a group of 4 has a step \(StepRewards\(\[\], \[\]\)\).*Check",
        UserWarning,
    ),
    said(
        "a formula",
        trainer(step_advantage="process"),
        r"step_advantage='process' cannot act.*Return them, or leave",
        UserWarning,
    ),
]

TOKENS = [[60, 61, 62]] * 16
OUTPUTS = [
    said(
        "a list",
        trainer(build={"rollout_func": lambda prompts, trainer: []}),
        r"rollout_func returned \[\]\. Return a dict",
    ),
    said("no completions", rolling({"completion_ids": None}), r"rollout_func returned completion_ids=None\. Return"),
    said(
        "three completions",
        rolling({"completion_ids": TOKENS[:3]}),
        r"returned 3 completion_ids for 16 prompts\. Return",
    ),
    said(
        "three prompts", rolling({"prompt_ids": TOKENS[:3]}), r"returned 3 prompt_ids for 16 prompts\. Return one list"
    ),
    said(
        "an empty completion",
        rolling({"completion_ids": [[]] * 16}),
        r"completion_ids\[0\]=\[\]\. Return at least one",
    ),
    said(
        "text for tokens",
        rolling({"completion_ids": ["abc"] * 16}),
        r"completion_ids\[0\]='abc'\. Return at least one",
    ),
    said(
        "three log-probs", rolling({"logprobs": [[-1.0] * 3] * 3}), r"returned 3 logprobs for 16 prompts\. Return one"
    ),
    said(
        "one log-prob",
        rolling({"logprobs": [[-1.0]] * 16}),
        r"returned 1 logprobs for the 3 tokens of .*\[0\]\. Return",
    ),
    said(
        "probabilities", rolling({"logprobs": [[0.5] * 3] * 16}), r"returned 0\.5 in logprobs\[0\].*Return log-probs"
    ),
    said(
        "probabilities in a tensor",
        rolling({"logprobs": torch.full((16, 3), 0.5)}),
        r"returned 0\.5 in logprobs\[0\].*Return log-probs",
    ),
    said(
        "one in the mask",
        rolling({"env_mask": [[1]] * 16}),
        r"returned 1 env_mask for the 3 tokens of .*\. Return one",
    ),
    said("two masks", rolling({"env_mask": [[1] * 3] * 2}), r"returned 2 env_mask for 16 prompts\. Return one list"),
    said(
        "no log-probs for a mask",
        rolling({}, token_veto_threshold=1e-4),
        r"token_veto_threshold=0\.0001 needs the sampler's log-probs.*Return 'logprobs' from rollout_func",
    ),
]

ROLLOUTS = [*REWARDS, *STEPS, *OUTPUTS]
