"""Ask a vLLM server for the next rollout while the trainer trains on this one.

This file knows how transformers draws batches, and how TRL's trainer and engine ask a server.
"""

import contextlib
import copy
import functools
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_utils import has_length
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from trl_steady.core.engine import Answer, Ask
from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.private import as_trl_trainer, generation_interval, patched
from trl_steady.trl_bridge.vllm import SteadyGeneration


@dataclass
class _Epoch:
    batches: Iterator[list[Any]]
    read: deque[list[Any]] = field(default_factory=deque)
    """Batches that have been read ahead."""
    drew: bool = False
    """True if torch's global generator has drawn, for example a seed of workers, since the epoch was begun early."""


class Batches(Iterator[list[Any]]):
    """The batches of a training, which can be read ahead.

    Later epochs begin early for that. transformers' own iterators of these epochs, which are generators, never start.
    Beginning an epoch is a collective, so that all processes must read ahead together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._given: list[list[Any]] = []  # in this optimizer step
        self._of_transformers: Iterator[list[Any]] | None = None
        self._number = 0  # of the current epoch
        self._epochs: deque[_Epoch] = deque()  # the current one, and those that were begun early

    @property
    def _data(self) -> Any:
        return self._trainer.callback_handler.train_dataloader

    def of_step(self, batches: Iterator[list[Any]]) -> "Batches":
        """Begin an optimizer step, for which transformers would draw from `batches`."""
        if batches is not self._of_transformers:
            is_first, self._of_transformers = self._of_transformers is None, batches
            self._number = self._trainer.state.global_step // self._sizes()[1] if is_first else self._number + 1
            if self._epochs:
                self._epochs.popleft()
            if not self._epochs:
                self._epochs.append(_Epoch(batches))
            elif self._epochs[0].drew:
                torch.empty((), dtype=torch.int64).random_()  # now, as the DataLoader would have done
        self._given = []
        return self

    def __next__(self) -> list[Any]:
        epoch = self._epochs[0]
        self._given.append(epoch.read.popleft() if epoch.read else next(epoch.batches))
        return self._given[-1]

    def _sizes(self) -> tuple[int, int]:
        """Return the micro-batches and the optimizer steps of an epoch, as transformers counts."""
        accumulation, data = self._trainer.args.gradient_accumulation_steps, self._data
        length = len(data) if has_length(data) else self._trainer.state.max_steps * accumulation
        return length, -(-length // accumulation)

    def of_next_rollout(self, batch: list[Any]) -> list[Any] | None:
        """Return the batch of the rollout after that of `batch`; None if the run ends before it.

        Raises:
            LookupError: `batch` is not of this optimizer step: it is a script's own.
        """
        trainer, accumulation = self._trainer, self._trainer.args.gradient_accumulation_steps
        position = next((i for i, given in enumerate(self._given) if given is batch), None)
        if position is None:
            raise LookupError
        position += generation_interval(trainer)
        length, steps = self._sizes()
        epoch, step = divmod(trainer.state.global_step, steps)  # the last step of an epoch may be short
        later, index = divmod(step * accumulation + position, length)
        if (epoch + later) * steps + index // accumulation >= trainer.state.max_steps:
            return None
        return self._given[position] if position < len(self._given) else self._peek(position - len(self._given))

    def _peek(self, count: int) -> list[Any] | None:
        """Return the batch that follows `count` others, in this epoch or a later one; None for an empty stream."""
        for number in itertools.count():
            if number == len(self._epochs):
                if hasattr(self._data, "set_epoch"):  # as transformers does
                    self._data.set_epoch(self._number + number)
                self._epochs.append(_Epoch(iter(self._data)))
            epoch, state = self._epochs[number], torch.get_rng_state()
            epoch.read.extend(itertools.islice(epoch.batches, max(count + 1 - len(epoch.read), 0)))
            if number:
                epoch.drew |= not torch.equal(state, torch.get_rng_state())
                torch.set_rng_state(state)
            if count < len(epoch.read):
                return epoch.read[count]
            if number and not epoch.read:
                return None
            count -= len(epoch.read)


class _Asked(Exception):
    """TRL is about to ask its engine. The arguments are the engine's."""


def question_of(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return TRL's question to the server for the rows of all processes; on other processes than the main one, {}.

    TRL puts the question, as in a rollout on the rows, and nothing is asked. Every process must call this function.
    """
    engine, question = trainer.vllm_generation, dict[str, Any]()

    def stop(prompt_ids: object, images: object, _: object, num_generations: int) -> None:
        raise _Asked(prompt_ids, images, num_generations)

    def keep(**asked: object) -> dict[str, Any]:
        question.update(copy.deepcopy(asked))  # a callback may change options of sampling in place
        prompts = len(question["prompts"])
        return {"prompt_ids": [[]] * prompts, "completion_ids": [[]] * prompts * question["n"], "logprobs": None}

    # not by our method, for which there would be another rollout
    kind = next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.trainer"))
    try:
        with patched(trainer, {"_generate_single_turn": stop}):
            as_trl_trainer(kind)._generate_and_score_completions(trainer, list(rows))
    except _Asked as asked:
        is_main = trainer.accelerator.is_main_process
        with patched(engine.vllm_client, {"generate": keep}) if is_main else contextlib.nullcontext():
            VLLMGeneration.generate(engine, *asked.args)  # it gathers the prompts
    return question


class Request(threading.Thread):
    """A question that a thread asks the server, for a policy of version number `version`.

    It is a daemon, for which the interpreter does not wait at its end. But prompts that TRL's client sends one by one,
    for images and kept sets, are in a pool of threads, and the interpreter waits until all are answered.
    """

    def __init__(self, engine: SteadyGeneration, question: Mapping[str, Any], version: int) -> None:
        super().__init__(daemon=True, name="trl-steady-ahead")
        self.version = version
        self.step = -1
        """Step of the last sync before it was saved."""
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.seconds = self.waited = 0.0
        """Seconds from the question to the answer, and those for which the trainer waited for it."""
        self._question = question
        self._ask = functools.partial(engine.ask, _apart(engine.vllm_client))

    def run(self) -> None:
        """Ask, and keep the answer or the error."""
        start = time.perf_counter()
        try:
            self.answer = self._ask(self._question)
        except BaseException as error:  # for the main thread, which needs the answer later
            self.error = error
        self.seconds = time.perf_counter() - start

    def wait(self) -> None:
        """Wait until there is an answer or an error."""
        start = time.perf_counter()
        if self.ident is not None:  # None: it was loaded
            self.join()
        self.waited += time.perf_counter() - start

    def is_of(self, question: Mapping[str, Any]) -> bool:
        """Return True if a question is the same."""
        return json.dumps(question) == json.dumps(self._question)  # a loaded one has JSON's types

    def save(self, file: Path, version: int, step: int) -> None:
        """Write the question and its answer, with the current version of the policy and the step of its sync."""
        assert self.answer is not None
        times = [self.seconds, self.waited, self.version - version, step]
        plain = json.dumps([self._question, self.answer.output, *times])  # exact
        torch.save([plain, _mapped(self.answer.captured, np.ndarray, torch.from_numpy)], file)

    @classmethod
    def loaded(cls, engine: SteadyGeneration, file: Path) -> "Request":
        """Return what `save` has written, with a version that counts back from 0."""
        plain, captured = torch.load(file, weights_only=True)
        question, output, seconds, waited, version, step = json.loads(plain)
        request = cls(engine, question, version)
        request.answer = Answer(output, _mapped(captured, Tensor, Tensor.numpy))
        request.seconds, request.waited, request.step = seconds, waited, step
        return request


def _mapped(values: object, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return nested containers with each value of a type replaced."""
    if isinstance(values, dict):
        return {name: _mapped(value, kind, function) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_mapped(value, kind, function) for value in values)
    return function(values) if isinstance(values, kind) else values


def _apart(client: VLLMClient) -> VLLMClient:
    """Return a client with a session for a thread, and the name of the adapter as it is now."""
    client, adapters = copy.copy(client), dict[str, Any]()
    client.session = copy.copy(client.session)
    for prefix, adapter in cast(Mapping[str, Any], client.session.adapters).items():
        adapters[prefix] = copy.copy(adapter)
        adapters[prefix].max_retries = adapter.max_retries.new(raise_on_status=False)  # TRL shows the server's message
    vars(client.session)["adapters"] = adapters
    return client


def answering(
    trainer: Trainer, answer: Callable[[Ask, Mapping[str, Any]], Answer]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `answer` answers the engine's questions, on the main process."""
    is_main = trainer.accelerator.is_main_process
    return patched(trainer.vllm_generation, {"answering": answer} if is_main else {})
