"""Options and a server that several tests of real engines use."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import requests

from tests.features.router_replay.tools import oracles, rows
from tests.vllm import mixtures

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, as `make test-vllm` has it"),
]
Colocated = Callable[..., Any]
"""Builds a trainer with an engine in this process."""
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def serving(
    model: Path, folder: Path, flags: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """A server of a model in float32, while the generator waits; its log is in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    command += ["--host", "127.0.0.1", "--port", address.split(":")[1]]
    log = folder / "log"
    distributed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # a colocated engine's
    alone = {name: value for name, value in os.environ.items() if name not in distributed}
    # the engine computes in its own process, as on one GPU: a third process would only take time to start
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**alone, **own, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while not is_up(address):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://{address}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def is_up(address: str) -> bool:
    try:
        return requests.get(f"http://{address}/health", timeout=5).status_code == 200
    except requests.exceptions.ConnectionError:
        return False


def shares(folder: Path, trainer: Any, of_weights: int | None = None) -> list[float]:
    """Of each rollout: of its routes those of the model alone, with its weights or those of rollout `of_weights`."""
    policy, result = oracles(folder, trainer), []
    for number, (_, output) in enumerate(trainer.rollouts):
        model = policy(trainer.rollouts[number if of_weights is None else of_weights][0])
        result.append(mixtures.share([mixtures.agreement(model, row.ids, row.routes) for row in rows(output)]))
    return result
