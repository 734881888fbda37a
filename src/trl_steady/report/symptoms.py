"""The symptoms of a run: `symptoms.toml` has their texts and limits, and `signs` finds them in the log."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_steady.report import signs
from trl_steady.report.frameworks import blind, can_log, in_words_of, of_title
from trl_steady.report.history import History


class Symptom(NamedTuple):
    """Something that can be wrong with a run."""

    name: str
    level: Literal["note", "warning", "critical"]
    what: str
    """A short clause: what is wrong."""
    advice: Sequence[str | Sequence[str]]
    """Sentences that name the option to set. Behind one can be settings, or facts of the log, with which it is left
    out: "name" if that is on, "not name" if it is off, "name=value" if it has the value."""
    page: str
    """Page and section below docs/, such as "troubleshooting.md#everything-is-clipped"."""
    explains: Sequence[str]
    """Names of symptoms that follow from this one. Of two that name each other, the earlier is the cause."""
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
        what = f"{self.symptom.what} ({since}{self.evidence})"
        if self.passed is not None:
            return f"passed at step {self.passed}: {what}"
        if self.cause:
            return f"so also: {what}"
        return f"{self.symptom.level}: {what}. {self.advice}"


class Findings(list[Finding]):
    """The findings of a run, and the words that say for what its log was searched."""

    def __init__(self, findings: Sequence[Finding], looked_for: str, other_task: str) -> None:
        super().__init__(findings)
        self.looked_for = looked_for
        """Words behind the number of symptoms: for how many the log has what they need, and what it lacks."""
        self.other_task = other_task
        """Which log this is, if it is none of GRPO, RLOO or PPO."""


_TEXTS = ("level", "what", "advice", "page", "explains", "hides")


def _symptom(name: str, table: Mapping[str, Any]) -> Symptom:
    """Return a symptom of symptoms.toml. Without a sign there, its function has the name of the symptom."""
    sign: dict[str, dict[str, Any]] = {key: value for key, value in table.items() if key not in _TEXTS}
    if not sign:
        sign = {name.replace("-", "_"): {}}
    [(function, arguments)] = sign.items()
    texts: dict[str, Any] = {key: table.get(key, ()) for key in _TEXTS}
    return Symptom(name=name, find=partial(signs.function(function), **arguments), **texts)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SYMPTOMS: tuple[Symptom, ...] = tuple(_symptom(name, table) for name, table in _TABLES.items())


def _advice(symptom: Symptom, settings: Mapping[str, Any], framework: str) -> str:
    """Return the sentences of the advice that make sense with these settings, in the words of a framework."""
    conditions: set[str] = set()
    for name, value in settings.items():
        conditions.add(f"{name}={value}")
        conditions.add(name if value else f"not {name}")
    sentences: list[str] = []
    for entry in symptom.advice:
        if isinstance(entry, str):
            sentences.append(entry)
        elif conditions.isdisjoint(entry[1:]):
            sentences.append(entry[0])
    return in_words_of(framework, " ".join(sentences)) or f"docs/{symptom.page} has the causes."


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
            evidence = f"{found.metric} {found.evidence}".strip()
            advice = _advice(symptom, {**history.settings, **found.facts}, history.framework)
            findings[symptom.name] = Finding(symptom, found.since, found.metric, evidence, advice)
    for finding in list(findings.values()):
        for name in finding.symptom.hides:
            findings.pop(name, None)
    for name, cause in _causes(findings, history.last_step).items():
        findings[name] = findings[name]._replace(cause=cause)
    return findings, missing


_EARLIER = 0.05
"""Share of the run by which one symptom must come before another to be its cause. It is known about as well."""


def _causes(findings: Mapping[str, Finding], last_step: int) -> dict[str, str]:
    """Return name -> the name of the first cause, of the symptoms that follow from another."""
    direct: dict[str, str] = {}
    for name, finding in findings.items():
        for effect in finding.symptom.explains:
            if effect not in findings or effect in direct or effect in _chain(direct, name):
                continue
            explained = findings[effect]
            is_mutual = name in explained.symptom.explains
            if is_mutual and explained.since < finding.since - _EARLIER * last_step:
                continue
            direct[effect] = name
    return {name: _chain(direct, name)[-1] for name in direct}


def _chain(direct: Mapping[str, str], name: str) -> list[str]:
    """Return a symptom, its cause, the cause of that, and so on."""
    chain = [name]
    while chain[-1] in direct:
        chain.append(direct[chain[-1]])
    return chain


def diagnose(history: History) -> tuple[list[Finding], dict[str, str]]:
    """Return what a run shows, and name -> the metric that its log lacks to show it.

    The worst and earliest symptom comes first, each with those that follow from it. At the end come those that a look
    at the log would have found while the run trained, and that have passed.
    """
    findings, missing = look(history)
    told = {*findings}
    for finding in findings.values():
        told.update(finding.symptom.explains)
        told.update(finding.symptom.hides)
    passed: dict[str, Finding] = {}
    step = 1
    while step < history.last_step:  # more rarely as the run gets longer, as a report looks while it trains
        following = step + 1 + step // 20
        early, _ = look(history.until(step))
        for name, finding in early.items():
            if name not in told and finding.symptom.level != "note":
                passed[name] = finding._replace(passed=min(following, history.last_step), cause="")
        step = following
    ranked = sorted(findings.values(), key=_rank)
    ordered: list[Finding] = []
    for head in ranked:
        if head.cause:
            continue
        ordered.append(head)
        ordered += [effect for effect in ranked if effect.cause == head.symptom.name]
    ordered += sorted(passed.values(), key=_rank)
    return Findings(ordered, _looked_for(history, missing), history.other_task), missing


def _rank(finding: Finding) -> tuple[int, int]:
    return ("critical", "warning", "note").index(finding.symptom.level), finding.since


def _looked_for(history: History, missing: Mapping[str, str]) -> str:
    """Return for how many symptoms the log has what they need, of those that a plain run of its framework could show.

    Areas that the log does not show follow, with the option for each.
    """
    framework = of_title(history.framework)
    looked = 0
    lacking = 0
    for symptom in SYMPTOMS:
        if symptom.level == "note":
            continue
        if symptom.name not in missing:
            looked += 1
        elif can_log(missing[symptom.name], framework):
            lacking += 1
    text = f" (of {looked + lacking} symptoms, this log can show {looked})"
    areas = blind(history.keys, framework)
    if areas:
        text = f"{text}; not in this log: {', '.join(areas)}"
    return text


def verdict(findings: Sequence[Finding]) -> str:
    """Return what a run shows, with a line for each symptom. Findings of `diagnose` also say what was looked for."""
    heads = 0
    notes: list[str] = []
    lines: list[str] = []
    for finding in findings:
        if finding.symptom.level == "note":
            notes.append(f"{finding.evidence}: {finding.symptom.what}")
            continue
        if finding.cause:
            lines.append(f"    {finding}")
            continue
        lines.append(f"  {finding}")
        if finding.passed is None:
            heads += 1
    first = f"symptoms: {heads}"
    other = ""
    if isinstance(findings, Findings):
        first += findings.looked_for
        other = findings.other_task
    if notes and not heads:
        first = notes[0]
    if other and not heads:
        first = other
    return "\n".join([first, *lines])
