"""The diagnosis of a run: which symptoms its log shows, since when, and what to do."""

from collections.abc import Sequence
from typing import NamedTuple

from trl_steady.report.history import History
from trl_steady.report.symptoms import SYMPTOMS, Symptom


class Finding(NamedTuple):
    """A symptom that a run shows."""

    symptom: Symptom
    confidence: float
    """Between 0 and 1."""
    since: int
    """The optimizer step at which it began."""
    evidence: str
    """The numbers that show it."""

    def __str__(self) -> str:
        symptom = self.symptom
        return f"{symptom.level}: {symptom.what} (since step {self.since}: {self.evidence}). {symptom.advice}"


class Skipped(NamedTuple):
    """A symptom that the log cannot show, because it lacks these metrics and settings."""

    symptom: Symptom
    missing: tuple[str, ...]


def diagnose(history: History) -> tuple[list[Finding], list[Skipped]]:
    """Return what a run shows, the worst and surest first, and which symptoms its log cannot show."""
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    for symptom in SYMPTOMS:
        if missing := symptom.missing(history):
            skipped.append(Skipped(symptom, missing))
        elif (found := symptom.find(history)) is not None:
            findings.append(Finding(symptom, *found))
    findings.sort(key=lambda finding: (finding.symptom.level != "critical", -finding.confidence))
    return findings, skipped


def verdict(findings: Sequence[Finding], skipped: Sequence[Skipped]) -> str:
    """Return what a run shows: a line for each symptom, and which symptoms its log cannot show."""
    lines = [f"symptoms: {len(findings)}", *(f"  {finding}" for finding in findings)]
    if skipped:
        lines.append(f"  not in the log: {', '.join(each.symptom.name for each in skipped)}")
    return "\n".join(lines)
