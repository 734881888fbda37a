"""TRL's own scripts, as `trl-steady grpo` runs them in a process: a mistake is one line, and SIGTERM ends them."""

import json
import os
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from trl_steady.cli import main as cli

GRPO = str(resources.files("trl.scripts").joinpath("grpo.py"))
REWARDS = """
import os, signal
calls = []

def by_length(completions, **_):
    calls.append(len(completions))
    return [float(len(completion)) for completion in completions]

def ends_the_second_step(completions, **_):
    if calls:
        os.kill(os.getpid(), signal.SIGTERM)
    return by_length(completions)
"""
# what is wrong -> options, and the line
MISTAKES = {
    "a name": ("--reward_funcs acuracy_reward", "ValueError: Could not load reward function 'acuracy_reward'."),
    "a module": ("--reward_funcs rewrds.by_length", "ModuleNotFoundError: No module named 'rewrds'"),
    "a function": (
        "--reward_funcs rewards.by_lenght",
        "AttributeError: module 'rewards' has no attribute 'by_lenght'",
    ),
    "a folder": ("--dataset_name dta", "ConnectionError: "),
    "a folder without data": ("--dataset_name ./empty", "EmptyDatasetError: "),
    "a name on the hub": ("--dataset_name nobody/nothing", "ConnectionError: "),
    "a split": ("--dataset_train_split trian", "KeyError: 'trian'"),
}


@pytest.fixture
def command(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a run of six steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    Path("rewards.py").write_text(REWARDS)
    Path("broken.py").write_text("import nowhere\n")
    Path("empty").mkdir()
    Path("data").mkdir()
    rows = [json.dumps({"prompt": str(i)}) for i in range(16)]
    Path("data/train.jsonl").write_text("\n".join(rows))
    options = {
        "model_name_or_path": models["dense"],
        "dtype": "float32",
        "output_dir": "out",
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "dataset_name": "./data",
        "reward_funcs": "rewards.by_length",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 6,
    }
    return ["run", GRPO, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_name_that_does_not_exist_is_one_line(
    mistake: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options, line = MISTAKES[mistake]
    assert cli.main([*command, *options.split()]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-steady: ")]
    assert len(said) == 1 and said[0].startswith(f"trl-steady: {line}")


def test_an_error_in_a_module_of_the_user_shows_its_line(command: list[str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere") as error:
        cli.main([*command, "--reward_funcs", "broken.reward"])
    assert any(str(each.path).endswith("broken.py") for each in error.traceback)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("asked", [False, True])
def test_a_script_ends_with_a_run_that_has_lost_its_machine(command: list[str], asked: bool) -> None:
    """It would save half a run as its result, and push it."""
    if asked:
        command += ["--enable_jit_checkpoint", "true", "--reward_funcs", "rewards.ends_the_second_step"]
    assert cli.main([*command, "--save_strategy", "no"]) == 0
    assert Path("out/model.safetensors").exists() != asked
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-2"] * asked


def test_sigterm_reaches_a_process_that_accelerate_has_started() -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True)"
    handler = signal.getsignal(signal.SIGTERM)
    with cli._sigterm_reaches_children():
        child = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait() == 7
    assert signal.getsignal(signal.SIGTERM) == handler
