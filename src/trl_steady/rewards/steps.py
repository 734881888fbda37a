"""What a reward function may say of one completion, in place of one number: what each of its steps is worth."""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StepRewards"]

_LARGEST = 3.4028234663852886e38  # of float32, in which TRL holds rewards
_UNITS = ("characters", "tokens", "turns")


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a completion's steps, for a reward function to return in place of a float.

    Steps follow one another; a token belongs to the step in which it begins. The completion's logged reward is the
    sum of `values`. `StepRewards([], [])` is a completion without steps, worth 0; None is one without a verdict.

    Args:
        values: (S,) the reward of each step.
        ends: (S,) where each step ends: exclusive character offsets into the completion's text, in increasing order.
            The text is what the reward function gets; of a conversation, the content of its only message.
        closed: Whether the last step was over before the model decided to stop, as a line is with its line break. An
            end at the end of the text else takes in what has no text, such as an end-of-sequence token: the decision
            to stop ended the step. The splitters know which.
        unit: What `ends` count; made by `at_tokens` and `per_turn`.

    Raises:
        ValueError: `values` and `ends` differ in length, a value is no finite number, an end is no whole number, or
            the ends do not increase.

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
        """With ends in tokens.

        Args:
            values: (S,) the reward of each step; with S = T, of each token.
            ends: (S,) exclusive, in increasing order: how many of `completion_ids` lie before each end, the tokens of
                tools and environments included.

        Raises:
            ValueError: as the constructor.

        >>> StepRewards.at_tokens([0.5, 0.5], [12, 20]).ends
        (12, 20)
        """
        return cls(values, ends, unit="tokens")

    @classmethod
    def per_turn(cls, values: Sequence[float]) -> "StepRewards":
        """One value for each assistant turn; a turn ends with the last token that the model wrote in it.

        A turn is a message of the assistant; of a completion that is no conversation, a run of tokens of its own
        (those that a rollout's `env_mask` marks with 1).

        Args:
            values: (turns,) the reward of each turn, in order.

        Raises:
            ValueError: a value is no finite number.

        >>> StepRewards.per_turn([0.0, 0.0, 1.0]).ends
        (1, 2, 3)
        """
        values = list(values)
        return cls(values, range(1, len(values) + 1), unit="turns")

    def __post_init__(self) -> None:
        if self.unit not in _UNITS:
            raise ValueError(f"StepRewards has unit={self.unit!r}. Use StepRewards.at_tokens or StepRewards.per_turn.")
        if self.closed and self.unit != "characters":
            raise ValueError(
                f"StepRewards has closed=True with ends in {self.unit}, which say themselves what a step "
                "has. Leave it unset."
            )
        values = tuple(_finite(step, value) for step, value in enumerate(_items("values", self.values)))
        ends = tuple(_whole(step, end) for step, end in enumerate(_items("ends", self.ends)))
        if len(values) != len(ends):
            raise ValueError(
                f"StepRewards has {len(values)} values and {len(ends)} ends. Give one end for each value: where the "
                f"step ends, in {self.unit}."
            )
        for step, (before, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end <= before:
                after = f"ends[{step - 1}]={before}" if step else "0"
                raise ValueError(
                    f"StepRewards has ends[{step}]={end}, which is not after {after}. Give exclusive ends "
                    "that increase: every step has a length."
                )
        if self.unit == "turns" and ends != tuple(range(1, len(ends) + 1)):
            raise ValueError(f"StepRewards has unit='turns' and ends={ends}. Use StepRewards.per_turn(values).")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "ends", ends)

    @property
    def total(self) -> float:
        """The completion's reward, as it is logged."""
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
            f"StepRewards has values[{step}]={value!r}. Give finite numbers, 0 for a step that earns nothing; for a "
            "completion without a verdict return None."
        )
    return number


def _whole(step: int, end: Any) -> int:
    try:
        return operator.index(end)
    except TypeError:
        raise ValueError(f"StepRewards has ends[{step}]={end!r}. Give whole numbers.") from None
