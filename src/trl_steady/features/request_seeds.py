"""Request seeds: the run's seed decides what a vLLM engine samples."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.types import Rollout, Turn
from trl_steady.trl_bridge.vllm_seeds import sample_from


@dataclass
class _Place:
    """A rollout, or a call of the engine outside of one, with its place in the run."""

    kind: str
    """ "training", "evaluation" or "other"."""
    step: int
    """Optimizer steps before it."""
    number: int
    """Its number among those of its kind in this step."""
    calls: int = 0
    """Calls of the engine so far: turns of tools, and rounds of dynamic sampling."""
    rows: int = 0
    """Most rows of this process in one of the calls."""


class RequestSeeds(Feature):
    """Gives each completion that vLLM samples a seed of its own, with `vllm_request_seeds`.

    The seeds of one call of the engine are consecutive numbers, for the rows of all processes. The first of them is a
    hash of the run's seed and the call's place in the run. A resume needs no more than the number of the optimizer
    step: places in a step are counted from 0, and checkpoints lie between steps.
    """

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: SharedOptions) -> None:
        super().__init__(trainer, args)
        self._place = _Place("other", 0, 0)  # of the rollout in progress
        self.on_train_begin()

    def on_train_begin(self) -> None:
        """Count from 0, also if this trainer has trained before."""
        self._step = -1
        self._numbers = Counter[str]()  # of each kind in this step

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Note the place of the rollout. A rollout outside a training step must not move those of the training."""
        kind = "other"
        if not self.trainer.model.training:
            kind = "evaluation"
        elif self.trainer.awaits_backward:
            kind = "training"
        self._place = self._new_place(kind)

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Let the engine sample with seeds. A `rollout_func` that calls the engine does not come here."""
        if not self.args.seeds_requests:
            return call_next(turn)
        place = self._place
        if turn.rollout is None:
            place = self._new_place("other")
        place.rows = max(place.rows, len(turn.prompt_ids))  # later turns of tools have fewer
        first = self._first_seed(place) + self._processes_before() * place.rows
        place.calls += 1
        with sample_from(self.trainer, first):
            return call_next(turn)

    def first_seed_ahead(self, steps: int) -> int | None:
        """Return the first seed of the next rollout of the training, which a server gets; None without seeds.

        Args:
            steps: Optimizer steps from the rollout in progress to the next one.
        """
        if not self.args.seeds_requests:
            return None
        number = 0
        if steps == 0:
            number = self._place.number + 1
        return self._first_seed(_Place("training", self._place.step + steps, number))

    def _new_place(self, kind: str) -> _Place:
        step = self.trainer.state.global_step
        if step != self._step:
            self._step = step
            self._numbers.clear()
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return _Place(kind, step, number)

    def _first_seed(self, place: _Place) -> int:
        """Return the seed of the first row of all processes in the next call."""
        parts = (self.args.request_seed, place.kind, place.step, place.number, place.calls)
        digest = hashlib.sha256(repr(parts).encode()).digest()
        return int.from_bytes(digest[:6])  # with every row added, JSON has it exactly, and torch takes it

    def _processes_before(self) -> int:
        """Return how many processes have rows before those of this engine. A server gets the rows of all processes."""
        if self.trainer.vllm_mode == "server":
            return 0
        process = self.trainer.accelerator.process_index
        return process - process % self.args.vllm_tensor_parallel_size  # these generate together
