"""Checks on two processes of one gloo group, without a launcher.

To import torch and TRL takes longer than most checks. Therefore each rank has a server that has imported them and
forks a process for each check. The servers are two interpreters, so that each hashes strings in its own way, as
processes of a launcher do.
"""

import atexit
import contextlib
import datetime
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.multiprocessing

WORLD = 2
ON_CPU = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}  # DeepSpeed and accelerate read these


def on_two(test: Callable[..., None]) -> Callable[..., None]:
    """Run the body of a test on two processes of one gloo group, with the values of its fixtures.

    `torch.distributed.get_rank()` tells the processes apart.
    """

    @functools.wraps(test)
    def on_both(**fixtures: Any) -> None:
        body = functools.partial(_call_body, test.__module__, test.__name__, fixtures)
        run(body, fixtures["tmp_path"])

    return on_both


def _call_body(module: str, test: str, fixtures: dict[str, Any], rank: int) -> None:
    # the name in the module is that of the wrapper
    getattr(importlib.import_module(module), test).__wrapped__(**fixtures)


class Job(NamedTuple):
    """A check of one rank, and where its process finds what a new interpreter would inherit."""

    check: bytes
    """Pickled, because its modules must not be imported in a server."""
    rank: int
    folder: Path
    cwd: str
    environment: dict[str, str]

    @property
    def error(self) -> Path:
        """File of the traceback, if there is one."""
        return self.folder / f"error of rank {self.rank}"


class Server:
    """An interpreter that has imported what checks need. It runs one job at a time, in a process of its own."""

    def __init__(self) -> None:
        self.pipe, end = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=_serve, args=(end,)).start()
        end.close()
        atexit.register(self.pipe.close)  # which ends it

    def start(self, job: Job) -> None:
        """Start a job. `end` waits for it."""
        self.job = job
        job.error.unlink(missing_ok=True)
        self.pipe.send(job)
        self.process: int = self.pipe.recv()

    def end(self) -> None:
        """Wait for the job.

        Raises:
            torch.multiprocessing.ProcessRaisedException: The check has raised an error.
            torch.multiprocessing.ProcessExitedException: Its process has ended otherwise.
        """
        code = self.pipe.recv()
        if not code:
            return
        if self.job.error.exists():
            said = f"rank {self.job.rank}:\n{self.job.error.read_text()}"
            raise torch.multiprocessing.ProcessRaisedException(said, self.job.rank, self.process)
        said = f"rank {self.job.rank} has ended with exit code {code}"
        raise torch.multiprocessing.ProcessExitedException(said, self.job.rank, self.process, code)

    def kill(self) -> None:
        """End the job at once."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process, signal.SIGKILL)
        self.pipe.recv()


@functools.cache
def _servers() -> list[Server]:
    return [Server() for _ in range(WORLD)]


def run(check: Callable[[int], None], folder: Path, seconds: float = 300) -> None:
    """Call `check(rank)` on each of the processes, and raise what one raises.

    Raises:
        TimeoutError: They have not ended in time. Processes that wait in different collectives never do.
    """
    (folder / "store").unlink(missing_ok=True)
    for rank, server in enumerate(_servers()):
        server.start(Job(pickle.dumps(check), rank, folder, os.getcwd(), dict(os.environ)))
    running = {server.pipe: server for server in _servers()}
    end = time.monotonic() + seconds
    try:
        while running:
            ended = multiprocessing.connection.wait(list(running), max(0, end - time.monotonic()))
            if not ended:
                raise TimeoutError(f"{check} has not ended after {seconds} seconds.")
            for pipe in ended:
                running.pop(pipe).end()
    finally:
        for server in running.values():
            server.kill()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(ON_CPU)
    importlib.import_module("tests.distributed.train")
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the tests have ended
            return
        process = os.fork()
        if not process:
            _enter(job)
        pipe.send(process)
        _, status = os.waitpid(process, 0)
        pipe.send(os.waitstatus_to_exitcode(status))


def _enter(job: Job) -> NoReturn:
    """Run a job in its process."""
    random.seed()
    np.random.seed()
    code = 1
    try:
        _join(job)
        check = pickle.loads(job.check)
        check(job.rank)
        torch.distributed.barrier()
        code = 0
    except BaseException:
        job.error.write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads now and then abort or hang in the interpreter's exit


def _join(job: Job) -> None:
    """Join the group of all ranks."""
    os.chdir(job.cwd)
    os.environ.clear()
    of_rank = {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "MASTER_ADDR": "127.0.0.1"}
    of_world = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ.update({**job.environment, **ON_CPU, **of_rank, **of_world})
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'store'}",
        rank=job.rank,
        world_size=WORLD,
        timeout=datetime.timedelta(minutes=5),
    )
