"""What `trl-steady env` and `trl-steady methods` say."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import trl
import yaml

import trl_steady
from tests.tools import tiny
from trl_steady.cli import main as cli
from trl_steady.config.methods import METHODS
from trl_steady.losses import LOSSES
from trl_steady.trl_bridge.overrides import ACTS_IN

ROOT = Path(__file__).parents[2]
SOURCE = Path(trl_steady.__file__).parent


def test_the_report_has_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("trl", "transformers", "peft", "bitsandbytes"):
        assert re.search(rf"(?im)^- {name} version: {re.escape(importlib.metadata.version(name))}$", out), name
    assert f"\n- trl-steady version: {trl_steady.__version__}\n" in out


@pytest.fixture
def without_trl(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs `trl-steady` with NumPy and PyYAML alone, and returns its output."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "trl_steady").symlink_to(Path(trl_steady.__file__).parent)
    for module in (numpy, yaml):
        folder = Path(module.__file__ or "").parent
        (packages / folder.name).symlink_to(folder)
    libraries = Path(numpy.__file__).parents[1] / "numpy.libs"
    (packages / "numpy.libs").symlink_to(libraries)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-S", "-m", "trl_steady", *arguments]  # -S: without site-packages
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    return run


def test_versions_and_the_report_need_no_trl(without_trl: Callable[..., str], tmp_path: Path) -> None:
    assert without_trl("--version") == f"trl-steady {trl_steady.__version__}, TRL is not installed\n"
    skill = tmp_path / "packages" / "trl_steady" / cli.SKILL.relative_to(SOURCE)
    assert without_trl("env").splitlines() == [
        "- trl is not installed. The report works without it, and the formulas with torch alone",
        f"- trl-steady version: {trl_steady.__version__}",
        f"- trl-steady skill for coding agents: {skill}",
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {step}, "reward": 0.5, "reward_std": 0}}\n' for step in range(1, 31)))
    (diagnosis,) = json.loads(without_trl("report", "--json", str(log))).values()
    assert [finding["name"] for finding in diagnosis["findings"]] == ["reward-constant"]


def test_the_table_has_every_method_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    found, head = list[tuple[str, str, str]](), ""
    for line in lines:
        head = head if line.startswith(" ") else line
        found += [(head, line, after) for after in lines[lines.index(line) + 1 :][:1] if line[:3].count(" ") == 2]
    assert len(found) == len(METHODS)
    for (head, line, setting), method in zip(found, METHODS, strict=True):
        assert head == f"{method.kind}: docs/{method.page}" and (ROOT / "docs" / method.page).is_file()
        assert line == f"  {method.name}" + (f" (arXiv {method.paper})" if method.paper else "")
        assert setting == f"      {method.setting}"


def test_every_option_of_ours_belongs_to_a_method() -> None:
    theirs = {field.name for field in fields(trl.GRPOConfig)}
    ours = {field.name for field in fields(trl_steady.PPOConfig)} - theirs - {"training_report", "log_line"}
    ours -= {"dppo_divergence", "m2po_budget"}  # of a loss
    named = {name for method in METHODS for name in method.options}
    assert ours <= named <= theirs | ours
    losses = {loss_type: loss.name for loss_type, loss in LOSSES.items() if loss.is_ours}
    settings = {method.setting: method.name for method in METHODS if method.kind == "loss"}
    assert settings == {f'loss_type="{loss_type}"': name for loss_type, name in losses.items()}


MOVING, R2 = "iterative GRPO: a reference that moves", "R2: routes of"
UNPADDED = "padding-free passes (the default)"


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ({}, []),
        ({"loss_type": "gspo"}, ["GSPO"]),
        ({"beta": 0.1}, []),  # TRL's own
        ({"beta": 0.1, "loss_type": "gspo"}, ["GSPO", "per-token ratio"]),
        ({"beta": 0.1, "loss_type": "gspo", "use_bias_correction_kl": False}, ["GSPO"]),
        ({"beta": 0.1, "kl_ratio_denominator": "sampler"}, ["ratio to the engine's log-probs"]),
        ({"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False}, ["estimators other than k3"]),
        ({"off_policy_mask_threshold": 0.0}, ["off-policy mask"]),
        ({"geometric_mask_range": [0.9, 1.1]}, ["geometric mask, trainer against engine"]),
        ({"token_veto_threshold": 0.1}, ["veto of outlier tokens, trainer against engine"]),
        ({"step_advantage": "process"}, ["step rewards"]),
        ({"sync_ref_model": True, "beta": 0.1}, [MOVING]),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_kl": 0.1}, [MOVING, "a reference that moves when"]),
        ({"router_replay": "R3"}, ["R3: routes of"]),
        ({"router_replay": "R2", "router_replay_reference": True, "beta": 0.1}, [R2, "routes in the reference's"]),
        ({"keep_sampling_mask": True, "top_p": 0.9}, ["kept sampling mask"]),
        ({"trim_padding": True, "share_prompts": True}, [UNPADDED, "a group's prompt computed once"]),
        ({"vllm_engine_kwargs": {"enforce_eager": True}}, ["arguments of a colocated vLLM"]),
        ({"dynamic_sampling": True, "dynamic_sampling_max_rounds": 4}, ["dynamic sampling"]),
        (
            {"async_generate": True, "use_vllm": True, "vllm_mode": "server", "engine_check": None},
            ["the next rollout generated while"],
        ),
        ({"skip_nonfinite_steps": 5}, ["steps whose gradient is not finite"]),
        ({"adapter_dtype": "float32"}, ["float32 adapters on a quantised base"]),
    ],
    ids=str,
)
def test_a_method_is_on_where_its_option_is(options: dict[str, Any], on: list[str], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **{"trim_padding": False, **options})
    off = {"skips_old_pass": False, "judges_groups": False, "reward_model": None, "retrains_reward_model": False}
    trainer = SimpleNamespace(args=args, **off)
    found = sorted(method.name for method in METHODS if method.is_on(trainer))
    assert len(found) == len(on) and all(map(str.startswith, found, sorted(on)))


def test_methods_that_only_a_trainer_knows_are_on_where_it_has_them(tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.RLOOConfig, tmp_path, trim_padding=False)
    on = {"skips_old_pass": True, "judges_groups": True, "reward_model": object(), "retrains_reward_model": True}
    trainer = SimpleNamespace(args=args, **on)
    found = [method.name for method in METHODS if method.is_on(trainer)]
    models = ["reward model on the policy's base", "reward model retrained before the reference moves"]
    assert found == ["completions of a prompt judged together", *models, "no pass of the old policy"]


def test_methods_act_where_overrides_are_looked_for() -> None:
    others = {"advantages", "data", "evaluation data", "order", "policy loss"}
    assert {place for method in METHODS for place in method.acts_in} == ACTS_IN.keys() - others
