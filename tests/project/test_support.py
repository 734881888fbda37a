"""The table of features and setups is that of the marks, and no mark says what its test does not."""

import re
from pathlib import Path

import pytest

from tests.tools import support
from tests.tools.support import FEATURES, SETUPS, Wrong

pytestmark = pytest.mark.skipif(not (support.ROOT / ".ci").exists(), reason="needs the checkout")
MARKS = support.collect() if (support.ROOT / ".ci").exists() else []
TOLD = "DeepSpeed keeps the optimizer's state in partitions of its own, which cannot be cleared from here. Leave the "
TOLD += "optimizer's state as it is (ref_model_sync_reset_optimizer=False), or use FSDP2 or DDP."


def of(folder: Path, source: str, file: str = "test_it.py") -> list[support.Mark]:
    """The marks of a file of this source."""
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return list(support.read(path))


def cells(folder: Path, source: str, file: str = "test_it.py") -> dict[tuple[str, str], str]:
    marks = of(folder, source, file)
    each = {(feature, setup): support.cell(marks, feature, setup) for feature in FEATURES for setup in SETUPS}
    return {place: text for place, text in each.items() if text != support.NOT_RUN}


def test_the_page_has_the_table_of_the_marks() -> None:
    """If not: python -m tests.tools.support --write."""
    page = support.PAGE.read_text()
    assert support.written(page, MARKS) == page


def test_every_feature_is_a_row_and_every_row_is_of_a_feature() -> None:
    assert {feature for mark in MARKS for feature in mark.features} == FEATURES.keys()
    assert {setup for mark in MARKS for setup in mark.setups} == set(SETUPS)
    rows = re.findall(r"^\| (.*?) \|(?: .*? \|){6}$", support.table(MARKS), re.M)
    assert rows == list(FEATURES.values())


def test_what_ci_runs_is_read_from_what_ci_runs() -> None:
    assert {"test", "test-vllm", "test-distributed", "test-sharded"} <= support.suites()
    assert support.left_out() == {"slow", "gpu"}
    elsewhere = support.installed("tests")
    assert {"torch", "pytest", "matplotlib"} <= elsewhere and not {"deepspeed", "vllm"} & elsewhere
    assert all("deepspeed" in support.installed(folder) for folder in ("distributed", "sharded"))
    assert "vllm" in support.installed("vllm")


def without(name: str) -> str:
    return f"@pytest.mark.skipif(importlib.util.find_spec('{name}') is None, reason='')"


SKIPPED = {
    "": "tested",
    "@pytest.mark.skipif(torch.cuda.is_available(), reason='')": "tested",
    without("torch"): "tested",
    "@pytest.mark.slow": "tested by `make test-slow`",
    "@pytest.mark.gpu": "a test for CUDA is written",
    "@pytest.mark.skipif(not torch.cuda.is_available(), reason='')": "a test for CUDA is written",
    without("deepspeed"): "tested where deepspeed is installed",
    without("vllm"): "tested where vllm is installed",
}


@pytest.mark.parametrize("skip", SKIPPED)
def test_a_test_that_ci_skips_makes_no_cell_tested(tmp_path: Path, skip: str) -> None:
    expected = "✓" if SKIPPED[skip] == "tested" else f"?; {SKIPPED[skip]}"
    test = f'{skip}\n@pytest.mark.supports("gspo", on="DDP")\ndef test_it(): ...\n'
    assert cells(tmp_path, test) == {("gspo", "DDP"): expected}
    of_file = f"pytestmark = [{skip[1:]}]\n" + test.removeprefix(skip)
    assert cells(tmp_path, of_file) == cells(tmp_path, test)


def test_a_skip_in_the_body_counts(tmp_path: Path) -> None:
    test = '@pytest.mark.supports("gspo", on="DDP")\ndef test_it():\n    '
    assert cells(tmp_path, test + 'pytest.importorskip("deepspeed")') == {
        ("gspo", "DDP"): "?; tested where deepspeed is installed"
    }
    with pytest.raises(Wrong, match="is skipped or expected to fail"):
        of(tmp_path, test + 'if True:\n        pytest.skip("not here")')


def test_tests_with_a_real_vllm_count_in_their_own_folder(tmp_path: Path) -> None:
    test = f'{without("vllm")}\n@pytest.mark.supports("gspo", on="vLLM server")\ndef test_it(): ...\n'
    assert cells(tmp_path, test, "vllm/test_it.py") == {("gspo", "vLLM server"): "✓"}


def test_tests_with_deepspeed_count_in_their_own_folder(tmp_path: Path) -> None:
    test = f'{without("deepspeed")}\n@pytest.mark.supports("gspo", on="ZeRO-3")\ndef test_it(): ...\n'
    assert cells(tmp_path, test, "distributed/test_it.py") == {("gspo", "ZeRO-3"): "✓"}
    elsewhere = {("gspo", "ZeRO-3"): "?; tested where deepspeed is installed"}
    assert cells(tmp_path, test, "reference/test_it.py") == elsewhere


def test_whole_runs_without_the_accelerator_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = '@pytest.mark.supports("gspo", on="FSDP2", only="CPU")\n'
    pieces = '@pytest.mark.supports("gspo", on="FSDP2", only="pieces")\ndef test_pieces(): ...\n'
    test = f"{pieces}{without('deepspeed')}\n{mark}def test_it(): ...\n"
    assert cells(tmp_path, test, "sharded/test_it.py") == {("gspo", "FSDP2"): "(✓)"}
    monkeypatch.setattr(support, "suites", lambda: {"test"})
    by = "by `make test-sharded`"
    expected = f"?; pieces {by}; tested, on CPU {by} where deepspeed is installed"
    assert cells(tmp_path, test, "sharded/test_it.py") == {("gspo", "FSDP2"): expected}


def test_pieces_and_stand_ins_are_said_to_be(tmp_path: Path) -> None:
    marks = '@pytest.mark.supports("gspo", "masks", on="FSDP2", only="pieces")\n'
    marks += '@pytest.mark.supports("masks", on=("FSDP2", "vLLM server"), only="stand-in")\n'
    assert cells(tmp_path, marks + "def test_it(): ...\n") == {
        ("gspo", "FSDP2"): "?; pieces",
        ("masks", "FSDP2"): "?; pieces; stand-in",
        ("masks", "vLLM server"): "?; stand-in",
    }


def refusing(message: str = TOLD, pattern: str = "cannot be cleared .* use FSDP2", where: str = "") -> str:
    raises = f"def test_it():\n    with pytest.raises(ValueError, match={pattern!r}): ...\n"
    return f'@pytest.mark.refuses("gspo", on="ZeRO-2", message={message!r}, where={where!r})\n{raises}'


def test_a_refusal_is_all_of_a_cell_or_a_part(tmp_path: Path) -> None:
    shown = '@pytest.mark.supports("gspo", on="ZeRO-2")\n'
    assert cells(tmp_path, refusing()) == {("gspo", "ZeRO-2"): "✗"}
    assert cells(tmp_path, shown + refusing(where="on CPU")) == {("gspo", "ZeRO-2"): "✓; refused on CPU"}
    assert TOLD in support.table(of(tmp_path, refusing()))
    with pytest.raises(Wrong, match="gspo on ZeRO-2 is shown and refused"):
        cells(tmp_path, shown + refusing())


def marked(*marks: str) -> str:
    return "".join(f"@pytest.mark.{mark}\n" for mark in marks) + "def test_it(): ...\n"


SHOWS = 'supports("gspo", on="DDP")'
WRONG = {
    "a feature": (marked('supports("gspso", on="DDP")'), r"names \['gspso'\], and there are gspo"),
    "a setup": (marked('supports("gspo", on="ZeRO-1")'), r"names \['ZeRO-1'\], and there are DDP"),
    "no setup": (marked('supports("gspo")'), "names nothing, and there are DDP"),
    "no feature": (marked('supports(on="DDP")'), "names nothing, and there are gspo"),
    "a kind": (marked('supports("gspo", on="DDP", only="half")'), "only='half'"),
    "no message": (marked('refuses("gspo", on="DDP")'), "message=''"),
    "a skip": (marked(SHOWS, "skip"), "is skipped"),
    "an expected failure": (marked(SHOWS, "xfail(strict=True)"), "is skipped or expected to fail"),
    "a condition": (
        marked(SHOWS, "skipif(is_slow(), reason='')"),
        "whether .ci/run skips it, `is_slow..` does not tell",
    ),
    "a message that nothing says": (refusing(TOLD.replace("cannot", "can")), "no error of the package says"),
    "a part of a message": (refusing(TOLD[:99]), "no error of the package says"),
    "another pattern": (refusing(pattern="cannot be cleared .* use ZeRO-1"), "none of them is in"),
    "no pattern": (refusing().replace("match=", "message="), r"expects \[\], and none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mark_that_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    source, message = WRONG[case]
    with pytest.raises(Wrong, match=message):
        of(tmp_path, source)


def test_a_fixture_that_may_skip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("@pytest.fixture\ndef gpu():\n    pytest.skip()\n")
    (tmp_path / "test_it.py").write_text('@pytest.mark.supports("gspo", on="DDP")\ndef test_it(gpu): ...\n')
    with pytest.raises(Wrong, match="gpu may skip it"):
        support.collect(tmp_path)
