"""Several rounds of sampling for one rollout. This file knows TRL's private state of a rollout.

Each round runs TRL's whole rollout method, although it needs completions and rewards only. `_generate` and
`_calculate_rewards` alone would not do: before them the method resets environments and prepares images, and after them
it masks completions that were cut off and logs rewards. All of that would have to be copied from TRL.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trl_steady.core.feature import Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.types import Rollout
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.rewards import wrap_reward_functions
from trl_steady.trl_bridge.rollout import ZERO_LOG_PROBS
from trl_steady.trl_bridge.trl_state import as_trl_trainer

_WITHOUT_VALUE = {2: 1, 4: None}
"""Place of tool mask and log-probs in what GRPO's `_generate` returns -> what they are for a token without a value."""


@dataclass
class CompletionRecord:
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
    rewards: list[float]
    """(K,) rewards that TRL got, which a subclass may have changed."""
    token_values: dict[str, Any] = field(default_factory=dict)
    """Column -> an item of its `TokenRecord`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Column of the table of completions -> what a reward function has written there with `log_extra`."""


class ResampledRollout:
    """Runs TRL's rollout method for several rounds, and at the end for the completions that were chosen.

    A round generates and rewards, and its log-probs are zeros. The last run replays what the rounds recorded, and
    computes log-probs. TRL logs prompts, completions and rewards of the first round only. All processes must make the
    same calls, each with equally many completions.
    """

    def __init__(self, trainer: Trainer, rollout: Rollout, run_rollout: Callable[[Rollout], dict[str, Any]]) -> None:
        self._trainer, self._rollout, self._run_rollout = as_trl_trainer(trainer), rollout, run_rollout
        self._is_first = True
        self._without_values: Sequence[Any] = ()  # what `_generate` returns if no completion has a value

    def sample(self, inputs: Sequence[dict[str, Any]]) -> tuple[list[CompletionRecord], Tensor, dict[str, Any]]:
        """Generate and reward completions of n prompts of this process, N on all.

        Returns:
            The completions (n,), the rewards (N, K) by function, and TRL's samples, whose log-probs are zeros.
        """
        recorder, tables = _Recorder(self._trainer), self._trainer._logs
        replaced = {
            "_generate": recorder.generate,
            "_calculate_rewards": recorder.calculate_rewards,
            "reward_funcs": wrap_reward_functions(self._trainer.reward_funcs, [recorder.record_returned]),
            **ZERO_LOG_PROBS,
            # tables that nobody reads, so that TRL's get no column that only rejected completions have
            "_logs": {name: defaultdict(list) if isinstance(table, dict) else [] for name, table in tables.items()},
        }
        is_first, self._is_first = self._is_first, False
        self._rollout.inputs = [dict(row) for row in inputs]  # copies: TRL adds extra fields
        with self._log_metrics(lambda name: is_first and not _needs_log_probs(name)), patched(self._trainer, replaced):
            samples = self._run_rollout(self._rollout)
        self._without_values, self._rewards = recorder.without_values, recorder.rewards
        sequences = [
            [*each.generated[0], *each.generated[1]] for each in recorder.completions
        ]  # ids, with the prompt's
        for column, record in self._rollout.records.items():
            for each, item in zip(recorder.completions, record.take(sequences), strict=True):
                each.token_values[column] = item
        return recorder.completions, recorder.rewards, samples

    def finish(self, chosen: Sequence[CompletionRecord]) -> dict[str, Any]:
        """Return TRL's samples of the chosen completions, as if they were the only round."""
        trainer = self._trainer
        for column, record in self._rollout.records.items():
            record.give([each.token_values[column] for each in chosen])
        for column in {name for each in chosen for name in each.extra}:
            trainer._pending_extra_logs[column] = [each.extra.get(column) for each in chosen]
        by_value = zip(self._without_values, zip(*(each.generated for each in chosen), strict=True), strict=True)
        generated = [without if all(v is None for v in values) else list(values) for without, values in by_value]
        for column, placeholder in _WITHOUT_VALUE.items():
            if len(generated) > column and generated[column] is not None:
                rows = zip(generated[column], generated[1], strict=True)
                generated[column] = [[placeholder] * len(ids) if row is None else row for row, ids in rows]

        def replay_rewards(*_: object, **__: object) -> Tensor:
            for function, returned in enumerate(zip(*(each.returned for each in chosen), strict=True)):
                for feature in trainer.features:
                    returned = feature.process_rewards(function, returned)
            return trainer.accelerator.gather(self._rewards.new_tensor([each.rewards for each in chosen]))

        replaced = {"_generate": lambda *_, **__: tuple(generated), "_calculate_rewards": replay_rewards}
        self._rollout.inputs = [each.inputs for each in chosen]
        if trainer.environment_factories is not None:  # environments have run, and would give another prompt
            self._rollout.inputs = [{**each.inputs, "prompt": each.prompt} for each in chosen]
            replaced |= {"environment_factories": None, "environments": None}
        with self._log_metrics(_needs_log_probs), patched(trainer, replaced):
            return self._run_rollout(self._rollout)

    @contextmanager
    def _log_metrics(self, is_wanted: Callable[[str], bool]) -> Generator[None]:
        """Let TRL log some of its metrics of training only."""
        metrics = self._trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name in [name for name in metrics if not is_wanted(name)]:
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]  # TRL would log None


class _Recorder:
    """Methods that take the place of TRL's in a round, call them, and record what they return."""

    completions: list[CompletionRecord]
    rewards: Tensor
    without_values: list[Any]

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._returned = trainer, dict[int, list[Any]]()
        self._generate, self._calculate_rewards = trainer._generate, trainer._calculate_rewards

    def generate(self, prompts: list[Any], *others: object, **more: object) -> tuple[Any, ...]:
        generated = self._generate(prompts, *others, **more)
        self._rows = [*zip(*(_rows(values, len(prompts)) for values in generated), strict=True)]
        self.without_values = [{} if isinstance(values, dict) else values for values in generated]
        return generated

    def record_returned(self, function: int, returned: Iterable[Any]) -> list[Any]:
        self._returned[function] = list(returned)
        return self._returned[function]

    def calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], *others: object, **more: object
    ) -> Tensor:
        self.rewards = self._calculate_rewards(inputs, prompts, completions, *others, **more)
        own = own_rows(self._trainer.accelerator, len(prompts))
        rewards: list[list[float]] = self.rewards[own].tolist()
        # modules among the functions return logits to TRL
        returned = [self._returned.get(number, values) for number, values in enumerate(zip(*rewards, strict=True))]
        columns = inputs, prompts, completions, self._rows, zip(*returned, strict=True), rewards
        self.completions = [CompletionRecord(*values) for values in zip(*columns, strict=True)]
        for column, values in self._trainer._pending_extra_logs.items():
            for each, value in zip(self.completions, values, strict=False):
                each.extra[column] = value
        return self.rewards


def _rows(values: Any, count: int) -> list[Any]:
    """Return copies of the rows of `values`, which reward functions may change; None for each if there are none.

    Extra fields of a `rollout_func` come as a dict. Reward functions get them from the rows of the data set.
    """
    if values is None or isinstance(values, dict) or not len(values):
        return [None] * count
    # a view would keep the whole tensor alive, and send it to other processes
    return [row.detach().cpu().clone() if isinstance(row, Tensor) else copy.copy(row) for row in values]


def _needs_log_probs(metric: str) -> bool:
    return metric == "kl" or metric.startswith("sampling/")
