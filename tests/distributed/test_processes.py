"""The processes of a check: two interpreters, an error of one ends both, and the next check begins anew."""

import functools
import os
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.distributed import processes


def note(rank: int, folder: Path) -> None:
    (folder / f"rank {rank}").write_text(f"{hash('a')}, {os.environ.get('OF_A_TEST')}, {os.getcwd()}")


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all interpreters hash in one way")
def test_each_hashes_strings_in_its_own_way_and_has_the_environment_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("first", "second"):
        monkeypatch.setenv("OF_A_TEST", value)
        processes.run(functools.partial(note, folder=tmp_path), tmp_path)
        found = [(tmp_path / f"rank {rank}").read_text().split(", ") for rank in range(processes.WORLD)]
        assert found[0][0] != found[1][0]
        assert [inherited for _, *inherited in found] == [[value, str(tmp_path)]] * processes.WORLD


def fail(rank: int) -> None:
    if rank:
        raise KeyError("planted")
    torch.distributed.barrier()


def leave(rank: int) -> None:
    if rank:
        os._exit(3)
    torch.distributed.barrier()


def wait(rank: int) -> None:
    if rank:
        time.sleep(600)
    torch.distributed.barrier()


def test_an_error_of_one_ends_both(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="KeyError: 'planted'"):
        processes.run(fail, tmp_path)
    processes.run(functools.partial(note, folder=tmp_path), tmp_path)


def test_a_process_that_leaves_ends_both(tmp_path: Path) -> None:
    """The other process may see it first."""
    errors = torch.multiprocessing.ProcessExitedException, torch.multiprocessing.ProcessRaisedException
    with pytest.raises(errors, match=r"exit code 3|rank 0"):
        processes.run(leave, tmp_path)
    processes.run(functools.partial(note, folder=tmp_path), tmp_path)


def test_processes_that_wait_for_each_other_are_ended(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="has not ended after 2 seconds"):
        processes.run(wait, tmp_path, seconds=2)
    processes.run(functools.partial(note, folder=tmp_path), tmp_path)
