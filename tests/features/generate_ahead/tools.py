"""A server whose answers depend on the policy that it was sent, and trainers that ask it a rollout ahead."""

import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests.tools import tiny
from tests.tools.engines import COMPLETIONS, LOAD, TOKENS, UNCHECKED, UNLOAD, Server

WEIGHTS = "/weights"  # tells of merged weights, which no network carries to a stand-in
RUN = "/run"  # tells that a run begins


class Asked(NamedTuple):
    prompts: list[list[int]]
    version: int
    """Number of the sync before the request."""
    is_steady: bool
    """No sync came before the answer, and the adapter stayed in its folder."""
    answer: dict[str, Any]


class Watched:
    """Makes a server answer by policy and position, after `seconds`, and keeps what it was asked."""

    def __init__(self, server: Server, size: int = 4) -> None:
        self.asked: list[Asked] = []
        self.seconds = 0.0
        self.replayed: dict[str, list[dict[str, Any]]] = {}
        """Prompts as text -> answers to them, which come first."""
        self.syncs = 0
        self.runs: list[int] = []
        """Numbers of requests before each run that told it."""
        self._keys: dict[str, int] = {}  # name of a model -> a number that its weights decide
        self._folders: dict[str, Path] = {}
        self._post, self._lock = server.post, threading.Lock()
        server.missing.clear()
        server.post = self.post  # type: ignore[method-assign]
        self._engine = server.engine
        self._engine.spoken = lambda prompt, number: self._engine.anything(prompt, number % size)
        self._engine.scored = lambda _, ids: [-(1 + (token + self._engine.syncs) % 7) / 2 for token in ids]

    def replay(self) -> None:
        """Give the same answers to the same prompts again, in this order."""
        for each in self.asked:
            self.replayed.setdefault(str(each.prompts), []).append(each.answer)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == WEIGHTS:
            self._keys["mixture"], self.syncs = body["key"], self.syncs + 1
            return {}
        if path == RUN:
            self.runs.append(len(self.asked))
            return {}
        if path == LOAD:
            folder = Path(body["lora_path"])
            self._keys[body["lora_name"]] = zlib.crc32((folder / "adapter_model.safetensors").read_bytes())
            self._folders[body["lora_name"]] = folder
            self.syncs += 1
        if path == UNLOAD:
            del self._folders[body["lora_name"]]
        if path not in (COMPLETIONS, TOKENS):
            return self._post(path, body)
        prompts = body["prompt"] if path == COMPLETIONS else [body["token_ids"]]
        before, folder = self.syncs, self._folders.get(body["model"])
        with self._lock:
            self._engine.syncs = self._keys[body["model"]]
            replayed = self.replayed.get(str(prompts))
            answer = replayed.pop(0) if replayed else self._post(path, body)
        time.sleep(self.seconds)
        is_steady = self.syncs == before and (folder is None or (folder.exists() and folder in self._folders.values()))
        self.asked.append(Asked(prompts, before, is_steady, answer))
        return answer


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """For what a process without vLLM lacks."""

    def tell(client: VLLMClient, _: object, weights: Iterable[tuple[str, Tensor]]) -> None:
        key = 0
        for _, weight in weights:
            key = zlib.crc32(weight.detach().contiguous().view(torch.uint8).numpy().tobytes(), key)
        client.session.post(f"{client.base_url}{WEIGHTS}", json={"key": key})

    with contextlib.ExitStack() as stack:
        for module in (vllm_generation, vllm_client):
            stack.enter_context(patch.object(module, "is_vllm_available", lambda **_: True))
        stack.enter_context(patch.object(VLLMClient, "init_communicator", lambda *_, **__: None))
        stack.enter_context(patch.object(VLLMClient, "update_named_params", tell))
        yield


def build(url: str, model: Any, output: Path, *, is_ahead: bool = True, **options: Any) -> Any:
    """A trainer that asks the server."""
    served = {**UNCHECKED, "vllm_mode": "server", "vllm_server_base_url": url, "async_generate": is_ahead}
    return tiny.trainer(model, output, **{**served, **options})


def state(trainer: Any) -> dict[str, Any]:
    """All that a resumed run must have in common with one that was never killed."""
    clocks = ("async/waited", "async/overlap")
    history = [{name: value for name, value in row.items() if name not in clocks} for row in tiny.history(trainer)]
    return {
        "policy": tiny.parameters(trainer),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "history": history[:-1],  # the summary tells of this process only
    }
