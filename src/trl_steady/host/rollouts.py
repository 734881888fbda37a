"""Changes of what TRL computes in a rollout: its reward functions, its table of completions, its generation.

This file knows TRL's private state of a rollout.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import trl
from accelerate.utils import send_to_device
from torch import Tensor
from trl.trainer.utils import is_async_callable

from trl_steady.host.mistakes import naming_columns
from trl_steady.host.names import completions_of, overridden, trls

if TYPE_CHECKING:
    from trl_steady.host.part import Rollout, Trainer


@contextmanager
def building_reference(trainer: "Trainer", args: Any) -> Iterator[None]:
    """Let TRL's constructor make a reference although the loss has no KL."""
    with overridden(args, {} if args.beta else {"beta": 1.0}):
        yield
    trainer.beta = args.beta


@contextmanager
def scoring_reference(trainer: "Trainer") -> Iterator[None]:
    """Let TRL's rollout score the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    beyond = trainer.args.gradient_accumulation_steps + 1
    with overridden(trainer, {"num_iterations": beyond, "beta": trainer.beta or 1.0}):
        yield


@contextmanager
def skipping_old_pass(trainer: "Trainer") -> Iterator[None]:
    """Keep TRL's rollout from scoring the old policy. RLOO's `old_logps` are 0, and GRPO's engine has no weights."""

    def unscored(_: object, input_ids: Tensor, __: object, width: int, *___: object, **____: object) -> Any:
        return torch.zeros(len(input_ids), width, device=input_ids.device), None, None

    scoring = {"_get_per_token_logps_and_entropies": unscored}
    is_rloo = isinstance(trainer, trl.RLOOTrainer)
    with overridden(trainer, scoring if is_rloo else {"vllm_importance_sampling_correction": False}):
        yield


@contextmanager
def noting_prompts(trainer: "Trainer", note: Callable[[list[list[int]]], None]) -> Iterator[None]:
    """Tell `note` the token ids of the prompts of each rollout, as the policy has read them."""
    generate = trls(trainer)._generate

    def noting(*arguments: object, **keywords: object) -> tuple[Any, ...]:
        generated = generate(*arguments, **keywords)
        note(generated[0])
        return generated

    with overridden(trainer, {"_generate": noting}):
        yield


def continued(trainer: "Trainer", prompt_ids: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """Return one continuation of each text, by whatever generates rollouts. It is not part of a rollout.

    The number of texts must be the same on all processes. transformers continues `chunk` of them at once, vLLM all.
    """
    rest = (None, {}) if isinstance(trainer, trl.RLOOTrainer) else (None, {}, 1)  # images, their fields, answers each
    chunk = len(prompt_ids) if trainer.use_vllm else chunk
    found: list[list[int]] = []
    # RLOO's trainer has the server answer every `num_generations`-th text
    with overridden(trainer, {"rollout_in_progress": None, "num_generations": 1, "num_generations_eval": 1}):
        for start in range(0, len(prompt_ids), max(chunk, 1)):
            texts = [list(ids) for ids in prompt_ids[start : start + chunk]]
            found += completions_of(trls(trainer)._generate_single_turn(texts, *rest))
    return found


def forget_logs(trainer: "Trainer") -> None:
    """Forget the metrics and the table of completions since the last log."""
    trainer.metrics.forget()
    for values in (*trls(trainer)._metrics.values(), *trls(trainer)._logs.values()):
        values.clear()


def reading(functions: Sequence[Any], reads: Sequence[Callable[[int, Any], Any]]) -> list[Any]:
    """Return reward functions whose results go through all `reads`, which get the function's number and its result."""

    def read_by_all(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, torch.nn.Module):  # TRL reads the logits of a reward model itself
            return function

        def read(returned: object) -> Any:
            return functools.reduce(lambda result, each: each(index, result), reads, returned)

        async def reading_later(*arguments: object, **keywords: object) -> Any:
            with naming_columns(keywords):
                return read(await function(*arguments, **keywords))

        def reading_now(*arguments: object, **keywords: object) -> Any:
            with naming_columns(keywords):
                return read(function(*arguments, **keywords))

        return reading_later if is_async_callable(function) else reading_now

    return [read_by_all(index, function) for index, function in enumerate(functions)]


def relog_advantages(trainer: "Trainer", advantages: Sequence[float]) -> None:
    """Replace the advantages of the last rollout, over all processes, in TRL's table of completions."""
    column = trls(trainer)._logs["advantages"]
    for _ in range(min(len(advantages), len(column))):
        column.pop()
    column.extend(advantages)


def collated(trainer: "Trainer", rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the training set as TRL's data loader hands them to a rollout."""
    collate = trls(trainer)._get_collator_with_removed_columns(trls(trainer).data_collator, description="training")
    return cast(Any, send_to_device(collate(rows), trainer.accelerator.device))


@dataclass
class Row:
    """A completion with everything that the trainer knows of it, in a form that can be sent to other processes."""

    inputs: dict[str, Any]
    """The row of the data set, with the extra fields of a `rollout_func`."""
    prompt: Any
    """The prompt, as an environment has completed it."""
    completion: Any
    generated: tuple[Any, ...]
    """Values that TRL's `_generate` returned for the completion; None where it returned nothing."""
    returned: tuple[Any, ...]
    """Value that each reward function returned for the completion."""
    records: dict[str, Any]
    """Column -> an item of its `TokenRecord`."""
    extra: dict[str, Any]
    """Column of the table of completions -> what a reward function has written there with `log_extra`."""


class Rounds:
    """Calls of TRL's rollout method `make`: several rounds, and at the end one call for the rows that were chosen.

    A round generates and rewards, and its scoring is answered with zeros. The last call is answered with what the
    rounds recorded, and scores. TRL logs prompts, answers and rewards of the first round only. All processes must make
    the same calls, each with equally many rows.
    """

    def __init__(self, trainer: "Trainer", rollout: "Rollout", make: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._trainer, self._rollout, self._make = trls(trainer), rollout, make
        self._is_first = True
        self._nothing: list[Any] = []  # what `_generate` returns if no row has a value

    def sample(self, inputs: Sequence[dict[str, Any]]) -> tuple[list[Row], Tensor, dict[str, Any]]:
        """Generate and reward completions of n prompts of this process, N on all.

        Returns:
            The rows (n,), the rewards (N, K) by function, and TRL's samples, whose log-probs are zeros.
        """
        trainer, found, returned = self._trainer, dict[str, Any](), dict[int, list[Any]]()
        generate, reward = trainer._generate, trainer._calculate_rewards

        def generating(prompts: list[Any]) -> tuple[Any, ...]:
            found["generated"] = generate(prompts)
            return found["generated"]

        def keep(function: int, values: Any) -> list[Any]:
            returned[function] = list(values)
            return returned[function]

        def rewarding(*known: list[Any]) -> Tensor:  # inputs, prompts, completions, token ids
            found["rewards"] = rewards = reward(*known)
            first = trainer.accelerator.process_index * len(known[0])
            columns: list[list[Any]] = rewards[first : first + len(known[0])].T.tolist()
            # modules among the functions are not read
            returns = [returned.get(function, column) for function, column in enumerate(columns)]
            found["rows"] = self._rows(known[:3], found["generated"], returns)
            return rewards

        def zeros(model: object, ids: Tensor, mask: Tensor, width: int, *_: object, **__: object) -> Any:
            return torch.zeros(len(ids), width, device=ids.device), None, None

        answers = {
            "_generate": generating,
            "_calculate_rewards": rewarding,
            "_get_per_token_logps_and_entropies": zeros,
            "reward_funcs": reading(trainer.reward_funcs, [keep]),
            # a table that nobody reads, so that TRL's gets no column of rejected rows alone
            "_logs": {name: defaultdict(list) if isinstance(of, dict) else [] for name, of in trainer._logs.items()},
        }
        is_first, self._is_first = self._is_first, False
        with self._logging(lambda name: is_first and not _is_of_scores(name)), overridden(trainer, answers):
            samples = self._make([dict(row) for row in inputs])  # copies: TRL adds extra fields
        return found["rows"], found["rewards"], samples

    def finish(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return TRL's samples of the chosen rows, as if they were the only round."""
        trainer = self._trainer
        for column, record in self._rollout.records.items():
            record.give([row.records[column] for row in rows])
        for column in {name for row in rows for name in row.extra}:
            trainer._pending_extra_logs[column] = [row.extra.get(column) for row in rows]
        columns = zip(self._nothing, zip(*(row.generated for row in rows), strict=True), strict=True)
        generated = [nothing if all(value is None for value in of) else list(of) for nothing, of in columns]
        inputs = [row.inputs for row in rows]

        def returning(function: int) -> Callable[..., list[Any]]:
            return lambda **_: [row.returned[function] for row in rows]

        answers = {
            "_generate": lambda _: tuple(generated),
            "reward_funcs": [returning(function) for function in range(len(trainer.reward_funcs))],
        }
        if trainer.environment_factories is not None:  # they have run, and would give another prompt
            inputs = [{**row.inputs, "prompt": row.prompt} for row in rows]
            answers |= {"environment_factories": None, "environments": None}
        with self._logging(_is_of_scores), overridden(trainer, answers):
            return self._make(inputs)

    def _rows(self, known: Sequence[list[Any]], generated: Sequence[Any], returns: Sequence[list[Any]]) -> list[Row]:
        """Take what TRL and the records know of each row of a round."""
        count = len(known[0])
        # a dict has extra fields, which TRL has added to the inputs
        self._nothing = [{} if isinstance(values, dict) else [] if values == [] else None for values in generated]
        columns = [values if isinstance(values, list) and values else [None] * count for values in generated]
        each = zip(*known, zip(*columns, strict=True), zip(*returns, strict=True), strict=True)
        rows = [Row(*values, records={}, extra={}) for values in each]
        for column, record in self._rollout.records.items():
            items = record.take([[*row.generated[0], *row.generated[1]] for row in rows])
            for row, item in zip(rows, items, strict=True):
                row.records[column] = item
        for column, values in self._trainer._pending_extra_logs.items():
            for row, value in zip(rows, values, strict=False):
                row.extra[column] = value
        return rows

    @contextmanager
    def _logging(self, is_wanted: Callable[[str], bool]) -> Iterator[None]:
        """Let TRL log some of its metrics of training only."""
        metrics = self._trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name in [name for name in metrics if not is_wanted(name)]:
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]  # TRL would log None


def _is_of_scores(name: str) -> bool:
    return name == "kl" or name.startswith("sampling/")
