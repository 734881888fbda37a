"""The notebook of the docs runs, and its stored outputs are those of a run."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

pytest.importorskip("nbclient", reason="needs nbclient, of the test extra")

import trl_steady
from tests.project import notebook
from tests.tools import tiny


def cells(of: Any) -> list[Any]:
    return [cell for cell in of.cells if cell.cell_type == "code"]


def output_of(of: Any, name: str) -> str:
    """The text of a cell's outputs."""
    (cell,) = (cell for cell in cells(of) if cell.id == name)
    return "".join(output.get("text") or output.data["text/plain"] for output in cell.outputs)


def check_outputs(of: Any) -> None:
    """Every cell has run, in order and without an error, and the log has all its rows."""
    assert [cell.execution_count for cell in cells(of)] == list(range(1, len(cells(of)) + 1))
    assert not [output for cell in cells(of) for output in cell.outputs if output.output_type == "error"]
    assert "on: GSPO: loss_type='gspo'" in output_of(of, "train")
    rows = re.findall(r"^(\d+) +(\d\.\d+)?", output_of(of, "log"), flags=re.MULTILINE)
    assert [int(step) for step, _ in rows] == list(range(1, 17))
    assert all(reward for _, reward in rows[::4])
    assert "on: GSPO-token: loss_type='gspo_token'" in output_of(of, "token")
    assert re.match(r"\{'reward': \d\.\d+,\s+'steps/mean_count': 3", output_of(of, "metrics"))


def test_the_stored_outputs_are_complete_and_clean() -> None:
    stored = notebook.stored()
    check_outputs(stored)
    assert any("image/png" in output.get("data", {}) for cell in cells(stored) for output in cell.outputs)
    assert stored == notebook.cleaned(notebook.stored())  # which drops warnings and times
    text = notebook.NOTEBOOK.read_text()
    assert len(text) < 150_000 and not re.search(r"/(?:root|home|work|tmp|usr)/|site-packages|Warning", text)


def test_the_cells_run_with_a_tiny_model(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cells are unchanged; what they load from the package is exchanged."""
    matplotlib = pytest.importorskip("matplotlib", reason="needs the recipes extra")
    matplotlib.use("Agg")
    load = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, gguf_file, **__: load(models["dense"])
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, gguf_file, **__: tiny.tokenizer())
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(notebook.stored()):
        exec(compile(cell.source, cell.id, "exec"), found)
    assert type(found["trainer"]) is trl_steady.GRPOTrainer and found["trainer"].state.global_step == 4
    assert list(found["table"].index) == list(range(1, 17))
    assert found["first"]["steps/mean_count"] > 0
    assert capsys.readouterr().out.count("trl_steady.trainers.grpo.GRPOTrainer, loss_type=") == 2
