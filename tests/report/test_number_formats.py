"""Number formats of engine and trainer in a report: they are the first explanation of a `mismatch/kl`."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import healthy, history
from trl_steady.report import History, diagnose
from trl_steady.report.page import write
from trl_steady.report.symptoms import look, verdict

TWO = {"engine": "bfloat16", "trainer": "float32", "about": "weights float32, no autocast"}
LINE = "trl-steady: engine {engine}, trainer {trainer} ({about})"
FP16 = 'fp16=True with vllm_engine_kwargs={"dtype": "float16"}'


def of(formats: dict[str, Any], kl: float | None = None, **settings: Any) -> History:
    """Return a run with these formats, whose engine differs by a KL in each log."""
    rows = healthy(0)
    for row in rows:
        if kl is not None:
            row |= {"mismatch/kl": kl, "mismatch/effective_sample_size": 0.5}
    return history(rows, formats=formats, settings={"top_p": 1.0, **settings})


def test_two_formats_are_named_with_the_kl_that_they_explain() -> None:
    (found,) = diagnose(of(TWO))[0]
    assert found.symptom.name == "formats-differ" and found.symptom.level == "warning"
    assert found.evidence == "engine bfloat16, trainer float32, mismatch/kl 0.0015 nats per token"
    assert "Set fp16=True" in found.advice and "another cause" not in found.advice
    assert "too: by dtype" not in found.advice
    (half,) = diagnose(of({**TWO, "trainer": "float16"}, fp16=True))[0]
    assert half.advice == "Set the engine to float16 too: by dtype in vllm_engine_kwargs, or --dtype of a server."


def test_a_larger_kl_follows_from_two_formats_and_no_mask_is_advised_before_they_are_one() -> None:
    findings = diagnose(of(TWO, 0.3))[0]
    assert [(each.symptom.name, each.cause) for each in findings] == [
        ("formats-differ", ""),
        ("engine-differs", "formats-differ"),
    ]
    assert "look for another cause too" in findings[0].advice  # they give a hundredth of it
    assert "vllm_importance_sampling_mode" not in verdict(findings)


@pytest.mark.parametrize(
    ("formats", "one", "fp16"),
    [
        ({}, True, False),
        ({"engine": None, "trainer": "bfloat16", "about": ""}, True, False),
        ({"engine": "bfloat16", "trainer": "bfloat16", "about": ""}, False, True),
        ({"engine": "float32", "trainer": "float32", "about": ""}, False, False),
        ({"engine": "float16", "trainer": "float16", "about": ""}, False, False),
    ],
)
def test_an_engine_that_differs_gets_advice_on_formats_before_a_correction(
    formats: dict[str, Any], one: bool, fp16: bool
) -> None:
    found = look(of(formats, 0.3))[0]
    assert "formats-differ" not in found
    advice = found["engine-differs"].advice
    assert ("Run engine and trainer in one number format." in advice) == one and (FP16 in advice) == fp16
    assert advice.endswith('For long answers, set vllm_importance_sampling_mode="token_truncate".')


def test_without_formats_nothing_is_said_of_them() -> None:
    for formats in ({}, {"engine": None, "trainer": "float32", "about": ""}):
        findings, missing = diagnose(of(formats))
        assert not findings and missing["formats-differ"] == "number formats of engine and trainer"


@pytest.mark.parametrize("start", ["", "[2026-01-01 12:00:00] trl-steady 1.0\n"], ids=["text", "bracket"])
@pytest.mark.parametrize("engine", ["bfloat16", "unknown"])
def test_the_output_of_a_run_has_them_too(tmp_path: Path, start: str, engine: str) -> None:
    line = LINE.format(**{**TWO, "engine": engine})
    logs = [f"{{'loss': 0.1, 'reward': {0.3 + 0.01 * step}, 'reward_std': 0.3}}" for step in range(12)]
    file = tmp_path / "train.log"
    file.write_text("\n".join([f"{start}Loading the model", line, *logs]))
    read = History.read(file)
    assert read.last_step == 12
    assert read.run["formats"] == {**TWO, "engine": None if engine == "unknown" else engine}
    assert ("formats-differ" in look(read)[0]) == (engine == "bfloat16")
    assert "formats" not in History.read(_without(file, line)).run


def _without(file: Path, line: str) -> Path:
    other = file.with_name("other.log")
    other.write_text(file.read_text().replace(line, ""))
    return other


def test_the_page_has_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "report.html", "run", of(TWO))
    page = (tmp_path / "report.html").read_text()
    assert "Engine bfloat16, trainer float32 (weights float32, no autocast)" in page
