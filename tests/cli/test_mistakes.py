"""Mistakes in a command line, which are told without torch and TRL, and what looks like one and is none."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from accelerate.commands.launch import launch_command_parser
from trl.scripts import grpo, rloo

from trl_steady.cli import mistakes
from trl_steady.cli.mistakes import wrong_options
from trl_steady.cli.run import swapped

# command -> what it says
TOLD = {
    "grpo --config missing.yaml": "--config missing.yaml: [Errno 2] No such file or directory",
    "grpo --config badkey.yaml": "los_type in badkey.yaml: did you mean loss_type?",
    "rloo --config broken.yaml": "--config broken.yaml: while parsing",
    "grpo --config empty.yaml": "--config empty.yaml: 'NoneType' object is not a mapping",
    "grpo --config list.yaml": "--config list.yaml: 'list' object is not a mapping",
    "grpo --los_type=gspo": "--los_type=gspo: did you mean loss_type?",
    "ppo --kl_cof 0.1": "--kl_cof: did you mean kl_coef?",
    "grpo --num-procesess 2": "--num-procesess: did you mean num_processes?",
    "grpo --xyzzy 1": "--xyzzy: there is no such option.",
    "grpo --dataset_name ./dta": "--dataset_name ./dta: there is no such file or folder.",
    "rloo --dataset_name=my/own/data": "--dataset_name my/own/data: there is no such file or folder.",
    "ppo --config paths.yaml": "--model_name_or_path /nowhere: there is no such file or folder.",
    "run missing.py": "there is no script missing.py.",
    "run --num_processes 2 missing.py --lr 1": "there is no script missing.py.",
    "run --set los_type=gspo train.py": "--los_type=gspo: did you mean loss_type?",
}


def test_mistakes_are_told_before_torch_or_trl_are_imported(tmp_path: Path) -> None:
    files = {
        "badkey.yaml": "los_type: gspo\nlearning_rate: 1e-6\n",
        "broken.yaml": "loss_type: [gspo\n",
        "empty.yaml": "",
        "paths.yaml": "model_name_or_path: /nowhere\n",
        "list.yaml": "- loss_type: gspo\n",
        "train.py": "raise SystemExit('has run')\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code = f"""
import sys
from trl_steady.cli.main import main
for command in {list(TOLD)!r}:
    assert main(command.split()) == 2
assert not {{"torch", "trl", "transformers", "accelerate"}} & sys.modules.keys()
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if line.startswith("trl-steady: ")]
    assert len(said) == len(TOLD)
    for line, expected in zip(said, TOLD.values(), strict=True):
        assert line.startswith(f"trl-steady: {expected}")


def names(parser: Any) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


@pytest.mark.parametrize("command", ["grpo", "rloo", "ppo"])
def test_every_option_of_the_parsers_is_known(command: str) -> None:
    """Also in a file, where it has no dashes."""
    with swapped(ppo=command == "ppo"):
        parser = (rloo if command == "rloo" else grpo).make_parser()
    given = [*names(parser), *names(cast(Any, launch_command_parser())), "--accelerate_config"]
    assert len(given) > 300 and [*wrong_options(given)] == []


def test_other_ways_to_write_an_option_are_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("env: {A: 1}\nnum_machines: 1\ndatasets: [{path: a}]\nloss_type: gspo\n")
    written = "--config {} --loss_type=gspo --learning-rate 1e-6 --per_device_train_batch 4 --no_bf16 -m --help"
    written += " --ppo --set beta=0 --dataset_name trl-lib/DeepMath-103K --model_name_or_path gpt2"
    written += " --dataset_name hf://datasets/trl-lib/DeepMath-103K"
    assert [*wrong_options(written.format(path).split())] == []


@pytest.mark.parametrize("package", ["trl", "transformers", "accelerate"])
def test_a_version_with_its_options_in_other_files_is_left_alone(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*wrong_options(["--loss_typo", "1"])]
    monkeypatch.setitem(mistakes._SOURCES, package, "moved/*.py")  # pyright: ignore[reportPrivateUsage]
    assert [*wrong_options(["--loss_typo", "1", "--beta", "0"])] == []
