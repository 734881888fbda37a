"""Send the request for the next rollout to a vLLM server while the trainer trains on this one.

This file knows how transformers reads batches, and how TRL's trainer and engine make a request.
"""

import contextlib
import copy
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformers.trainer_utils import has_length

from trl_steady.core.engine import GenerationResult, SendRequest
from trl_steady.core.feature import Trainer
from trl_steady.core.state_file import read_state, write_state
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer, generation_interval, trl_class
from trl_steady.trl_bridge.vllm import SteadyGeneration
from trl_steady.trl_bridge.vllm_client import copy_client


class NextRollout(NamedTuple):
    """The rollout after the one in progress."""

    rows: list[Any]
    """Its batch of this process."""
    steps: int
    """Optimizer steps from the one in progress to the one that it begins in."""


class BatchesAhead(Iterator[list[Any]]):
    """The batches of an epoch, which can be read ahead up to the end of the epoch.

    The next epoch does not begin early, because callbacks, samplers and data sets may change when it begins.

    Rows are those that the DataLoader gives, not `dataset[i]` for the indices of TRL's sampler: a data set may have
    random transforms, accelerate divides batches among processes, and a stream has no indices.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._batches: Iterator[list[Any]] = iter(())
        self._step_batches: list[list[Any]] = []  # that this optimizer step has read
        self._ahead: deque[list[Any]] = deque()  # that later steps will read

    @property
    def can_read_ahead(self) -> bool:
        """False if each epoch has one rollout only."""
        data = cast(Sized, self._trainer.callback_handler.train_dataloader)
        return not has_length(data) or len(data) > generation_interval(self._trainer)

    def begin_step(self, batches: Iterator[list[Any]]) -> "BatchesAhead":
        """Begin an optimizer step, for which transformers would read from `batches`."""
        self._batches, self._step_batches = batches, []
        return self

    def __next__(self) -> list[Any]:
        batch = self._ahead.popleft() if self._ahead else next(self._batches)
        self._step_batches.append(batch)
        return batch

    def position(self, batch: list[Any]) -> int | None:
        """Return the position of a batch in this optimizer step; None if it is a script's own."""
        for position, step_batch in enumerate(self._step_batches):
            if step_batch is batch:
                return position
        return None

    def next_rollout(self, position: int) -> NextRollout | None:
        """Return the rollout after that of the batch at `position`; None if the epoch or run ends first.

        The DataLoader reads the rows of a rollout again for each of its micro-batches, and TRL ignores them. They are
        not kept, because rows may have pictures.
        """
        state, args = self._trainer.state, self._trainer.args
        interval = generation_interval(self._trainer)
        following = position + interval - as_trl_trainer(self._trainer)._step % interval
        steps = following // args.gradient_accumulation_steps
        if state.global_step + steps >= state.max_steps:
            return None
        ignored = self._step_batches[position]
        read = len(self._step_batches)
        for index in range(read + len(self._ahead), following + 1):
            batch = next(self._batches, None)
            if batch is None:
                return None
            if index != following:
                batch = ignored
            self._ahead.append(batch)
        if following < read:
            return NextRollout(self._step_batches[following], steps)
        return NextRollout(self._ahead[following - read], steps)


class _BeforeGeneration(BaseException):
    """TRL is about to generate. The arguments are those of its engine. A subclass may try again after an Exception."""


def build_request(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the request that TRL would send to the server for a rollout on the rows of all processes.

    It is {} on other processes than the main one. Nothing is sent. Every process must call this function.

    TRL itself makes the request, in its methods for a rollout. It prepares images and prompts in the middle of one,
    so that an exception ends it there: a copy of these lines would be longer, and wrong after an upgrade.
    """
    engine, request = trainer.vllm_generation, dict[str, Any]()

    def stop(prompt_ids: object, images: object, _: object, generations: int, *__: object, **___: object) -> None:
        raise _BeforeGeneration(prompt_ids, images, generations)

    def record(**arguments: object) -> dict[str, Any]:
        request.update(copy.deepcopy(arguments))  # a callback may change options of sampling in place
        prompts = len(request["prompts"])
        return {"prompt_ids": [[]] * prompts, "completion_ids": [[]] * prompts * request["n"], "logprobs": None}

    recording = contextlib.nullcontext()
    if trainer.accelerator.is_main_process:  # the only one with a client
        recording = patched(engine.vllm_client, {"generate": record})
    try:
        with patched(trainer, {"_generate_single_turn": stop}):
            # not by our method, for which there would be another rollout
            trl_class(trainer)._generate_and_score_completions(trainer, list(rows))
    except _BeforeGeneration as reached:
        with recording:
            cast(Any, super(SteadyGeneration, engine)).generate(*reached.args)  # it gathers the prompts
    return request


class PendingRequest(threading.Thread):
    """A request that a thread sends to the server, for a policy of version number `version`.

    It is a daemon, for which the interpreter does not wait at its end. But prompts that are sent one by one, for
    seeds, images and kept tokens, are in a pool of threads, and the interpreter waits until all have a response.
    """

    def __init__(self, engine: SteadyGeneration, request: Mapping[str, Any], version: int) -> None:
        super().__init__(daemon=True, name="trl-steady-ahead")
        self.version = version
        self.step = -1
        """Step of the last sync before it was saved."""
        self.result: GenerationResult | None = None
        self.error: BaseException | None = None
        self.seconds = self.waited = 0.0
        """Seconds from the request to the result, and those for which the trainer waited for it."""
        self._request = request
        # a session for the thread, and the name of the adapter as it is now
        client = copy_client(engine.vllm_client, _keep_message)
        self._send = functools.partial(engine.send_request, client)

    def run(self) -> None:
        """Send the request, and store the result or the error."""
        start = time.perf_counter()
        try:
            self.result = self._send(self._request)
        except BaseException as error:  # for the main thread, which needs the result later
            self.error = error
        self.seconds = time.perf_counter() - start

    def wait(self) -> None:
        """Wait until there is a result or an error."""
        start = time.perf_counter()
        if self.ident is not None:  # None: it was loaded
            self.join()
        self.waited += time.perf_counter() - start

    def matches(self, request: Mapping[str, Any]) -> bool:
        """Return True if a request is the same."""
        return json.dumps(request) == json.dumps(self._request)  # a loaded one has JSON's types

    def save(self, file: Path, version: int, step: int) -> None:
        """Write the request and its result, with the current version of the policy and the step of its sync."""
        assert self.result is not None
        times = [self.seconds, self.waited, self.version - version, step]
        plain = json.dumps([self._request, self.result.output, *times])  # exact
        write_state([plain, self.result.extras], file)

    @classmethod
    def load(cls, engine: SteadyGeneration, file: Path) -> "PendingRequest":
        """Return what `save` has written, with a version that counts back from 0."""
        plain, extras = read_state(file, "cpu")
        request, output, seconds, waited, version, step = json.loads(plain)
        loaded = cls(engine, request, version)
        loaded.result = GenerationResult(output, extras)
        loaded.seconds, loaded.waited, loaded.step = seconds, waited, step
        return loaded


def _keep_message(adapter: Any) -> None:
    """Let TRL show a server's message. urllib3 would raise an error of its own after the last try."""
    adapter.max_retries = adapter.max_retries.new(raise_on_status=False)


def respond_with(
    trainer: Trainer, respond: Callable[[SendRequest, Mapping[str, Any]], GenerationResult]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `respond` returns the results of the engine's requests, on the main process."""
    if not trainer.accelerator.is_main_process:
        return contextlib.nullcontext()
    return patched(trainer.vllm_generation, {"respond": respond})
