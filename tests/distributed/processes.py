"""Checks on two processes of one gloo group, without a launcher."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing

WORLD = 2


def run(check: Callable[[int], None], folder: Path) -> None:
    """Call `check(rank)` on each of two processes; what one raises is raised here."""
    torch.multiprocessing.start_processes(_enter, (check, str(folder / "store")), nprocs=WORLD, start_method="spawn")


def _enter(rank: int, check: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    # DeepSpeed reads these
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), DS_ACCELERATOR="cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(minutes=5)
    )
    check(rank)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads now and then abort or hang in the interpreter's exit
