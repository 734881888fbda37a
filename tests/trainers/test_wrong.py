"""What users get wrong in models, data and functions: each message comes before the first step and names a way out."""

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification
from trl.trainer import grpo_trainer, rloo_trainer

import trl_steady
from tests.tools import tiny
from trl_steady import StepRewards
from trl_steady.trl_bridge.validation import PASSED, refuse_shared_engine_for_tools

INF, NAN = float("inf"), float("nan")


def rewarding(reward: Callable[[], object]) -> dict[str, Any]:
    def careless(completions: list[str], **_: Any) -> list[Any]:
        return [reward() for _ in completions]

    return {"loss_type": "gspo_token", "build": {"reward_funcs": careless}}


def rolling(**change: Any) -> dict[str, Any]:
    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = {"prompt_ids": [[50, 51]] * len(prompts), "completion_ids": [[60, 61, 62]] * len(prompts)}
        return {**ids, "logprobs": None, **change}

    return {"build": {"rollout_func": roll}}


def scoring(score: float) -> dict[str, Any]:
    """A reward model that scores all completions so."""
    model = Qwen2ForSequenceClassification(Qwen2Config(**{**tiny.SIZES, "num_labels": 1, "name_or_path": "rm"}))
    model.score.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, score))
    return {"build": {"reward_funcs": [model], "reward_processing_classes": [tiny.tokenizer()]}}


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            lambda: rewarding(lambda: -INF), r"'careless' is -inf .*completion 0 .*Return a finite", id="minus inf"
        ),
        pytest.param(lambda: rewarding(lambda: 1e39), r"is inf \(in float32\)", id="beyond float32"),
        pytest.param(lambda: scoring(INF), r"'rm' is inf", id="a model's inf"),
        pytest.param(
            lambda: rewarding(lambda: StepRewards.at_tokens([3e38] * 2, [1, 2])), "is inf", id="an infinite sum"
        ),
        pytest.param(
            lambda: {
                **rewarding(lambda: StepRewards([1], [1])),
                "multi_objective_aggregation": "normalize_then_sum",
            },
            r"StepRewards, .*Set .*='sum_then_norm",
            id="steps, normalised",
        ),
        pytest.param(
            lambda: rewarding(lambda: StepRewards([1], [999])),
            r"999, .* of reward function 'careless'",
            id="an end too far",
        ),
        pytest.param(
            lambda: rolling(logprobs=[[-1.0] * 3] * 3),
            "logprobs of lengths .*one value for each token",
            id="three log-probs",
        ),
        pytest.param(
            lambda: rolling(env_mask=[[1]] * 16), "env_mask of lengths .*one value for each token", id="short masks"
        ),
        pytest.param(
            lambda: {**rolling(), "token_veto_threshold": 1e-4},
            r"=0\.0001 needs the sampler's log-probs.*Return 'logprobs'",
            id="no log-probs",
        ),
        pytest.param(
            lambda: rolling(prompt_ids=[[50]] * 32, completion_ids=[[60]] * 32),
            r"rollout_func returned completion_ids of lengths .* for 16 prompts.*one completion",
            id="two answers",
        ),
        pytest.param(
            lambda: rolling(completion_ids=[[], *[[60, 61, 62]] * 15]),
            r"rollout_func returned completion_ids of lengths \[0, 3.*one token or more",
            id="no answer",
        ),
        pytest.param(
            lambda: {"build": {"train_dataset": tiny.dataset(2)}},
            r"has 2 rows, .* needs 4 prompts .*set a sm",
            id="two rows",
        ),
    ],
)
def test_a_mistake_is_named_before_the_first_step(
    models: dict[str, Path], tmp_path: Path, options: Callable[[], dict[str, Any]], message: str
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, max_steps=1, **options())
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_frozen_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["dense"]).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter.*Set requires_grad=True"):
        tiny.trainer(model, tmp_path, build={"processing_class": tiny.tokenizer()})


def test_what_teaches_nothing_is_warned_of(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, max_steps=1, **scoring(NAN))
    with pytest.warns(UserWarning, match="'rm' is nan, .*Check the weights"):
        trainer.train()


# columns that TRL or a reward function needs


def wants_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


async def wants_answer_later(completions: list[str], *, answer: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


class Judge:
    def __call__(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)


def wants_one(prompt: str, completion: str) -> float:
    return 1.0


def columns(*names: str) -> Dataset:
    return Dataset.from_dict({name: ["1+1="] * 16 for name in names})


WANTED = r" asks for 'answer'\. TRL passes prompts, completions, completion_ids, .*log_metric, question, answers\."


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            {"train_dataset": columns("question", "answers")},
            r"no column 'prompt', but question, answers\. .*rename_column\('question', 'prompt'\)",
            id="no prompt",
        ),
        pytest.param(
            {"reward_funcs": wants_answer}, "'wants_answer'" + WANTED + r" Did you mean 'answers'\?", id="a function"
        ),
        pytest.param(
            {"reward_funcs": [tiny.reward, wants_answer_later]}, "'wants_answer_later'" + WANTED, id="of two"
        ),
        pytest.param({"reward_funcs": Judge()}, WANTED, id="an object"),
        pytest.param({"reward_funcs": functools.partial(wants_answer, strict=True)}, WANTED, id="a partial"),
        pytest.param(
            {"reward_funcs": wants_one},
            r"asks for '(prompt|completion)'.* Did you mean '(prompt|completion)s'",
            id="one prompt",
        ),
        pytest.param(
            {"train_dataset": columns("prompt", "completions")},
            "has a column 'completions', as TRL names all completions",
            id="a taken name",
        ),
        pytest.param(
            {"reward_funcs": wants_answer, "train_dataset": columns("prompt").to_iterable_dataset()},
            "'answer'",
            id="a stream",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named_when_the_trainer_is_built(
    models: dict[str, Path], tmp_path: Path, build: dict[str, Any], message: str, method: str
) -> None:
    build = {"train_dataset": columns("prompt", "question", "answers"), **build}
    with pytest.raises(ValueError, match=message):
        tiny.trainer(models["dense"], tmp_path, build=build, method=method)


@functools.lru_cache
def cached(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    raise AssertionError


def given(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_answer(completions: list[str], **_: Any) -> Any:
        return function(completions, answer=["2"])

    return with_answer


def optional(completions: list[str], answer: Any = None, **_: Any) -> list[float]:
    return [1.0] * len(completions)


def everything(
    prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any
) -> list[float]:
    return [1.0] * len(prompts)


class Adds(trl_steady.GRPOTrainer):
    """A trainer of a script that adds a column to a rollout."""

    def _calculate_rewards(self, inputs: Any, *arguments: Any) -> Any:
        return super()._calculate_rewards([{**row, "answer": "2"} for row in inputs], *arguments)


class Collates(trl_steady.GRPOTrainer):
    """A trainer of a script whose constructor goes on after ours."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.data_collator = lambda rows: [{**row, "answer": "2"} for row in rows]


class Generates(trl_steady.GRPOTrainer):
    """A trainer of a script that hands on a column as a `rollout_func` does."""

    def _generate(self, *arguments: Any) -> Any:
        *first, more, images, tool_images = super()._generate(*arguments)
        return (*first, {**more, "answer": "2"}, images, tool_images)


class Loads(trl_steady.GRPOTrainer):
    """A trainer of a script that adds a column to the data."""

    def _get_dataloader(self, dataset: Any, *arguments: Any, **keywords: Any) -> Any:
        return super()._get_dataloader(dataset.add_column("answer", ["2"] * 16), *arguments, **keywords)


class Begins(trl_steady.GRPOTrainer):
    """A trainer of a script whose constructor adds nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)


class Proxy:
    """An object that asks elsewhere for what it does not have, as clients of servers do."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError if name == "__signature__" else AttributeError

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)


class OwnDataset(Dataset):
    """A data set of a script, whose rows have another column."""


def transformed(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"prompt": rows["question"], "answer": rows["question"]}


def mapped() -> IterableDataset:
    return columns("question").to_iterable_dataset().map(lambda row: {**row, "prompt": "1+1=", "answer": "2"})


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda: {"reward_funcs": [optional, everything, functools.partial(wants_answer, answer=["2"])]},
            id="a default",
        ),
        pytest.param(lambda: {"reward_funcs": given(wants_answer)}, id="decorated"),
        pytest.param(lambda: {"reward_funcs": [cached, Proxy()]}, id="no signature"),
        pytest.param(lambda: {"train_dataset": columns("question").with_transform(transformed)}, id="a transform"),
        pytest.param(lambda: {"train_dataset": mapped()}, id="a stream of unknown columns"),
        pytest.param(lambda: {"train_dataset": OwnDataset(columns("question").data)}, id="a class of its own"),
        pytest.param(lambda: {**rolling()["build"], "reward_funcs": wants_answer}, id="a rollout_func"),
        pytest.param(
            lambda: {**scoring(1.0)["build"], "train_dataset": columns("prompt", "completions")}, id="a reward model"
        ),
    ],
)
def test_columns_that_may_fit_are_not_refused(
    models: dict[str, Path], tmp_path: Path, build: Callable[[], dict[str, Any]]
) -> None:
    built = build()
    wants = {"reward_funcs": wants_answer} if "train_dataset" in built else {}
    tiny.trainer(models["dense"], tmp_path, build={**wants, **built}, max_steps=1)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", [Adds, Collates, Generates, Loads, Begins])
def test_a_subclass_may_add_a_column(models: dict[str, Path], tmp_path: Path, kind: Any) -> None:
    """One that does not is told when its training begins."""
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, max_steps=1)
    trainer = kind(str(models["dense"]), wants_answer, args, tiny.dataset(), processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match="asks for 'answer'") if kind is Begins else nullcontext():
        trainer.train()


WITH_ANSWER = columns("prompt", "question", "answer")
EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        pytest.param(
            {"eval_dataset": columns("question", "answer")},
            {},
            r"^eval_dataset has no column 'prompt', but question, answer\. .*eval_dataset\.rename_column\('question'",
            id="no prompt",
        ),
        pytest.param(
            {"eval_dataset": columns("prompt", "answers")},
            {},
            r"^reward function 'wants_answer' asks for 'answer'\. With eval_dataset, TRL passes .* mean 'answers'\?",
            id="a function",
        ),
        pytest.param(
            {"eval_dataset": {"whole": WITH_ANSWER, "cut": columns("prompt")}},
            {},
            r"^reward function 'wants_answer' asks for 'answer'\. With eval_dataset\['cut'\], TRL passes ",
            id="one of two sets",
        ),
        pytest.param(
            {"eval_dataset": columns("prompt", "answer", "completions")},
            {},
            "^eval_dataset has a column 'completions', as TRL names all",
            id="a taken name",
        ),
        pytest.param(
            {"eval_dataset": columns("prompt").to_iterable_dataset()},
            {"eval_strategy": "no", "eval_on_start": True},
            "^reward function 'wants_answer' asks for 'answer'",
            id="a stream, at the start",
        ),
    ],
)
def test_columns_of_evaluations_are_named_when_the_trainer_is_built(
    models: dict[str, Path], tmp_path: Path, build: Any, options: dict[str, Any], message: str, method: str
) -> None:
    build = {"train_dataset": WITH_ANSWER, "reward_funcs": wants_answer, **build}
    with pytest.raises(ValueError, match=message):
        tiny.trainer(models["dense"], tmp_path, build=build, method=method, **{**EVALUATES, **options})


def test_a_column_with_a_name_of_trls_is_named_once(models: dict[str, Path], tmp_path: Path) -> None:
    build = {"train_dataset": columns("prompt", "prompts"), "reward_funcs": [tiny.reward, tiny.reward]}
    with pytest.raises(ValueError, match="as TRL names all prompts") as raised:
        tiny.trainer(models["dense"], tmp_path, build=build)
    assert str(raised.value).count("as TRL names all prompts") == 1


def test_a_column_of_strengths_that_evaluations_lack_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    build = {"train_dataset": columns("prompt").add_column("strength", [1.0] * 16), "eval_dataset": columns("prompt")}
    with pytest.raises(
        ValueError, match=r"^eval_dataset has no column 'strength', but prompt\. Set beta_column to one"
    ):
        tiny.trainer(models["dense"], tmp_path, build=build, beta=0.1, beta_column="strength", **EVALUATES)


class Evaluates(trl_steady.GRPOTrainer):
    """A trainer of a script that evaluates on other columns."""

    def get_eval_dataloader(self, *arguments: Any, **keywords: Any) -> Any:
        return super().get_eval_dataloader(WITH_ANSWER)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("kind", "options"), [(Evaluates, EVALUATES), (trl_steady.GRPOTrainer, {})])
def test_columns_of_evaluations_that_may_fit_or_that_nothing_reads_are_not_refused(
    models: dict[str, Path], tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, max_steps=1, **options)
    keywords = {"eval_dataset": columns("prompt"), "processing_class": tiny.tokenizer()}
    trainer = kind(str(models["dense"]), wants_answer, args, WITH_ANSWER, **keywords)
    assert tiny.train(trainer).state.global_step == 1


def test_a_column_that_is_removed_takes_no_name(models: dict[str, Path], tmp_path: Path) -> None:
    build = {"train_dataset": columns("prompt", "completions")}
    tiny.trainer(models["dense"], tmp_path, build=build, remove_unused_columns=True, max_steps=1).train()


@pytest.mark.parametrize("module", [grpo_trainer, rloo_trainer])
def test_trl_passes_what_the_check_knows(module: Any) -> None:
    source = inspect.getsource(module)
    passed = {*re.findall(r' reward_kwargs\["(\w+)"\] = ', source)} - {"environments"}
    (call,) = {*re.findall(r"reward_func\(\s*(.*), \*\*reward_kwargs", source)}
    assert passed | {*re.findall(r"(\w+)=", call)} == {*PASSED}


def test_the_config_of_another_trainer_is_told_that_trainers_name(models: dict[str, Path], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.PPOConfig, tmp_path)
    with pytest.raises(ValueError, match=r"import GRPOConfig, GRPOTrainer, or use trl_steady\.PPOTrainer\.$"):
        trl_steady.GRPOTrainer(str(models["dense"]), tiny.reward, args, tiny.dataset())
    theirs = tiny.arguments(trl.GRPOConfig, tmp_path)
    with pytest.raises(ValueError, match=r"Import both: from trl_steady import GRPOConfig, GRPOTrainer\.$"):
        trl_steady.GRPOTrainer(str(models["dense"]), tiny.reward, theirs, tiny.dataset())


class WithTools(trl_steady.GRPOTrainer):
    """Says what the refusal asks of a trainer."""

    def __init__(self, mode: str, tensor_parallel: int, processes: int, *, has_tools: bool) -> None:
        self.args = cast(Any, SimpleNamespace(vllm_mode=mode, vllm_tensor_parallel_size=tensor_parallel))
        self.accelerator = cast(Any, SimpleNamespace(num_processes=processes))
        self.tools, self.use_vllm = [print] if has_tools else [], True


@pytest.mark.parametrize(
    ("mode", "tensor_parallel", "processes", "has_tools", "why"),
    [
        ("server", 1, 2, True, "vllm_mode='server' on 2 processes"),
        ("colocate", 2, 4, True, "vllm_tensor_parallel_size=2 on 4 processes"),
        ("server", 1, 1, True, ""),
        ("colocate", 1, 2, True, ""),
        ("server", 1, 2, False, ""),
    ],
)
def test_tools_of_several_processes_need_an_engine_each(
    mode: str, tensor_parallel: int, processes: int, has_tools: bool, why: str
) -> None:
    trainer = WithTools(mode, tensor_parallel, processes, has_tools=has_tools)
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        refuse_shared_engine_for_tools(cast(Any, trainer))
