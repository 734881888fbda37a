"""The value that a reward function may return for a completion instead of one number: a reward for each step.

`features/step_rewards/feature.py` takes it.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field


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
        ValueError: `values` and `ends` differ in length, a value is not finite, or the ends do not increase.

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

        >>> StepRewards.at_tokens([0.5, 0.5], [12, 20]).ends
        (12, 20)
        """
        return cls(values, ends, unit="tokens")

    @classmethod
    def per_turn(cls, values: Sequence[float]) -> "StepRewards":
        """Return `StepRewards` with one value for each assistant turn, in order.

        A turn ends with the last token that the model wrote in it. In a conversation, a turn is a message of the
        assistant. In other completions it is a run of tokens that the model wrote (marked with 1 in a rollout's
        `env_mask`).

        >>> StepRewards.per_turn([0.0, 0.0, 1.0]).ends
        (1, 2, 3)
        """
        return cls(values, range(1, len(values) + 1), unit="turns")

    def __post_init__(self) -> None:
        values = tuple(map(float, self.values))
        ends = tuple(map(operator.index, self.ends))
        if self.unit not in ("characters", "tokens", "turns"):
            raise ValueError(f"StepRewards has unit={self.unit!r}. Use StepRewards.at_tokens or StepRewards.per_turn.")
        if len(values) != len(ends):
            raise ValueError(
                f"StepRewards has {len(values)} values and {len(ends)} ends. Give one end for each value."
            )
        # NaN marks a missing step in tables, and an infinite value would make the weights NaN
        if not all(map(math.isfinite, values)):
            raise ValueError(
                f"StepRewards has values={values}. Give finite numbers, and 0 for a step that earns nothing. For a "
                "completion without a reward return None."
            )
        before = 0
        for end in ends:
            if end <= before:
                raise ValueError(f"StepRewards has ends={ends}. Give exclusive ends that increase from 1 or more.")
            before = end
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "ends", ends)

    @property
    def total(self) -> float:
        """The reward of the completion, as it is logged: the sum of `values`."""
        return math.fsum(self.values)
