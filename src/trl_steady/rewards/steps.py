"""The value that a reward function may return for a completion instead of one number: a reward for each step."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StepRewards"]

_LARGEST = 3.4028234663852886e38  # of float32, in which TRL stores rewards
_UNITS = ("characters", "tokens", "turns")


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a completion's steps, which a reward function may return instead of a float.

    Steps follow one another, and a token belongs to the step in which it begins. The logged reward of the completion
    is the sum of `values`. `StepRewards([], [])` is a completion without steps, with a reward of 0. Return None for a
    completion without a reward.

    Args:
        values: (S,) reward of each step.
        ends: (S,) exclusive end of each step: character offsets into the completion's text, in increasing order. The
            text is the one that the reward function gets. In a conversation it is the content of the only message.
        closed: True if the last step was over before the model decided to stop, as a line is after its line break.
            If False, a step that ends at the end of the text also includes tokens without text, such as EOS: the
            decision to stop ended the step. The splitters set `closed` themselves.
        unit: Unit of `ends`, set by `at_tokens` and `per_turn`.

    Raises:
        ValueError: `values` and `ends` differ in length, a value is not a finite number, an end is not a whole number,
            or the ends do not increase.

    >>> text = "1 + 1 = 2. 2 + 1 = 4."
    >>> StepRewards([1.0, 0.0], [text.index(".") + 1, len(text)])
    StepRewards(values=(1.0, 0.0), ends=(10, 21), closed=False, unit='characters')
    """

    values: Sequence[float]
    ends: Sequence[int]
    closed: bool = field(default=False, kw_only=True)
    unit: str = field(default="characters", kw_only=True)

    @classmethod
    def at_tokens(cls, values: Sequence[float], ends: Sequence[int]) -> "StepRewards":
        """Return `StepRewards` whose ends count tokens.

        Args:
            values: (S,) reward of each step, or of each token if S = T.
            ends: (S,) exclusive end of each step, in increasing order: the number of `completion_ids` before it,
                including the tokens of tools and environments.

        Raises:
            ValueError: as in the constructor.

        >>> StepRewards.at_tokens([0.5, 0.5], [12, 20]).ends
        (12, 20)
        """
        return cls(values, ends, unit="tokens")

    @classmethod
    def per_turn(cls, values: Sequence[float]) -> "StepRewards":
        """Return `StepRewards` with one value for each assistant turn.

        A turn ends with the last token that the model wrote in it. In a conversation, a turn is a message of the
        assistant. In other completions it is a run of tokens that the model wrote (marked with 1 in a rollout's
        `env_mask`).

        Args:
            values: (turns,) reward of each turn, in order.

        Raises:
            ValueError: a value is not a finite number.

        >>> StepRewards.per_turn([0.0, 0.0, 1.0]).ends
        (1, 2, 3)
        """
        values = list(values)
        return cls(values, range(1, len(values) + 1), unit="turns")

    def __post_init__(self) -> None:
        if self.unit not in _UNITS:
            raise ValueError(
                f"StepRewards has the unknown unit={self.unit!r}. Use StepRewards.at_tokens or StepRewards.per_turn."
            )
        if self.closed and self.unit != "characters":
            raise ValueError(
                f"StepRewards has closed=True with ends in {self.unit}, which already define the tokens of each step. "
                "Leave closed unset."
            )
        values = tuple(_finite(step, value) for step, value in enumerate(_items("values", self.values)))
        ends = tuple(_whole(step, end) for step, end in enumerate(_items("ends", self.ends)))
        if len(values) != len(ends):
            raise ValueError(
                f"StepRewards has {len(values)} values and {len(ends)} ends. Give one end for each value, in "
                f"{self.unit}."
            )
        for step, (before, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end <= before:
                after = f"ends[{step - 1}]={before}" if step else "0"
                raise ValueError(
                    f"StepRewards has ends[{step}]={end}, which is not after {after}. Give exclusive ends "
                    "that increase, so that no step is empty."
                )
        if self.unit == "turns" and ends != tuple(range(1, len(ends) + 1)):
            raise ValueError(
                f"StepRewards has unit='turns' and ends={ends}. Use StepRewards.per_turn(values), which sets the ends."
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "ends", ends)

    @property
    def total(self) -> float:
        """The reward of the completion, as it is logged: the sum of `values`."""
        return math.fsum(self.values)


def _items(name: str, given: Any) -> Iterable[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"StepRewards has {name}={given!r}. Give a list of numbers, one for each step.")
    return given


def _finite(step: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise ValueError(
            f"StepRewards has values[{step}]={value!r}. Give finite numbers, and 0 for a step that earns nothing. For "
            "a completion without a reward return None."
        )
    return number


def _whole(step: int, end: Any) -> int:
    try:
        return operator.index(end)
    except TypeError:
        raise ValueError(f"StepRewards has ends[{step}]={end!r}. Give whole numbers.") from None
