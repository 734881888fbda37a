"""The notebooks of the docs run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.integration_utils import rewrite_logs

pytest.importorskip("nbclient", reason="needs nbclient, of the test extra")

import trl_steady
from tests.project import notebook, recipe
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


def test_the_notebook_for_a_t4_runs_on_a_cpu(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model, the sizes and the reward are exchanged: a random model is never right."""
    pytest.importorskip("matplotlib", reason="needs the report extra").use("Agg")
    monkeypatch.chdir(tmp_path)
    shorter = {"max_steps=48": "max_steps=8", "_steps=16": "_steps=4", "batch_size=16": "batch_size=8"}
    others = {'"Qwen/Qwen2.5-1.5B-Instruct"': repr(str(recipe.chatty(wide, tmp_path / "model"))), **shorter}
    install, *rest = cells(notebook.stored(notebook.FOLDER / "qlora_t4.ipynb"))
    assert all(any(name in cell.source for cell in rest) for name in others)
    assert install.source.endswith(
        '%pip install -q "./trl-steady-main[report]"'
    )  # as GitHub names a ZIP file's folder
    found: dict[str, Any] = {"__name__": "__main__"}
    for cell in rest:
        for name, other in others.items():
            cell.source = cell.source.replace(name, other)
        exec(compile(cell.source, cell.id, "exec"), found)
        if "def is_right" in cell.source:
            assert found["is_right"]([[{"content": " 12."}], [{"content": "13"}]], ["12", "12"]) == [1, 0]
            found.update(is_right=lambda completions, **_: [len(each[0]["content"]) % 2 for each in completions])
    trainer = found["trainer"]
    assert trainer.model.get_base_model().is_loaded_in_4bit
    adapters = {name: p.dtype for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert {*adapters.values()} == {torch.float32} and any(".ref." in name for name in adapters)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["kl"] > 0 for row in rows] == [False, *3 * [True], False, *3 * [True]]  # the reference moves after 4
    assert rewrite_logs(found["last"]).keys() >= {f"train/{name}" for name in found["watch"]}
    printed = capsys.readouterr().out
    assert all(f"train/{name} " in printed for name in found["watch"]) and "on: GSPO" in printed
    assert "qwen-t4" in found["page"]
