"""The symptoms of a run: `symptoms.toml` has their texts and limits, and `signs.py` finds them in the log."""

import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_steady.report import signs
from trl_steady.report.history import History


class Symptom(NamedTuple):
    """Something that can be wrong with a run."""

    name: str
    level: Literal["warning", "critical"]
    what: str
    """A short clause: what is wrong."""
    advice: str
    """A sentence that names the option to set."""
    page: str
    """Page and section below docs/, such as "troubleshooting.md#everything-is-clipped"."""
    find: Callable[[History], signs.Found | None]
    """Returns the signs in a log. Raises KeyError if the log lacks a metric or a setting that they need."""


class Finding(NamedTuple):
    """A symptom that a run shows."""

    symptom: Symptom
    since: int
    """The optimizer step at which it began."""
    metric: str
    """The metric that shows it, or "" for a setting or a warning."""
    evidence: str
    """The numbers that show it."""

    def __str__(self) -> str:
        symptom = self.symptom
        return f"{symptom.level}: {symptom.what} (since step {self.since}: {self.evidence}). {symptom.advice}"


def _symptom(name: str, level: Any, what: str, advice: str, page: str, **sign: dict[str, Any]) -> Symptom:
    """Return a symptom of symptoms.toml. Without a sign there, its function has the name of the symptom."""
    [(function, arguments)] = sign.items() or {name.replace("-", "_"): {}}.items()
    return Symptom(name, level, what, advice, page, partial(getattr(signs, function), **arguments))


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SYMPTOMS: tuple[Symptom, ...] = tuple(_symptom(name, **table) for name, table in _TABLES.items())


def diagnose(history: History) -> tuple[list[Finding], dict[str, str]]:
    """Return what a run shows, the worst and earliest first, and name -> the metric that its log lacks to show it."""
    findings: list[Finding] = []
    missing: dict[str, str] = {}
    for symptom in SYMPTOMS:
        try:
            found = symptom.find(history)
        except KeyError as error:
            missing[symptom.name] = error.args[0]
            continue
        if found is not None:
            evidence = f"{found.metric} {found.evidence}".strip()
            findings.append(Finding(symptom, found.since, found.metric, evidence))
    findings.sort(key=lambda finding: (finding.symptom.level != "critical", finding.since))
    return findings, missing


def verdict(findings: Sequence[Finding], missing: dict[str, str]) -> str:
    """Return what a run shows: a line for each symptom, and which symptoms its log cannot show."""
    lines = [f"symptoms: {len(findings)}", *(f"  {finding}" for finding in findings)]
    return "\n".join([*lines, *([f"  not in the log: {', '.join(missing)}"] if missing else [])])
