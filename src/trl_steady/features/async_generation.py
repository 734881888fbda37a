"""Generation ahead as a part: a server answers for the next rollout while the trainer trains on this one."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trl_steady.core.engine import Answer, Ask
from trl_steady.core.feature import Active, Trainer
from trl_steady.core.types import Rollout, Turn
from trl_steady.features.legacy import Part
from trl_steady.trl_bridge.prefetch import Batches, Request, answering, question_of
from trl_steady.trl_bridge.vllm import first_of_all

_FILE = "ahead.pt"
_OPTION = "async_generate=True"


class AsyncGeneration(Part):
    """Asks the server a rollout ahead, with `async_generate`.

    TRL's trainer asks as usual, and gets what was asked for earlier. A version of the policy stays on the server until
    its answers are there.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._batches = Batches(trainer)
        self._rows: list[Any] | None = None  # of the rollout in progress, until its first generation
        self._request: Request | None = None  # on the main process
        self._loaded: Request | None = None
        self._is_resumed = False  # until the first rollout after a resume with answers
        self._version, self._synced = 0, -1  # of the policy on the server, and the step of its sync

    def built(self) -> None:
        """Refuse what asks the server in another way. Warn if nothing corrects for the lag."""
        trainer, args = self.trainer, self.trainer.args
        self._acts = args.async_generate
        if not self._acts:
            return
        reasons = {
            "a rollout_func asks the server itself": trainer.rollout_func,
            "environments would begin the next episode before this one ends": trainer.environment_factories,
            "an agent's later turns would be of a newer policy than its first": trainer.tools,
        }
        for reason, is_so in reasons.items():
            self.refuse(_OPTION, reason if is_so else None)
        by_ratio = args.vllm_importance_sampling_correction or args.sampler_options
        if not by_ratio and args.off_policy_mask_threshold is None:
            self.warn(
                f"{_OPTION}: answers are of the policy one rollout before, and nothing corrects for that. Leave "
                "vllm_importance_sampling_correction=True, or set off_policy_mask_threshold."
            )
        trainer.vllm_generation.before_sync = self._before_sync

    def describe(self) -> Iterable[Active]:
        """Return that the server generates ahead."""
        if self.trainer.args.async_generate:
            yield Active("the next rollout generated while the trainer trains", ("async_generate",))

    def beginning(self) -> None:
        """Forget what an earlier training has asked."""
        self._drop()
        self._request, self._loaded = self._loaded, None
        self._version, self._synced = 0, -1 if self._request is None else self._request.step

    def ending(self, best: Path | None) -> None:
        """Wait for answers that nobody needs: a training may stop early."""
        self._drop()

    def _drop(self) -> None:
        self._wait()
        self._request, self._batches = None, Batches(self.trainer)

    def _wait(self) -> None:
        if self._request is not None:
            self._request.wait()

    def _before_sync(self) -> None:
        """Keep the version of a request on the server. The same policy may be sent twice, as after a resume."""
        self._wait()
        step = self.trainer.state.global_step
        self._version, self._synced = self._version + (step != self._synced), step

    def drawing(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Let batches be read ahead."""
        return self._batches.of_step(batches) if self._acts else batches

    def making(
        self, rollout: Rollout, make: Callable[[list[Any]], dict[str, Any]], inputs: list[Any]
    ) -> dict[str, Any]:
        """Note the rows of a rollout in training. Further rounds of dynamic sampling are asked for as usual."""
        self._rows = inputs if self._acts and self.trainer.model.training else None
        return make(inputs)

    @contextlib.contextmanager
    def generating(self, turn: Turn) -> Generator[None]:
        """Answer the first question of a rollout with what was asked ahead, and then ask ahead for the next one."""
        rows = None
        if turn.rollout is not None:
            rows, self._rows = self._rows, None
        if turn.rollout is None or rows is None:
            yield
            return
        self._wait()
        self._raise_error()
        turn.rollout.from_checkpoint, self._is_resumed = self._is_resumed, False
        self._sums = torch.zeros(3, 2)
        with answering(self.trainer, self._answer):
            yield
        names = ("versions_behind", "waited", "overlap")
        self.trainer.metrics.pooled(sums={f"async/{name}": each for name, each in zip(names, self._sums, strict=True)})
        try:
            following = self._batches.of_next_rollout(rows)
        except LookupError:
            self.warn(
                f"{_OPTION}: the rows of a rollout are not those that transformers drew, so the next one is not asked "
                "ahead. Let a subclass hand on the list that it gets."
            )
            return
        question = {} if following is None else question_of(self.trainer, following)
        if question:
            self._request = Request(self.trainer.vllm_generation, question, self._version)
            self._request.start()

    def _raise_error(self) -> None:
        """Raise the error of a request on all processes, which would wait for the main one."""
        error = None if self._request is None else self._request.error
        if message := first_of_all(None if error is None else f"{type(error).__name__}: {error}"):
            self._request = None
            raise RuntimeError(
                f"{_OPTION}: the server has failed at step {self.trainer.state.global_step}, asked for the next "
                f"rollout: {message}. Resume from the last checkpoint when it answers again."
            ) from error

    def _answer(self, ask: Ask, question: Mapping[str, Any]) -> Answer:
        """Return the answer that was asked ahead, if the question is the same."""
        request, self._request = self._request, None
        if request is not None and request.answer is not None and request.is_of(question):
            hidden, behind = max(request.seconds - request.waited, 0.0), self._version - request.version
            self._sums = torch.tensor([[behind, 1], [request.waited, 1], [hidden, request.seconds]])
            return request.answer
        if request is not None:
            self.warn(
                f"{_OPTION}: the question of a rollout is another one than was asked ahead, so its answers are thrown "
                "away. Prompts of a subclass and options of sampling that change during the run cannot be asked ahead."
            )
        start = time.perf_counter()
        answer = ask(question)
        seconds = time.perf_counter() - start
        self._sums = torch.tensor([[0, 1], [seconds, 1], [0, seconds]])
        return answer

    def save(self, checkpoint: Path) -> None:
        """Save the answers that are ahead. An error is raised by the next rollout."""
        self._wait()
        if self._request is not None and self._request.error is None:
            self._request.save(checkpoint / _FILE, self._version, self._synced)

    def load(self, checkpoint: Path) -> None:
        """Go on with the answers that were ahead."""
        if not self._acts:
            return
        file = checkpoint / _FILE
        if file.is_file() and self.trainer.accelerator.is_main_process:
            self._loaded = Request.loaded(self.trainer.vllm_generation, file)
        self._is_resumed = first_of_all(None if self._loaded is None else _FILE) is not None
