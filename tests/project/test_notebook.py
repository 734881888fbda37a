"""The notebook of the docs runs."""

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
