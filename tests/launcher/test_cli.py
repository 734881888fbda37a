"""The command line: TRL's own script and command with our fields, launched as accelerate launches, and its tables."""

import base64
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trl.scripts import grpo

from trl_steady.launcher import cli

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


OURS = ("--loss_type", "gspo_token", "--num_iterations", "2")


def check_ran_with_our_loss(printed: str) -> None:
    banner = "trl_steady.trainers.grpo.GRPOTrainer, loss_type='gspo_token'\n  on: GSPO-token: "
    assert printed.count(banner) == 1
    logged = [line for line in printed.splitlines() if "'grad_norm'" in line]
    assert len(logged) == 4 and sum("'ratio/sequence_mean'" in line for line in logged) == 4
    assert "Training completed" in printed


def test_trls_script_runs_as_it_is_installed_with_our_loss(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (installed,) = (file for file in files("trl") or [] if str(file) == "trl/scripts/grpo.py")
    digest = base64.urlsafe_b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode().rstrip("=")
    assert installed.hash and installed.hash.value == digest
    assert cli.main(["run", str(SCRIPT), "--config", str(config), *OURS]) == 0
    check_ran_with_our_loss(capsys.readouterr().out)
    assert (config.parent / "out" / "model.safetensors").is_file()


class Launched:
    """Stands in for `accelerate launch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args: Any = None
        monkeypatch.setattr(launch, "launch_command", lambda args: setattr(self, "args", args))


def test_trls_command_runs_that_script_with_our_fields(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + yaml.safe_dump({"loss_type": "gspo_token", "num_machines": 1}))
    launched = Launched(monkeypatch)
    command = ["--config", str(config), "--num_iterations", "2", "--num_processes", "3"]
    assert cli.main(["grpo", *command]) == 0
    args = launched.args
    assert (args.num_processes, args.num_machines, args.module, args.training_script) == (3, 1, True, "trl_steady")
    assert args.training_script_args == ["run", str(SCRIPT), *command[:4]]
    capsys.readouterr()
    assert cli.main(args.training_script_args) == 0
    check_ran_with_our_loss(capsys.readouterr().out)


def test_two_processes_run_trls_command_with_our_fields(config: Path) -> None:
    options = ["--accelerate_config", str(ROOT / "recipes/accelerate/ddp_cpu.yaml")]
    command = [sys.executable, "-m", "trl_steady", "grpo", "--config", str(config), *OURS, *options]
    env = {**os.environ, "HF_DATASETS_CACHE": str(config.parent / "cache")}
    with (config.parent / "printed").open("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=env)
        status, said = wait(process, Path(printed.name), last="Model saved", seconds=300)
    assert status == 0, said[-3000:]
    check_ran_with_our_loss(said)  # once, by one of two that train together
    assert said.count("Model saved") == 1


def wait(process: subprocess.Popen[bytes], printed: Path, last: str, seconds: float) -> tuple[int, str]:
    """The status, and what was printed; a process that has said its last and does not end is ended.

    TRL's script lets go of its process group with the GIL held, and torch's destructor of a gloo group may then
    wait for a thread that waits for the GIL.
    """
    for _ in range(int(seconds)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1), printed.read_text()
        if last in printed.read_text():
            break
    try:
        return process.wait(timeout=10), printed.read_text()
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends its workers
        process.wait(timeout=60)
        said = printed.read_text()
        return 0 if last in said else 1, said


@pytest.mark.parametrize(
    ("options", "deepspeed", "fsdp", "processes"),
    [
        (["--accelerate_config", "zero2"], True, False, None),
        (["--accelerate_config=fsdp2"], False, True, None),
        (["--set", "top_k=5", "--num_processes", "3", "--set=loss_type=gspo"], False, False, 3),
    ],
)
def test_a_script_is_launched_with_accelerates_options(
    options: list[str],
    deepspeed: bool,
    fsdp: bool,
    processes: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    launched = Launched(monkeypatch)
    target = ["-m", "a.train", "--num_processes", "9"] if fsdp else ["train.py", "--accelerate_config", "mine"]
    assert cli.main(["run", *options, *target]) == 0
    args, _, _ = launch._validate_launch_command(launched.args)
    assert (args.use_deepspeed, args.use_fsdp) == (deepspeed, fsdp)
    assert processes is None or args.num_processes == processes
    assert args.module and args.training_script == "trl_steady"
    settings = ["--set=top_k=5", "--set=loss_type=gspo"] if "--set" in options else []
    assert args.training_script_args == ["run", *settings, *target]


class Failed:
    """A process that has printed its error and ended."""

    returncode = 3

    def __init__(self, *_: Any, **__: Any) -> None:
        sys.stderr.write("ValueError: the script's\n")

    def wait(self) -> None: ...


def test_the_error_of_the_script_is_the_last_one_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(launch.subprocess, "Popen", Failed)
    with pytest.raises(SystemExit, match="1"):  # no CalledProcessError, which python prints
        cli.main(["run", "--num_processes", "1", "train.py"])
    assert capsys.readouterr().err.endswith("ValueError: the script's\n")

    def killed(_: Any) -> None:
        raise ChildFailedError("train.py", {1: ProcessFailure(local_rank=1, pid=0, exitcode=-9, error_file="")})

    monkeypatch.setattr(launch, "multi_gpu_launcher", killed)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["run", "--multi_gpu", "--num_processes", "2", "train.py"])
    assert capsys.readouterr().err.endswith("trl-steady: process 1 failed with exit code -9, see above.\n")


REFUSED: dict[tuple[str, ...], str] = {
    ("grop",): "no command 'grop'. Did you mean grpo? trl-steady --help lists the commands.",
    ("env", "--all"): "no command 'env --all'.",
    ("run",): "run needs a script.",
    ("run", "missing.py"): "no such script: 'missing.py'",
    ("run", "-m"): "no such script: '-m'",
    ("run", "--num_processes", "2", "missing.py"): "no such script: 'missing.py'",
    ("run", "--accelerate_config", "zero9", "x.py"): "Accelerate config zero9 is neither a file nor a valid",
    ("run", "--num_procesess", "2", "x.py"): "unrecognized arguments: --num_procesess. Did you mean --num_processes?",
    ("run", "--num_processes", "two", "x.py"): "invalid int value: 'two'.",
    ("run", "--set"): "--set needs NAME=VALUE.",
    ("run", "--set", "loss_tpye=gspo", "tests/tools/scripts.py"): "an option 'loss_tpye'. Did you mean loss_type?",
    ("run", "--num_processes", "2", "--set", "top_k=few", "x.py"): "--set top_k=few: invalid int value: 'few'",
    ("grpo", "--loss_tpye", "gspo"): "unrecognized arguments: --loss_tpye. Did you mean --loss_type?",
    ("grpo", "--beta", "abc"): "argument --beta: invalid float value: 'abc'.",
    ("rloo", "--loss_type", "gspo"): "unrecognized arguments: --loss_type.",
}


@pytest.mark.parametrize(("command", "said"), REFUSED.items(), ids=[" ".join(command) for command in REFUSED])
def test_what_cannot_be_run_is_said_in_one_line(
    command: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Launched(monkeypatch)
    monkeypatch.chdir(ROOT)
    assert cli.main(command) == 2
    err = capsys.readouterr().err.splitlines()
    lines = err if "zero9" in command else err[-1:]  # TRL lists its own files in more lines
    assert lines[0].startswith("trl-steady: ") and said in lines[0]
    assert len([line for line in err if "--" in line or "usage" in line]) <= len(lines)


def test_an_option_misspelt_in_a_yaml_is_refused_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Launched(monkeypatch)
    config.write_text(config.read_text() + "loss_tpye: gspo\n")
    assert cli.main(["grpo", "--config", str(config)]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "trl-steady: unrecognized arguments: --loss_tpye. Did you mean --loss_type?"
    assert "usage" not in err


def test_help_has_every_command_and_trls_command_our_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["run", "-h"], ["env", "--help"]):
        assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in ("run", "grpo", "rloo", "methods", "env"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["grpo", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: trl-steady grpo ") and "--router_replay" in out and "--reward_funcs" in out


def test_trls_rloo_command_runs_its_script_with_ours(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `grpo` does: TRL's own script, our trainer, our options from YAML and command line."""
    own = {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 2, "num_machines": 1}
    config.write_text(config.read_text() + yaml.safe_dump(own))
    launched = Launched(monkeypatch)
    command = ["--config", str(config), "--share_prompts", "true", "--num_processes", "3"]
    assert cli.main(["rloo", *command]) == 0
    args = launched.args
    assert (args.num_processes, args.num_machines, args.training_script) == (3, 1, "trl_steady")
    assert args.training_script_args == ["run", str(SCRIPT.with_name("rloo.py")), *command[:4]]
    capsys.readouterr()
    assert cli.main(args.training_script_args) == 0
    out = capsys.readouterr().out
    assert "trl_steady.trainers.rloo.RLOOTrainer\n  on: iterative GRPO: a reference that moves" in out
    assert "on: a group's prompt computed once: share_prompts=True" in out and "'ref/refreshes'" in out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["rloo", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: trl-steady rloo ") and "--router_replay" in out and "--loss_type" not in out


def test_the_ppo_command_runs_trls_grpo_script_with_ppo(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"num_generations": 1, "value_warmup_steps": 1, "num_machines": 1}
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **own}))
    launched = Launched(monkeypatch)
    command = ["--config", str(config), "--kl_coef", "0.1", "--num_processes", "3"]
    assert cli.main(["ppo", *command]) == 0
    args = launched.args
    assert (args.num_processes, args.num_machines, args.training_script) == (3, 1, "trl_steady")
    assert args.training_script_args == ["run", "--ppo", str(SCRIPT), *command[:4]]
    capsys.readouterr()
    assert cli.main(args.training_script_args) == 0
    out = capsys.readouterr().out
    assert "trl_steady.trainers.ppo.PPOTrainer" in out and "'value/loss'" in out
    assert "on: KL to the reference in the reward: kl_coef=0.1" in out
    assert "on: first steps for the critic alone: value_warmup_steps=1" in out
