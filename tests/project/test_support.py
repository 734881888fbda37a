"""The table of features and setups is that of the marks, and no mark says what its test does not."""

from pathlib import Path

import pytest

from tests.tools import support
from tests.tools.support import FEATURES, SETUPS, Wrong

SHOWS = '@pytest.mark.supports("gspo", on="DDP")\n'
REFUSES = '@pytest.mark.refuses("gspo", on="DDP", where={where!r})\n'
TEST = "def test_it(): ...\n"


def read(folder: Path, source: str, file: str = "test_it.py") -> list[support.Mark]:
    """Return the marks of a file of this source."""
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return list(support.read(path))


def test_the_page_has_the_table_of_the_marks() -> None:
    """If not: python -m tests.tools.support --write."""
    marks, page = support.collect(), support.PAGE.read_text()
    assert support.written(page, marks) == page
    assert {feature for mark in marks for feature in mark.features} == FEATURES.keys()
    assert {setup for mark in marks for setup in mark.setups} == set(SETUPS)


def test_ci_runs_what_backs_a_sign() -> None:
    ci = support.ROOT / ".ci/run"
    if not ci.exists():
        pytest.skip("needs the checkout")
    targets = ("test", "test-slow", "test-distributed", "test-sharded", "test-vllm")
    assert {f"make {target}" for target in targets} <= set(ci.read_text().splitlines())


ON_CUDA = "@pytest.mark.skipif(not torch.cuda.is_available(), reason='')\n"
SKIPS = "@pytest.mark.skipif(importlib.util.find_spec('{}') is None, reason='')\n"
CELLS = {
    "a whole run": (SHOWS, "✓"),
    "on CPU only": (SHOWS.replace('"DDP"', '"DDP", only="CPU"'), "(✓)"),
    "a piece": (SHOWS.replace('"DDP"', '"DDP", only="pieces"'), "?; pieces"),
    "a piece and a whole run": (SHOWS.replace('"DDP"', '"DDP", only="pieces"') + SHOWS, "✓"),
    "slow": (f"@pytest.mark.slow\n{SHOWS}", "✓"),
    "CUDA": (f"{ON_CUDA}{SHOWS}", "?; a test for CUDA is written"),
    "marked gpu": (f"@pytest.mark.gpu\n{SHOWS}", "?; a test for CUDA is written"),
    "CUDA for all of the file": (f"pytestmark = [{ON_CUDA.strip()[1:]}]\n{SHOWS}", "?; a test for CUDA is written"),
    "no CUDA": (ON_CUDA.replace("not ", "") + SHOWS, "✓"),
    "deepspeed": (SKIPS.format("deepspeed") + SHOWS, "✓"),
    "refused": (REFUSES.format(where=""), "✗"),
    "refused in part": (REFUSES.format(where="on CPU") + SHOWS, "✓; refused on CPU"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_says_what_the_tests_that_ci_runs_show(tmp_path: Path, case: str) -> None:
    source, expected = CELLS[case]
    marks = read(tmp_path, source + TEST, "distributed/test_it.py")
    assert support.cell(marks, "gspo", "DDP") == expected
    assert support.cell(marks, "gspo", "FSDP2") == "?"


WRONG = {
    "another feature": (SHOWS.replace("gspo", "gspso"), r"names \('gspso',\)"),
    "another setup": (SHOWS.replace("DDP", "ZeRO-1"), r"names \('ZeRO-1',\)"),
    "no setup": ('@pytest.mark.supports("gspo")\n', "names nothing"),
    "no feature": ('@pytest.mark.supports(on="DDP")\n', "names nothing"),
    "another kind": (SHOWS.replace('"DDP"', '"DDP", only="half"'), "only='half'"),
    "a skip": (f"@pytest.mark.skip\n{SHOWS}", "is skipped"),
    "an expected failure": (f"@pytest.mark.xfail(strict=True)\n{SHOWS}", "expected to fail"),
    "a package that CI does not install for the folder": (SKIPS.format("vllm") + SHOWS, "does not tell"),
    "another condition": (f"@pytest.mark.skipif(is_slow(), reason='')\n{SHOWS}", r"`is_slow\(\)` does not tell"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mark_that_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    source, message = WRONG[case]
    with pytest.raises(Wrong, match=message):
        read(tmp_path, source + TEST, "distributed/test_it.py")


def test_a_skip_in_the_body_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Wrong, match="is skipped"):
        read(tmp_path, f'{SHOWS}def test_it():\n    pytest.skip("not today")\n')


def test_a_feature_is_not_shown_and_refused(tmp_path: Path) -> None:
    marks = read(tmp_path, REFUSES.format(where="") + SHOWS + TEST)
    with pytest.raises(Wrong, match="gspo on DDP is shown and refused"):
        support.cell(marks, "gspo", "DDP")
