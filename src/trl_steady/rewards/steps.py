"""What a reward function may say of one completion, in place of one number: what each of its steps is worth."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StepRewards"]


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a completion's steps, for a reward function to return in place of a float.

    Steps follow one another; a token belongs to the step in which it begins. The completion's logged reward is the
    sum of `values`. `StepRewards([], [])` is a completion without steps, worth 0 (None is one without a verdict).

    Args:
        values: (S,) the reward of each step.
        ends: (S,) where each step ends: exclusive character offsets into the completion's text, in increasing order.
            The text is what the reward function gets; of a conversation, the content of its only message. An end at
            the end of the text takes in what has no text, such as an end-of-sequence token.

    Raises:
        ValueError: `values` and `ends` differ in length, a value is not finite, or the ends do not increase.

    >>> text = "1 + 1 = 2. 2 + 1 = 4."
    >>> StepRewards([1.0, 0.0], [text.index(".") + 1, len(text)])
    StepRewards(values=(1.0, 0.0), ends=(10, 21), unit='characters')
    """

    values: Sequence[float]
    ends: Sequence[int]
    unit: str = field(default="characters", kw_only=True)

    @classmethod
    def at_tokens(cls, values: Sequence[float], ends: Sequence[int]) -> "StepRewards":
        """With ends in tokens: how many of `completion_ids`, tools' and environments' tokens included.

        >>> StepRewards.at_tokens([0.5, 0.5], [12, 20]).ends
        (12, 20)
        """
        return cls(values, ends, unit="tokens")

    @classmethod
    def per_turn(cls, values: Sequence[float]) -> "StepRewards":
        """One value for each assistant turn, in order; a turn ends with the last token that the model wrote in it.

        A turn is a message of the assistant; of a completion that is no conversation, a run of tokens of its own
        (those that a rollout's `env_mask` marks with 1).

        >>> StepRewards.per_turn([0.0, 0.0, 1.0]).ends
        (1, 2, 3)
        """
        values = list(values)
        return cls(values, range(1, len(values) + 1), unit="turns")

    def __post_init__(self) -> None:
        values = tuple(float(value) for value in self.values)
        ends = tuple(operator.index(end) for end in self.ends)
        if len(values) != len(ends):
            raise ValueError(
                f"StepRewards has {len(values)} values and {len(ends)} ends. Give one end for each value: where the "
                f"step ends, in {self.unit}."
            )
        for step, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(
                    f"StepRewards has values[{step}]={value}. Give finite numbers; a step without a verdict can be "
                    "left out, and for a completion without any return None."
                )
        for step, (before, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end <= before:
                after = f"ends[{step - 1}]={before}" if step else "0"
                raise ValueError(
                    f"StepRewards has ends[{step}]={end}, which is not after {after}. Ends are exclusive and "
                    "increase: every step has a length."
                )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "ends", ends)

    @property
    def total(self) -> float:
        """The completion's reward, as it is logged."""
        return math.fsum(self.values)
