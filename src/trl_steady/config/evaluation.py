"""Options about evaluations. `Evaluations` in `features/evaluations.py` reads them."""

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from trl.trainer.utils import get_callable_name

from trl_steady.config.engine import EngineOptions
from trl_steady.config.options import METRICS, SAMPLING, option

if TYPE_CHECKING:
    _Metrics = Sequence[Callable[..., Any] | str] | Callable[..., Any] | str
else:
    _Metrics = list[str]  # for TRL's parser, which knows no such union

_LOGGED = ("loss", "reward", "reward_std", "kl", "entropy", "runtime", "num_tokens")  # by TRL as eval_loss and so on


class Functions(tuple[Callable[..., Any], ...]):
    """Functions of an option. Checkpoints save their names: pickle refuses a function that is inside another one."""

    @property
    def names(self) -> list[str]:
        """Their names, as TRL names reward functions."""
        return [get_callable_name(function) for function in self]

    def __repr__(self) -> str:
        return f"[{', '.join(self.names)}]"

    def __reduce__(self) -> tuple[type[tuple[Any, ...]], tuple[list[str]]]:
        return tuple, (self.names,)

    def __deepcopy__(self, _: object) -> Self:
        return self


@dataclass
class EvaluationOptions(EngineOptions):
    """Options of every trainer of trl-steady that are about evaluations."""

    eval_metrics: Annotated[_Metrics | None, METRICS] = option(
        None,
        "Functions that judge the completions of evaluations, and train nothing. They get what a reward function "
        "gets, and may be async. For each completion they return a number, a pair of a number and an answer, or None "
        "if the metric does not apply. The mean is logged as `eval_NAME`. With several completions for a prompt, and "
        "numbers that are all 0 or 1, `eval_NAME/pass@k` is logged too, and with answers `eval_NAME/maj@k`. On a "
        "command line, import paths such as `my_metrics.accuracy`.",
    )
    eval_generation: Annotated[dict[str, Any] | str | None, SAMPLING] = option(
        None,
        'Sampling of evaluations, where it differs from that of the training: `{"temperature": 0.6}` or '
        '`{"greedy": True}`. Other keys are `top_p`, `top_k`, `min_p`, `repetition_penalty` and '
        "`max_completion_length`. On a command line, in JSON.",
    )

    @property
    def evaluates_apart(self) -> bool:
        """True if evaluations have metrics or a sampling of their own, and leave the random state as it was."""
        return bool(self.eval_metrics) or self.eval_generation is not None

    def _import_metrics(self) -> None:
        """Turn the functions of `eval_metrics` and their import paths into `Functions`."""
        given = self.eval_metrics
        if given is None:
            return
        if callable(given) or isinstance(given, str):
            given = [given]
        functions: list[Callable[..., Any]] = []
        for function in given:
            if isinstance(function, str):
                if os.getcwd() not in sys.path:  # as TRL's scripts import reward functions
                    sys.path.insert(0, os.getcwd())
                function = cast(Callable[..., Any], pkgutil.resolve_name(function))
            functions.append(function)
        self.eval_metrics = Functions(functions)

    def _evaluation_contradictions(self) -> Iterator[str]:
        metrics = self.eval_metrics or Functions()
        assert isinstance(metrics, Functions)
        for name in metrics.names:
            if name in _LOGGED or metrics.names.count(name) > 1:
                yield (
                    f"eval_metrics={metrics!r} has a function {name!r}, and eval_{name} is logged by another one, or "
                    "by TRL. Rename the function."
                )
