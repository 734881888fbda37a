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

import torch
from accelerate.utils import send_to_device
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
    """Column -> an item of its `TokenRecord`, which joins the items of all completions on the CPU."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Column of the table of completions -> what a reward function has written there with `log_extra`."""

    def on(self, device: torch.device | str) -> "CompletionRecord":
        """Return the completion with its tensors on a device, and those of `token_values` on the CPU."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            moved[name] = send_to_device(value, "cpu" if name == "token_values" else device)
        return CompletionRecord(**moved)


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
        recorder = _Recorder(self._trainer)
        # tables that nobody reads, so that TRL's get no column that only rejected completions have
        tables: dict[str, Any] = {}
        for name, table in self._trainer._logs.items():
            tables[name] = defaultdict(list) if isinstance(table, dict) else []
        replaced = {
            "_generate": recorder.generate,
            "_calculate_rewards": recorder.calculate_rewards,
            "reward_funcs": wrap_reward_functions(self._trainer.reward_funcs, [recorder.record_returned]),
            "_logs": tables,
            **ZERO_LOG_PROBS,
        }
        is_first = self._is_first
        self._is_first = False
        self._rollout.inputs = [dict(row) for row in inputs]  # copies: TRL adds extra fields
        with (
            self._keeping_metrics(lambda name: is_first and not _needs_log_probs(name)),
            patched(self._trainer, replaced),
        ):
            samples = self._run_rollout(self._rollout)
        self._without_values, self._rewards = recorder.without_values, recorder.rewards
        sequences: list[list[int]] = []
        for completion in recorder.completions:
            prompt_ids, completion_ids = completion.generated[:2]
            sequences.append(list(prompt_ids) + list(completion_ids))
        for column, record in self._rollout.records.items():
            for completion, item in zip(recorder.completions, record.take(sequences), strict=True):
                completion.token_values[column] = item
        return recorder.completions, recorder.rewards, samples

    def finish(self, chosen: Sequence[CompletionRecord]) -> dict[str, Any]:
        """Return TRL's samples of the chosen completions, as if they were the only round."""
        trainer = self._trainer
        for column, record in self._rollout.records.items():
            record.give([completion.token_values[column] for completion in chosen])
        columns: set[str] = set()
        for completion in chosen:
            columns.update(completion.extra)
        for column in columns:
            trainer._pending_extra_logs[column] = [completion.extra.get(column) for completion in chosen]
        generated = self._generated(chosen)

        def replay_rewards(*_: object, **__: object) -> Tensor:
            for function in range(len(chosen[0].returned)):
                returned: Iterable[Any] = tuple(completion.returned[function] for completion in chosen)
                for feature in trainer.features:
                    returned = feature.process_rewards(function, returned)
            rewards = [completion.rewards for completion in chosen]
            return trainer.accelerator.gather(self._rewards.new_tensor(rewards))

        replaced = {"_generate": lambda *_, **__: generated, "_calculate_rewards": replay_rewards}
        self._rollout.inputs = [completion.inputs for completion in chosen]
        if trainer.environment_factories is not None:  # environments have run, and would give another prompt
            self._rollout.inputs = [{**completion.inputs, "prompt": completion.prompt} for completion in chosen]
            replaced |= {"environment_factories": None, "environments": None}
        with self._keeping_metrics(_needs_log_probs), patched(trainer, replaced):
            return self._run_rollout(self._rollout)

    def _generated(self, chosen: Sequence[CompletionRecord]) -> tuple[Any, ...]:
        """Return what TRL's `_generate` would have returned for the chosen completions."""
        completion_ids = [completion.generated[1] for completion in chosen]
        generated: list[Any] = []
        for place, without_values in enumerate(self._without_values):
            values = [completion.generated[place] for completion in chosen]
            if all(value is None for value in values):
                generated.append(without_values)
                continue
            if place in _WITHOUT_VALUE:
                for row, ids in enumerate(completion_ids):
                    if values[row] is None:
                        values[row] = [_WITHOUT_VALUE[place]] * len(ids)
            generated.append(values)
        return tuple(generated)

    @contextmanager
    def _keeping_metrics(self, is_wanted: Callable[[str], bool]) -> Generator[None]:
        """Let TRL log some of its metrics of training only."""
        metrics = self._trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        yield
        for name in list(metrics):
            if is_wanted(name):
                continue
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
        self._rows_by_value: list[list[Any]] = []
        self.without_values = []
        for values in generated:
            self._rows_by_value.append(_rows(values, len(prompts)))
            self.without_values.append({} if isinstance(values, dict) else values)
        return generated

    def record_returned(self, function: int, returned: Iterable[Any]) -> list[Any]:
        self._returned[function] = list(returned)
        return self._returned[function]

    def calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], *others: object, **more: object
    ) -> Tensor:
        self.rewards = self._calculate_rewards(inputs, prompts, completions, *others, **more)
        rows = own_rows(self._trainer.accelerator, len(prompts))
        rewards: list[list[float]] = self.rewards[rows].tolist()
        self.completions = []
        for row, rewards_of_row in enumerate(rewards):
            returned: list[Any] = []
            for function, reward in enumerate(rewards_of_row):
                if function in self._returned:
                    returned.append(self._returned[function][row])
                else:  # a module, which returns logits to TRL
                    returned.append(reward)
            generated = tuple(values[row] for values in self._rows_by_value)
            self.completions.append(
                CompletionRecord(
                    inputs[row], prompts[row], completions[row], generated, tuple(returned), rewards_of_row
                )
            )
        for column, values in self._trainer._pending_extra_logs.items():
            for completion, value in zip(self.completions, values, strict=False):
                completion.extra[column] = value
        return self.rewards


def _rows(values: Any, count: int) -> list[Any]:
    """Return copies of the rows of `values`, which reward functions may change; None for each if there are none.

    Extra fields of a `rollout_func` come as a dict. Reward functions get them from the rows of the data set.
    """
    if values is None or isinstance(values, dict) or not len(values):
        return [None] * count
    rows: list[Any] = []
    for row in values:
        if isinstance(row, Tensor):  # a view would keep the whole tensor alive, and send it to other processes
            rows.append(row.detach().cpu().clone())
        else:
            rows.append(copy.copy(row))
    return rows


def _needs_log_probs(metric: str) -> bool:
    return metric == "kl" or metric.startswith("sampling/")
