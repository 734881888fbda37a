"""The number formats that a real engine and a real server say, beside those of the trainer."""

import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tiny
from tests.vllm.test_server import served
from tests.vllm.tools import Colocated, needs_vllm, serving
from trl_steady.report import History, diagnose

pytestmark = needs_vllm


def told(trainer: Any, capfd: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Train, and return the printed lines and the warnings about number formats."""
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.train(trainer)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("trl-steady: engine")]
    return lines, [str(each.message) for each in caught if "the engine computes in" in str(each.message)]


@pytest.mark.parametrize(
    ("dtype", "options", "line", "is_told"),
    [
        ("bfloat16", {}, "engine bfloat16, trainer float32 (weights float32, no autocast)", True),
        ("float32", {}, "engine float32, trainer float32 (weights float32, no autocast)", False),
        ("bfloat16", {"bf16": True}, "engine bfloat16, trainer bfloat16 (weights float32, autocast bfloat16)", False),
    ],
    ids=["differ", "float32", "bfloat16"],
)
def test_a_colocated_engine(
    folder: Path,
    tmp_path: Path,
    colocated: Colocated,
    capfd: pytest.CaptureFixture[str],
    dtype: str,
    options: dict[str, Any],
    line: str,
    is_told: bool,
) -> None:
    """The report of the run names both, with the KL that was measured."""
    saves = {"save_strategy": "steps", "save_steps": 4}
    trainer = colocated(folder, tmp_path, dtype=dtype, router_replay=None, max_steps=4, **saves, **options)
    lines, caught = told(trainer, capfd)
    assert lines == [f"trl-steady: {line}"] and len(caught) == is_told
    found = {each.symptom.name: each for each in diagnose(History.read(tmp_path))[0]}
    assert ("formats-differ" in found) == is_told
    if is_told:
        assert caught[0].endswith('Set vllm_engine_kwargs={"dtype": "float32"}.')
        kl = statistics.median(row["mismatch/kl"] for row in trainer.state.log_history if "mismatch/kl" in row)
        assert 1e-4 < kl < 1e-2  # of rounding to bfloat16
        assert f"trainer float32, mismatch/kl {kl:.2g} " in found["formats-differ"].evidence


def test_a_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is in float32: a trainer in bfloat16 is told, and one in float32 is not."""
    for url in serving(folder, tmp_path, ["--logprobs-mode", "processed_logprobs"]):
        for of_weights in ("float32", "bfloat16"):
            options = {"model_init_kwargs": {"dtype": of_weights}, "max_steps": 1}
            trainer, _ = served(folder, tmp_path / of_weights, url, monkeypatch, router_replay=None, **options)
            lines, caught = told(trainer, capfd)
            about = f"weights {of_weights}, no autocast"
            assert lines == [f"trl-steady: engine float32, trainer {of_weights} ({about})"]
            assert [each[-36:] for each in caught] == ["Set --dtype bfloat16 for the server."] * (
                of_weights == "bfloat16"
            )
