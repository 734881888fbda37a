"""The symptoms of a run: `symptoms.toml` has their texts and limits, and `signs.py` finds them in the log."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_steady.report import signs
from trl_steady.report.history import History


class Symptom(NamedTuple):
    """Something that can be wrong with a run."""

    name: str
    level: Literal["note", "warning", "critical"]
    what: str
    """A short clause: what is wrong."""
    advice: Sequence[str | Sequence[str]]
    """Sentences that name the option to set. Behind one can be settings with which it is left out: "name" if that is
    on, "not name" if it is off, "name=value" if it has the value."""
    page: str
    """Page and section below docs/, such as "troubleshooting.md#everything-is-clipped"."""
    explains: Sequence[str]
    """Names of symptoms that follow from this one."""
    hides: Sequence[str]
    """Names of symptoms that cannot be told beside this one."""
    find: Callable[[History], signs.Found | None]
    """Returns the signs in a log. Raises KeyError if the log lacks a metric or a setting that they need."""


class Finding(NamedTuple):
    """A symptom that a run shows. `since` and `metric` are those of `signs.Found`."""

    symptom: Symptom
    since: int
    metric: str
    evidence: str
    """The metric and the numbers that show it."""
    advice: str
    """Sentences that name the options to set, for the settings of the run."""
    cause: str = ""
    """The name of the symptom from which it follows."""
    passed: int | None = None
    """The optimizer step at which a look at the log no longer found it."""

    def __str__(self) -> str:
        since = f"since step {self.since}: " if self.since else ""
        said = f"{self.symptom.what} ({since}{self.evidence})"
        if self.passed is not None:
            return f"passed at step {self.passed}: {said}"
        return f"so also: {said}" if self.cause else f"{self.symptom.level}: {said}. {self.advice}"


_TEXTS = ("level", "what", "advice", "page", "explains", "hides")


def _symptom(name: str, table: dict[str, Any]) -> Symptom:
    """Return a symptom of symptoms.toml. Without a sign there, its function has the name of the symptom."""
    sign = {key: value for key, value in table.items() if key not in _TEXTS} or {name.replace("-", "_"): {}}
    [(function, arguments)] = sign.items()
    texts: dict[str, Any] = {key: table.get(key, ()) for key in _TEXTS}
    return Symptom(name=name, find=partial(getattr(signs, function), **arguments), **texts)


SYMPTOMS: tuple[Symptom, ...] = tuple(
    _symptom(*each) for each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
)


def _advice(symptom: Symptom, settings: Mapping[str, Any]) -> str:
    """Return the sentences of the advice that make sense with these settings."""
    known = {f"{name}={value}" for name, value in settings.items()}
    known |= {name if value else f"not {name}" for name, value in settings.items()}
    sentences = ([each] if isinstance(each, str) else each for each in symptom.advice)
    return " ".join(sentence for sentence, *conditions in sentences if not known & {*conditions})


def look(history: History) -> tuple[dict[str, Finding], dict[str, str]]:
    """Return name -> what a run shows now, and name -> the metric that its log lacks to show it."""
    findings: dict[str, Finding] = {}
    missing: dict[str, str] = {}
    for symptom in SYMPTOMS:
        try:
            found = symptom.find(history)
        except KeyError as error:
            missing[symptom.name] = error.args[0]
            continue
        if found is not None:
            evidence, advice = f"{found.metric} {found.evidence}".strip(), _advice(symptom, history.settings)
            findings[symptom.name] = Finding(symptom, found.since, found.metric, evidence, advice)
    hidden = {name for finding in findings.values() for name in finding.symptom.hides}
    findings = {name: finding for name, finding in findings.items() if name not in hidden}
    for name, finding in findings.items():
        if not finding.cause:
            for effect in {*finding.symptom.explains} & findings.keys() - {name}:
                findings[effect] = findings[effect]._replace(cause=name)
    return findings, missing


def diagnose(history: History) -> tuple[list[Finding], dict[str, str]]:
    """Return what a run shows, and name -> the metric that its log lacks to show it.

    The worst and earliest symptom comes first, each with those that follow from it. At the end come those that a look
    at the log would have found while the run trained, and that have passed.
    """
    findings, missing = look(history)
    passed: dict[str, Finding] = {}
    explained = {name for each in findings.values() for name in (*each.symptom.explains, *each.symptom.hides)}
    step = 1
    while step < history.last_step:  # as features/training_report.py looks
        following = step + 1 + step // 20
        found = look(history.until(step))[0]
        for name in found.keys() - findings.keys() - explained:
            passed[name] = found[name]._replace(passed=min(following, history.last_step), cause="")
        step = following
    ranked = sorted(findings.values(), key=_rank)
    heads = [each for each in ranked if not each.cause]
    said = [each for head in heads for each in (head, *(one for one in ranked if one.cause == head.symptom.name))]
    return [*said, *sorted(passed.values(), key=_rank)], missing


def _rank(finding: Finding) -> tuple[int, int]:
    return ("critical", "warning", "note").index(finding.symptom.level), finding.since


def verdict(findings: Sequence[Finding]) -> str:
    """Return what a run shows, with a line for each symptom."""
    said = [each for each in findings if each.symptom.level != "note"]
    count = sum(not each.cause and each.passed is None for each in said)
    notes = [f"{each.evidence}: {each.symptom.what}" for each in findings if each.symptom.level == "note"]
    first = notes[0] if notes and not count else f"symptoms: {count}"
    return "\n".join([first, *(f"{'    ' if each.cause else '  '}{each}" for each in said)])
