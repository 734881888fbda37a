"""Which processes move a finished checkpoint: one for each disk, whatever a cache of NFS says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools import tiny
from tests.tools.threads import Group
from trl_steady.trl_bridge import checkpoint
from trl_steady.trl_bridge.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("disks", "hidden", "expected"),
    [
        pytest.param("AAA", {}, [0], id="one disk"),
        pytest.param("AAA", {0: (1, 2)}, [0], id="the first machine sees no other"),
        pytest.param("AAA", {1: (0,), 2: (0, 1)}, [0], id="the others do not see the first"),
        pytest.param("ABC", {}, [0, 1, 2], id="disks of their own"),
        pytest.param("ABB", {}, [0, 1], id="two share a disk, without the first"),
        pytest.param("AAB", {1: (0,)}, [0, 2], id="two share a disk, with the first"),
    ],
)
def test_one_process_moves_for_each_disk(
    disks: str,
    hidden: dict[int, tuple[int, ...]],
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`hidden`: machine -> others whose files its cache does not show."""
    group = Group(len(disks))
    can_open = checkpoint._can_open

    def seen(path: Path) -> bool:
        is_hidden = int(path.name.rpartition("_")[2]) in hidden.get(group.own.rank, ())
        return can_open(path) and not is_hidden

    monkeypatch.setattr(checkpoint, "gather_object", group.gather)
    monkeypatch.setattr(checkpoint, "_can_open", seen)

    def movers(rank: int) -> list[int]:
        accelerator = SimpleNamespace(is_local_main_process=True, process_index=rank)
        trainer: Any = SimpleNamespace(accelerator=accelerator)
        return Checkpoints(trainer)._movers(tmp_path / disks[rank] / "_unfinished" / "checkpoint-1")

    found = group.run(movers)
    assert found == [expected] * len(disks)
    assert not list(tmp_path.rglob("_machine_*"))


def test_a_file_is_looked_for_by_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS answers other questions from a cache."""
    (tmp_path / "there").touch()
    for question in ("exists", "is_file", "stat"):
        monkeypatch.setattr(Path, question, lambda self, **how: self.name == "gone")
    assert checkpoint._can_open(tmp_path / "there") and not checkpoint._can_open(tmp_path / "gone")


def test_a_move_asks_no_cache(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may seem to exist that has been removed, and files may be left of a run that was killed."""
    (tmp_path / "_unfinished" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "_unfinished" / "checkpoint-1" / "_machine_1").touch()
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self, **how: self.parent == tmp_path or exists(self, **how))
    tiny.trainer(models["dense"], tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    assert {path.name for path in tmp_path.glob("[c_]*")} == {"checkpoint-1", "checkpoint-2"}
    assert not list(tmp_path.rglob("_machine_*"))
