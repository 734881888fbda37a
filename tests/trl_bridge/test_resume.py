"""A run that is killed and resumed ends as the run that was never killed, bit for bit."""

import functools
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import resumable

Baseline = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Returns the state of a kind of run at its end, when nothing kills it."""

    @functools.cache
    def state(kind: str, steps: int = resumable.STEPS) -> dict[str, Any]:
        output = tmp_path_factory.mktemp(kind)
        assert resumable.run(kind, folder(kind, models, wide), output, max_steps=steps) == 0
        found = torch.load(output / "state.pt")
        assert [step for step, _, rule in found["refreshes"]] == [step for step in (8, 16) if step < steps]
        return found

    return state


def folder(kind: str, models: dict[str, Path], wide: Path) -> Path:
    return wide if kind == "nf4" else models["moe" if kind == "lora" else "dense"]


KILLS = {  # each between a refresh and another
    # in the middle of a checkpoint; goes on at 9, in a window
    "full": ("open", "checkpoint-12/trainer_state.json", 1),
    # when it is whole but not yet in place; goes on at 15, a move due
    "lora": ("os.rename", "checkpoint-18", 1),
    # inside a window; goes on at 12, at the end of one and of an epoch
    "nf4": ("open", "_unfinished/checkpoint-15", 1),
}


@pytest.mark.slow  # tests/features/reward_model/test_checkpoints.py kills a run in `make test`
@pytest.mark.parametrize("kind", resumable.KINDS)
def test_a_killed_run_ends_as_if_it_had_not_been(
    kind: str, models: dict[str, Path], wide: Path, tmp_path: Path, expected: Baseline
) -> None:
    model = folder(kind, models, wide)
    assert resumable.run(kind, model, tmp_path, kill=KILLS[kind]) == -signal.SIGKILL
    assert not (tmp_path / "state.pt").exists()
    assert resumable.run(kind, model, tmp_path) == 0
    assert resumable.differences(expected(kind), torch.load(tmp_path / "state.pt")) == []


STEPS = 12  # the end of the window after the third checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(("event", "times"), [("open", 4), ("os.rename", 2), ("shutil.rmtree", 8)])
def test_a_run_killed_at_every_file_of_a_checkpoint(
    event: str,
    times: int,
    models: dict[str, Path],
    wide: Path,
    tmp_path: Path,
    expected: Baseline,
) -> None:
    """Of the third one: before each file that Python opens and each move; of all, before what is left is removed."""
    model = folder("lora", models, wide)
    pattern = "_unfinished" if event == "shutil.rmtree" else "checkpoint-9"
    for count in itertools.count(1):
        output = tmp_path / str(count)
        if resumable.run("lora", model, output, kill=(event, pattern, count), max_steps=STEPS) == 0:
            break
        assert resumable.run("lora", model, output, max_steps=STEPS) == 0
        assert resumable.differences(expected("lora", STEPS), torch.load(output / "state.pt")) == []
    assert count > times
