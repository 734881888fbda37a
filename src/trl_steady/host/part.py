"""The questions that a feature answers to the trainer (`Part`), and what it may read of the trainer (`Trainer`).

This file knows what TRL makes public. It names nothing that is private to TRL.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from trl_steady.core.feature import Active
from trl_steady.core.feature import Trainer as Trainer
from trl_steady.core.types import ForwardPass as ScoringPass
from trl_steady.core.types import LossTerms as Terms
from trl_steady.core.types import MicroBatch
from trl_steady.core.types import Rollout as Rollout
from trl_steady.core.types import Turn as Turn
from trl_steady.functional.turns import Traced, aligned, matched, stitched

if TYPE_CHECKING:
    from trl_steady.host.engine import AdapterSync, Capture

_P = TypeVar("_P", bound="Part")


class Part:
    """One feature of a trainer. A method that a feature does not define changes nothing.

    A trainer lists its parts in one tuple, and asks them in this order. The contexts of later parts are inside those
    of earlier ones, and the models of later parts are around those of earlier ones.
    """

    window_options: ClassVar[tuple[tuple[str, str | None], ...]] = ()
    """Options that a resume inside a generation window must not change, each with the option without which it has no
    effect on a rollout, or None."""
    counts_all_sequences: ClassVar[bool] = False
    """True if a loss of the part's counts sequences in which the policy has no gradient."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Trainer = trainer
        self.notes: list[str] = []
        """Warnings that this part has given, for the report of the run."""

    def warn(self, message: str) -> None:
        """Give a warning, and keep it for the report, once."""
        if message not in self.notes:  # some are given at each push to an engine
            self.notes.append(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    # construction

    def building(self, model: str | PreTrainedModel | PeftModel, args: object) -> AbstractContextManager[None]:
        """Return a context for TRL's constructor. `model` is what the user passed."""
        return contextlib.nullcontext()

    def captures(self, args: object) -> list["Capture"]:
        """Return what a vLLM engine must return beside tokens."""
        return []

    def adapter_sync(self, args: object) -> "AdapterSync | None":
        """Return how an adapter is sent to a vLLM engine; None if weights are sent."""

    def built(self) -> None:
        """Raise a ValueError for options that cannot work, after TRL's constructor has run."""

    def describe(self) -> Iterable[Active]:
        """See `Feature.describe`."""
        return ()

    def refuse(self, setting: str, why: str | None, instead: str = "Change that, or leave it unset.") -> None:
        """Raise a ValueError if there is a reason why a setting of ours does not work with this trainer."""
        if why:
            raise ValueError(f"{setting} does not work here: {why}. {instead}")

    # generation

    def drawing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return what transformers draws the micro-batches of an optimizer step from; `batches` are an epoch's."""
        return batches

    def rolling(self, rollout: Rollout) -> AbstractContextManager[None]:
        """Return a context for TRL's rollout."""
        return contextlib.nullcontext()

    def making(
        self, rollout: Rollout, make: Callable[[list[Any]], dict[str, Any]], inputs: list[Any]
    ) -> dict[str, Any]:
        """Return TRL's samples of a rollout on these rows of the data set, which `make` makes."""
        return make(inputs)

    def generating(self, turn: Turn) -> AbstractContextManager[None]:
        """Return a context for one call of TRL's generation. On exit, `turn` has the completions."""
        return contextlib.nullcontext()

    def read_rewards(self, function: int, returned: object) -> object:
        """Return what TRL gets from reward function number `function` for this process's completions."""
        return returned

    def keep_rewards(self, rewards: Tensor, completions: list[Any], completion_ids: list[list[int]]) -> None:
        """Read the rewards (N, K) of all processes and the completions of this one, before TRL logs them."""

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return columns to add to the samples of a complete rollout."""
        return {}

    def advantages(self, rollout: Rollout) -> Tensor | None:
        """Return advantages (B, T) that replace those of TRL, or None."""
        return None

    # scoring

    def scoring(self, scoring: ScoringPass, model: Callable[..., Any]) -> AbstractContextManager[Callable[..., Any]]:
        """Return a context for a scoring pass, which gives the model to call: `model`, or a proxy of it.

        A proxy also gets `token_indices`, the index of each token in the flattened `input_ids`, and passes them on.
        """
        return contextlib.nullcontext(model)

    def batches(self, scoring: ScoringPass) -> Sequence[Tensor]:
        """Return the rows that go through the model together, batch by batch; nothing for TRL's order."""
        return ()

    def rewrites(self, inputs: Mapping[str, Any]) -> bool:
        """Return True if this part computes the loss of a micro-batch with these inputs of TRL's."""
        return False

    def rewrite(self, batch: MicroBatch) -> Terms:
        """Return the loss of a scored micro-batch as terms of TRL's loss and of its own."""
        raise NotImplementedError

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a micro-batch with these inputs, which `compute` computes."""
        return compute(inputs)

    # steps and checkpoints

    def beginning(self) -> None:
        """Run when a training begins, after the checkpoint of a resume has been loaded."""

    def stepping(self) -> None:
        """Run before the first micro-batch of an optimizer step, also after a step that raised."""

    def after_last_backward(self) -> None:
        """Run after the backward pass of the last micro-batch of an optimizer step, before gradients are clipped."""

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Run after TRL has written `logs`, which are also the last row of the log in `trainer.state`."""

    def ending(self, best: Path | None) -> None:
        """Run when a training has ended. `best` is the checkpoint that `load_best_model_at_end` has loaded."""

    def saving(self, folder: Path | None) -> AbstractContextManager[None]:
        """Return a context in which the trainer saves the policy, in `folder` or, if it is None, in a checkpoint.

        Only the processes that save call this method.
        """
        return contextlib.nullcontext()

    def save(self, checkpoint: Path) -> None:
        """Add to an unfinished checkpoint. Every process calls this method."""

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` has added, after the policy. Raise a ValueError if the run cannot continue exactly."""


@contextlib.contextmanager
def entered(contexts: Iterator[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter several contexts, one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


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
    def _naming_option(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._option}: {error} {self._instead}") from error
