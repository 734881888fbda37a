"""Values that a rollout records token by token, turn by turn, until the padded batch is known."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from trl_steady.core.types import Turn
from trl_steady.functional.turns import Traced, aligned, matched, stitched


class TokenRecord:
    """The values of one rollout. `instead` is a sentence for messages that names an alternative to the option."""

    def __init__(self, option: str, instead: str = "") -> None:
        self._option, self._instead = option, instead
        self.turns: list[list[Traced]] = []
        """The records of generation, turn by turn."""
        self.values: Any = None
        """The values of the padded batch, once they are known."""

    def add(self, turn: Turn, values: Sequence[Tensor]) -> None:
        """Add the values of a turn: (T, *) for each of its sequences, or (T - 1, *) without the last token."""
        sequences = zip(turn.prompt_ids, turn.completion_ids, values, strict=True)
        self.turns.append([Traced([*prompt, *completion], traced) for prompt, completion, traced in sequences])

    def aligned(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the values (B, L, *) of the tokens of a padded batch.

        Raises:
            ValueError: The batch has other tokens than were recorded, or nothing was recorded.
        """
        with self._naming_option():
            return aligned(stitched(self.turns), input_ids, attention_mask)

    def take(self, sequences: Sequence[list[int]]) -> list[Any]:
        """Remove what was recorded for B sequences of tokens, and return it, one item for each sequence.

        Raises:
            ValueError: A sequence has other tokens than were recorded, or nothing was recorded.
        """
        with self._naming_option():
            turns, self.turns = self.turns, []
            return matched(stitched(turns), sequences)

    def give(self, items: Sequence[Any]) -> None:
        """Record items of `take` again, of any sequences and rounds."""
        self.turns = [list(items)]

    @contextlib.contextmanager
    def _naming_option(self) -> Generator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._option}: {error} {self._instead}") from error
