"""Groups of completions are judged together by each `GroupReward`, wherever their members are."""

import contextlib
import functools
import inspect
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object, send_to_device

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.types import Rollout
from trl_steady.rewards.group import GroupReward
from trl_steady.rewards.steps import StepRewards
from trl_steady.trl_bridge.rewards import group_size, run_async

_SHOWN = 200  # characters of a prompt in an error


class _Call:
    """A call of reward function number `function` for one group, whose first row is `first`."""

    returned: Any = None
    cause: BaseException | None = None
    error = ""

    def __init__(self, function: int, reward: GroupReward, first: int, columns: Mapping[str, Any]) -> None:
        self._function, self._reward, self.first = function, reward, first
        self._columns, self._size = columns, len(columns["completions"])
        self.values: dict[int | str, list[Any]] = {}
        """(G,) rewards by number of the function, and (G,) what it wrote with `log_extra` by name of the column."""

    def start(self) -> None:
        """Call the function on this thread. An async function then waits for `finish`."""
        with self._keep_error():
            self.returned = self._reward.function(**{**self._columns, "log_extra": self._keep})
            if not inspect.isawaitable(self.returned):
                self._keep(self._function, map(_sendable, self.returned))

    async def finish(self) -> None:
        """Wait for an async function."""
        with self._keep_error():
            self._keep(self._function, map(_sendable, await self.returned))

    def _keep(self, column: int | str, values: Iterable[Any]) -> None:
        self.values[column] = list(values)
        count = len(self.values[column])
        if count != self._size:
            what = "rewards"
            if column != self._function:
                what = f"values of {column!r}"
            raise ValueError(f"{count} {what} for {self._size} completions. Give one for each; None is no reward.")

    @contextlib.contextmanager
    def _keep_error(self) -> Generator[None]:
        """Keep an error until all processes know of it. Else they would wait for this one."""
        try:
            yield
        except (Exception, CancelledError) as error:
            self.cause = error
            prompt = repr(self._columns["prompts"][0])[-_SHOWN:]
            why = "".join(traceback.format_exception_only(error)).strip()
            self.error = (
                f"reward function {self._reward.__name__!r} failed for the group of the prompt {prompt}: {why}"
            )


class GroupRewards(Feature):
    """Calls each `GroupReward` once for each group of a rollout.

    A group is G successive rows in the order of all processes. It belongs to the process of its first row, which gets
    the other rows, calls the functions, and sends the results to all.
    """

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._judged: dict[GroupReward, list[list[Any]]] = {}  # rewards, once for each time that TRL will ask for them

    @property
    def functions(self) -> list[GroupReward]:
        """The reward functions that judge groups. One may stand several times in `reward_funcs`."""
        return [function for function in self.trainer.reward_funcs if isinstance(function, GroupReward)]

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Let the functions judge for this trainer while its rollout runs. Another trainer may have them too."""
        functions = self.functions
        for function in functions:
            function.judge = functools.partial(self._rewards, functions, function)
        try:
            return call_next(rollout)
        finally:
            for function in functions:
                function.judge = None
            self._judged = {}

    def _rewards(
        self, functions: Sequence[GroupReward], function: GroupReward, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Return the rewards (n,) of one function. TRL calls one after the other; the first call judges for all."""
        if not self._judged.get(function):
            for judged, rewards in self._judge(list(dict.fromkeys(functions)), arguments).items():
                self._judged[judged] = [rewards] * functions.count(judged)
        return self._judged[function].pop()

    def _judge(self, functions: Sequence[GroupReward], arguments: Mapping[str, Any]) -> dict[GroupReward, list[Any]]:
        """Return the rewards (n,) by function of this process's completions. Every process must call this method."""
        own = own_rows(self.trainer.accelerator, len(arguments["completions"]))
        calls: list[_Call] = []
        for first, columns in self._own_groups(arguments, own).items():
            for number, function in enumerate(functions):
                calls.append(_Call(number, function, first, columns))
        for call in calls:
            call.start()
        waiting = [call.finish() for call in calls if inspect.isawaitable(call.returned)]
        if waiting:
            run_async(self.trainer, waiting)

        results = gather_object([(call.first, call.values, call.error) for call in calls])
        for _, _, error in results:
            if error:  # the same on all processes
                causes = [call.cause for call in calls if call.error == error]
                raise RuntimeError(error) from next(iter(causes), None)
        table: dict[int | str, list[Any]] = {}
        for first, values_by_name, _ in results:
            for name, values in values_by_name.items():
                column = table.setdefault(name, [None] * len(arguments["completions"]))
                for row, value in enumerate(values, start=first):
                    if own.start <= row < own.stop:
                        column[row - own.start] = value
        rewards = {function: table.pop(number) for number, function in enumerate(functions)}
        for name, column in table.items():
            arguments["log_extra"](name, column)
        return rewards

    def _own_groups(self, arguments: Mapping[str, Any], own: slice) -> dict[int, dict[str, Any]]:
        """Return first row -> arguments of a call, for the groups that belong to this process.

        Rows go to the process that has the first one of their group. Every process must call this method.
        """
        size = group_size(self.trainer)
        columns = {name: values for name, values in arguments.items() if isinstance(values, list)}
        shared = {name: value for name, value in arguments.items() if name not in columns}
        if (own.stop - own.start) % size:
            columns.pop("environments", None)  # live objects, which cannot be sent
        rows: dict[int, dict[str, Any]] = {}
        for index, row in enumerate(range(own.start, own.stop)):
            rows[row] = {name: values[index] for name, values in columns.items()}
        to_others = [(row, values) for row, values in rows.items() if row // size * size < own.start]
        from_others = gather_object(send_to_device(to_others, "cpu"))  # another process may not see this GPU
        rows.update(send_to_device(from_others, self.trainer.accelerator.device))

        groups: dict[int, dict[str, Any]] = {}
        for row in sorted(rows):
            first = row // size * size
            if own.start <= first < own.stop:
                group = groups.setdefault(first, {**shared, **{name: [] for name in columns}})
                for name in columns:
                    group[name].append(rows[row].get(name))
        return groups


def _sendable(reward: Any) -> Any:
    """Return a reward that other processes can read: a tensor may be on this one's GPU."""
    if reward is None or isinstance(reward, StepRewards):
        return reward
    return float(reward)
