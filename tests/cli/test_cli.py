"""The command line: TRL's own script and command with our fields, launched as accelerate launches, and its tables."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from accelerate.commands import launch
from trl.scripts import grpo

from tests.cli.tools import Launched
from trl_steady.cli import main as cli

ROOT = Path(__file__).parents[2]
SCRIPT = Path(grpo.__file__)


@pytest.fixture
def config(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML for TRL's script: a local model, local data in JSON, a reward by its path; none of it from a hub."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)  # where TRL's script looks for the reward
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i + 1}="}) + "\n" for i in range(16)))
    options: dict[str, Any] = {
        **{"model_name_or_path": str(models["dense"]), "dataset_name": str(data), "output_dir": str(tmp_path / "out")},
        **{"reward_funcs": ["tests.tools.tiny.reward"], "use_cpu": True, "bf16": False, "dtype": "float32"},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 4},
        **{"learning_rate": 0.01, "logging_steps": 1, "report_to": "none", "save_strategy": "no"},
        "disable_tqdm": True,  # then each log is a line
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("command", "in_file", "given", "script", "said"),
    [
        (
            "grpo",
            {"loss_type": "gspo_token"},
            ["--num_iterations", "2"],
            [str(SCRIPT)],
            [
                "trl_steady.trainers.grpo.GRPOTrainer, loss_type='gspo_token'\n  on: GSPO-token: ",
                "'ratio/sequence_mean'",
            ],
        ),
        (
            "rloo",
            {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 2},
            ["--share_prompts", "true"],
            [str(SCRIPT.with_name("rloo.py"))],
            ["trl_steady.trainers.rloo.RLOOTrainer\n  on: iterative GRPO: ", "share_prompts=True", "'ref/refreshes'"],
        ),
        (
            "ppo",
            {"num_generations": 1, "value_warmup_steps": 1},
            ["--kl_coef", "0.1"],
            ["--ppo", str(SCRIPT)],
            [
                "trl_steady.trainers.ppo.PPOTrainer",
                "in the reward: kl_coef=0.1",
                "value_warmup_steps=1",
                "'value/loss'",
            ],
        ),
    ],
    ids=["grpo", "rloo", "ppo"],
)
def test_a_command_launches_trls_script_with_our_trainer_and_options(
    command: str,
    in_file: dict[str, Any],
    given: list[str],
    script: list[str],
    said: list[str],
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **in_file, "num_machines": 1}))
    launched = Launched(monkeypatch)
    arguments = ["--config", str(config), *given]
    assert cli.main([command, *arguments, "--num_processes", "3"]) == 0
    args = launched.args
    assert (args.num_processes, args.num_machines, args.module, args.training_script) == (3, 1, True, "trl_steady")
    assert args.training_script_args == ["run", *script, *arguments]
    capsys.readouterr()
    assert cli.main(args.training_script_args) == 0
    out = capsys.readouterr().out
    assert [each for each in said if each not in out] == []


@pytest.mark.slow
def test_two_processes_run_trls_command_with_our_fields(config: Path) -> None:
    command = [sys.executable, "-m", "trl_steady", "grpo", "--config", str(config), "--loss_type", "gspo_token"]
    command += ["--num_iterations", "2", "--accelerate_config", str(ROOT / "recipes/accelerate/ddp_cpu.yaml")]
    env = {**os.environ, "HF_DATASETS_CACHE": str(config.parent / "cache")}
    printed = config.parent / "printed"
    with printed.open("w+") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        # TRL's script lets go of its process group with the GIL held, and torch's destructor of a gloo group may then
        # wait for a thread that waits for the GIL: a process that has said its last and does not end is ended
        end = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < end and "Model saved" not in printed.read_text():
            time.sleep(1)
        try:
            status = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends its workers
            process.wait(timeout=60)
            status = 0
    said = printed.read_text()
    assert status == 0 and said.count("Model saved") == 1, said[-3000:]
    # by one of two that train together
    assert said.count("trl_steady.trainers.grpo.GRPOTrainer, loss_type='gspo_token'\n  on: GSPO-token: ") == 1
    logged = [line for line in said.splitlines() if "'grad_norm'" in line]
    assert len(logged) == 4 and sum("'ratio/sequence_mean'" in line for line in logged) == 4
    assert "Training completed" in said


def test_a_script_is_launched_with_accelerates_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    launched = Launched(monkeypatch)
    target = ["-m", "a.train", "--num_processes", "9"]
    assert cli.main(["run", "--accelerate_config=fsdp2", *target]) == 0
    args, _, _ = launch._validate_launch_command(launched.args)
    assert args.use_fsdp and args.module and args.training_script == "trl_steady"
    assert args.training_script_args == ["run", *target]
    target = ["train.py", "--accelerate_config", "mine"]
    assert cli.main(["run", "--set", "top_k=5", "--num_processes", "3", "--set=loss_type=gspo", *target]) == 0
    args, _, _ = launch._validate_launch_command(launched.args)
    assert args.num_processes == 3 and not args.use_fsdp
    assert args.training_script_args == ["run", "--set=top_k=5", "--set=loss_type=gspo", *target]


def test_the_error_of_the_script_is_the_last_one_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    class Failed:
        """A process that has printed its error and ended."""

        returncode = 3

        def __init__(self, *_: Any, **__: Any) -> None:
            sys.stderr.write("ValueError: the script's\n")

        def wait(self) -> None: ...

    monkeypatch.setattr(launch.subprocess, "Popen", Failed)
    with pytest.raises(SystemExit, match="1"):  # no CalledProcessError, which python prints
        cli.main(["run", "--num_processes", "1", "train.py"])
    assert capsys.readouterr().err.endswith("ValueError: the script's\n")


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_arguments_of_a_module_are_its_own(flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    launched = Launched(monkeypatch)
    assert cli.main(["run", "--num_processes", "1", flag, "package", "--writes", "new.py"]) == 0
    assert launched.args.training_script_args == ["run", "-m", "package", "--writes", "new.py"]


REFUSED = {
    "grop": "no command 'grop'. trl-steady --help lists the commands.",
    "env --all": "no command 'env --all'.",
    "run -m": "run needs a script.",
    "run --num_procesess 2 tests/cli/tools.py": "unrecognized arguments: --num_procesess",
    "run --set": "--set needs NAME=VALUE.",
    "run --set num_processes=2 tests/cli/tools.py": "an option 'num_processes'.",
    "grpo --kl_coef 0.1 --output_dir x --use_cpu 1 --bf16 0": "unrecognized arguments: --kl_coef",
    "grpo --beta abc": "argument --beta: invalid float value: 'abc'",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_run_is_said_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Launched(monkeypatch)
    monkeypatch.chdir(ROOT)
    assert cli.main(command.split()) == 2
    *others, line = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-steady: ") and REFUSED[command] in line
    assert not [other for other in others if "--" in other or "usage" in other]


def test_help_has_every_command_and_trls_command_our_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["run", "-h"], ["env", "--help"]):
        assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in ("run", "grpo", "rloo", "methods", "env"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["grpo", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: trl-steady grpo ") and "--router_replay" in out and "--reward_funcs" in out
