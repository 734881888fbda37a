"""Rounds of sampling for one rollout, of which TRL's rollout method makes the samples.

This file knows TRL's private state of a rollout.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_steady.core.feature import Trainer
from trl_steady.core.types import Rollout
from trl_steady.trl_bridge.private import as_trl_trainer, patched
from trl_steady.trl_bridge.rollout import wrap_reward_functions


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


class ResampledRollout:
    """Calls of TRL's rollout method `make`: several rounds, and at the end one call for the rows that were chosen.

    A round generates and rewards, and its scoring is answered with zeros. The last call is answered with what the
    rounds recorded, and scores. TRL logs prompts, answers and rewards of the first round only. All processes must make
    the same calls, each with equally many rows.
    """

    def __init__(self, trainer: Trainer, rollout: Rollout, make: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._trainer, self._rollout, self._make = as_trl_trainer(trainer), rollout, make
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
            "reward_funcs": wrap_reward_functions(trainer.reward_funcs, [keep]),
            # a table that nobody reads, so that TRL's gets no column of rejected rows alone
            "_logs": {name: defaultdict(list) if isinstance(of, dict) else [] for name, of in trainer._logs.items()},
        }
        is_first, self._is_first = self._is_first, False
        with self._logging(lambda name: is_first and not _is_of_scores(name)), patched(trainer, answers):
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
        with self._logging(_is_of_scores), patched(trainer, answers):
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
