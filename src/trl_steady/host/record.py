"""Values that are recorded for each token in generation, for use wherever the token is scored."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trl_steady.functional.turns import Traced, aligned, stitched
from trl_steady.host.part import Turn

__all__ = ["TokenRecord"]


class TokenRecord:
    """The values of one rollout.

    Args:
        option: The option that needs them, for messages.
        instead: A sentence that says how to do without them.
    """

    def __init__(self, option: str, instead: str = "") -> None:
        self._option, self._instead = option, instead
        self.turns: list[list[Traced]] = []
        """The records of generation, turn by turn."""
        self.values: Any = None
        """The values of the padded batch, once they are known."""

    def add(self, turn: Turn, values: Sequence[Tensor]) -> None:
        """Add the values of a turn: (T, *) for each of its sequences, or (T - 1, *) without the last token."""
        sequences = zip(turn.prompt_ids, turn.completion_ids, values, strict=True)
        self.turns.append([Traced([*prompt, *completion], own) for prompt, completion, own in sequences])

    def aligned(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the values (B, L, *) of the tokens of a padded batch.

        Raises:
            ValueError: The batch has other tokens than were recorded, or nothing was recorded.
        """
        try:
            return aligned(stitched(self.turns), input_ids, attention_mask)
        except ValueError as error:
            raise ValueError(f"{self._option}: {error} {self._instead}") from error
