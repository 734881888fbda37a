"""Checks on two processes of one gloo group, without a launcher."""

import datetime
import functools
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

WORLD = 2


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


def run(check: Callable[[int], None], folder: Path, seconds: float = 300) -> None:
    """Call `check(rank)` on each of the processes, and raise what one raises.

    Raises:
        TimeoutError: They have not ended in time. Processes that wait in different collectives never do.
    """
    arguments, end = (check, str(folder / "store")), time.monotonic() + seconds
    context: Any = torch.multiprocessing.start_processes(
        _enter, arguments, nprocs=WORLD, start_method="spawn", join=False
    )
    while not context.join(timeout=max(0, end - time.monotonic())):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{check} has not ended after {seconds} seconds.")


def _enter(rank: int, check: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    # DeepSpeed and accelerate read these
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(minutes=5)
    )
    check(rank)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads now and then abort or hang in the interpreter's exit
