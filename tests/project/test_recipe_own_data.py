"""recipes/your_own_data: its rows fit its reward, and its one command trains."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from bitsandbytes.nn import Linear4bit

from tests.cli.tools import Launched
from tests.project import recipe
from tests.project.recipe import moved
from trl_steady.cli import main as cli
from trl_steady.trainers.base import SteadyTrainer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes/your_own_data"
ROWS = [json.loads(line) for line in (FOLDER / "data/train.jsonl").read_text().splitlines()]


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("recipes.your_own_data.rewards")


def test_each_of_the_ten_rows_has_a_question_and_an_answer_that_the_reward_knows(rewards: Any) -> None:
    assert len(ROWS) == 10
    for row, other in zip(ROWS, ROWS[1:] + ROWS[:1], strict=True):
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"]
        right = row["answer"]
        texts = [right, f" {right.upper()}.\n", f"It is {right}, I think.", other["answer"], f"x{right}x", ""]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        found = rewards.is_right(completions=completions, answer=[right] * len(texts), prompts=None)
        assert found == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0]


def test_the_one_command_trains_a_tiny_model(
    rewards: Any,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command of the README for another model. A random model is never right, so its reward is replaced."""
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    asked: list[str] = []

    def by_length(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        asked.extend(answer)
        return [float(len(message["content"]) % 2) for (message,) in completions]

    monkeypatch.setattr(rewards, "is_right", by_length)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    recipe.chatty(models["dense"], tmp_path / "model")
    (line,) = (line for line in (FOLDER / "README.md").read_text().splitlines() if "--model_name_or_path" in line)
    command = shlex.split(line.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model")))[1:]
    assert command[:3] == ["grpo", "--config", str((FOLDER / "smollm2-135m.yaml").relative_to(ROOT))]
    launched = Launched(monkeypatch)
    assert cli.main([*command, "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]) == 0
    assert cli.main(launched.args.training_script_args) == 0
    printed = capsys.readouterr().out
    assert "GRPOTrainer, loss_type='gspo'" in printed and printed.count("\nstep ") == 8
    assert len(re.findall(r"^step \d/8  reward \d", printed, re.M)) == 2 and "{'" not in printed
    assert "<svg" in (tmp_path / "out/report.html").read_text()
    assert len(asked) == 64 and set(asked) <= {row["answer"] for row in ROWS} and len(set(asked)) == 8
    assert moved(tmp_path / "out", tmp_path / "model")


@pytest.mark.slow
def test_qlora_with_a_moving_reference_needs_no_script(
    rewards: Any,
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command of docs/launcher.md, on a model of two layers."""
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    built: list[Any] = []
    build = SteadyTrainer.__init__

    def note(trainer: Any, *given: Any, **named: Any) -> None:
        build(trainer, *given, **named)
        built.append(trainer)

    monkeypatch.setattr(SteadyTrainer, "__init__", note)
    monkeypatch.setattr(
        rewards, "is_right", lambda completions, **_: [float(len(c[0]["content"]) % 2) for c in completions]
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs/launcher.md").read_text()
    (lines,) = re.findall(r"^trl-steady (grpo .*--load_in_4bit true.* \\\n.*)$", page, re.M)
    command = shlex.split(lines.replace("\\\n", ""))
    model, output = recipe.chatty(wide, tmp_path / "model"), tmp_path / "out"
    command += ["--model_name_or_path", str(model), "--output_dir", str(output), "--use_cpu", "true"]
    launched = Launched(monkeypatch)
    assert cli.main(command) == 0
    assert cli.main(launched.args.training_script_args) == 0
    (trainer,) = built
    layers = [module for module in trainer.model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14 and {layer.weight.quant_state.quant_type for layer in layers} == {"nf4"}
    assert {layer.compute_dtype for layer in layers} == {torch.float32}  # the file's dtype
    trained = [each for each in trainer.model.parameters() if each.requires_grad]
    assert len(trained) == 28 and {each.dtype for each in trained} == {torch.float32}
    printed = capsys.readouterr().out
    kl = {row["step"]: row["kl"] for row in trainer.state.log_history if "kl" in row}
    assert kl[1] == kl[5] == 0 and min(kl[step] for step in (2, 3, 4, 6, 7, 8)) > 0
    assert [refresh.step for refresh in trainer.reference_refreshes] == [4] and printed.count("\nstep ") == 8
    assert moved(output, model)
