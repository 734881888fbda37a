"""The page of a report: one HTML file that needs no network."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import metadata
from pathlib import Path
from string import Template
from typing import Any

from trl_steady.report.compare import Comparison, by_name, compared, interval
from trl_steady.report.history import History, counted
from trl_steady.report.plots import MOST_FUNCTIONS, clean, pictures, reward_functions
from trl_steady.report.symptoms import Finding, diagnose

_PAGE = Template((Path(__file__).with_suffix(".html")).read_text())
_Html = str


def write(file: Path, name: str, history: History) -> None:
    """Write the report of a run. It replaces `file` at once."""
    findings, missing = diagnose(history)
    about = counted(history.last_step, "optimizer step")
    versions = [f"{package} {number}" for package, number in history.run.get("versions", {}).items()]
    if versions:
        about = f"{about}. {', '.join(versions)}"
    formats = history.run.get("formats")
    if formats:
        engine = formats.get("engine") or "of unknown dtype"
        about = f"{about}. Engine {engine}, trainer {formats.get('trainer')} ({formats.get('about')})"
    missing_title = f"Not looked for, because the log lacks a metric: {len(missing)}"
    sections = [
        f"<h1>{_text(name)}</h1><p class=soft>{_text(about)}</p>",
        _cards(findings),
        _folded(missing_title, _table(("symptom", "metric"), missing.items())),
    ]
    settings = [(option, json.dumps(value)) for option, value in history.settings.items()]
    if settings:
        sections.append(_folded(f"Settings: {len(settings)}", _table(("option", "value"), settings)))
    sections.append(_gallery(pictures({name: [history]}, findings)))
    too_many = reward_functions([history])[MOST_FUNCTIONS:]
    if too_many:
        sections.append(_soft(f"Reward functions without a picture: {', '.join(too_many)}."))
    sections.append(_answers(history.run.get("answers", ())))
    _save(file, name, sections)


def write_comparison(file: Path, histories: Mapping[str, History]) -> None:
    """Write the report of several runs, by path, beside each other."""
    runs = by_name(histories)
    title = " / ".join(runs)
    endpoint, comparisons = compared(runs)
    sections = [f"<h1>{_text(title)}</h1>"]
    if comparisons:
        sections.append(_comparisons(endpoint, comparisons))
    seeds_by_name: dict[str, list[History]] = {}
    for name, seeds in runs.items():
        seeds_by_name[name] = list(seeds.values())
    sections.append(_gallery(pictures(seeds_by_name)))
    sections.append("<h2>Symptoms</h2>")
    for path, history in histories.items():
        findings, _ = diagnose(history)
        sections.append(f"<h3>{_text(path)}</h3>{_cards(findings)}")
    _save(file, title, sections)


def _save(file: Path, title: str, sections: Sequence[_Html]) -> None:
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(_PAGE.substitute(title=_text(title), body="\n".join(sections)), encoding="utf-8")
    os.replace(unfinished, file)


def _text(value: object) -> _Html:
    return escape(clean(value))


def _cards(findings: Sequence[Finding]) -> _Html:
    """Return a card for each symptom, with those that follow from it inside, and then those that have passed."""
    cards: list[_Html] = []
    passed: list[_Html] = []
    for finding in findings:
        if finding.passed:
            passed.append(_soft(finding))
        elif not finding.cause:
            effects = [_soft(effect) for effect in findings if effect.cause == finding.symptom.name]
            cards.append(_card(finding, "".join(effects)))
    if not cards:
        cards.append("<div class='card steady'>No symptom was found.</div>")
    return "".join(cards + passed)


def _soft(text: object) -> _Html:
    return f"<p class=soft>{_text(text)}</p>"


def _card(finding: Finding, effects: _Html) -> _Html:
    symptom = finding.symptom
    since = f", since step {finding.since}" if finding.since else ""
    more = _folded("What follows from it", effects) if effects else ""
    return (
        f"<div class='card {symptom.level}'><p><b>{symptom.level}</b>: {_text(symptom.what)}{since}.</p>"
        f"{_soft(finding.evidence)}<p>{_text(finding.advice)}</p>{more}"
        f"<p class=soft>{_link(symptom.page)}</p></div>"
    )


def _link(page: str) -> _Html:
    """Return a link to a section of the site, or of the docs of a checkout, as far as one is known."""
    name, anchor = page.split("#")
    for url in metadata("trl-steady").get_all("Project-URL", []):
        kind, _, site = url.partition(", ")
        if kind == "Documentation":
            return _anchor(f"{site.rstrip('/')}/{name.removesuffix('.md')}/#{anchor}", page)
    file = Path(__file__).parents[3] / "docs" / name
    if file.is_file():
        return _anchor(f"{file.as_uri()}#{anchor}", page)
    return f"docs/{_text(page)}"


def _anchor(address: str, text: str) -> _Html:
    return f"<a href='{_text(address)}'>{_text(text)}</a>"


def _folded(title: str, content: _Html) -> _Html:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _gallery(drawn: Iterable[tuple[str, str]]) -> _Html:
    figures = [f"<figure class=card><h3>{_text(title)}</h3>{svg}</figure>" for title, svg in drawn]
    return f"<div class=grid>{''.join(figures)}</div>"


def _table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> _Html:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    lines = [f"<tr>{head}</tr>"]
    for row in rows:
        lines.append(_row(headings, row))
    kind = "scroll wide" if len(headings) > 2 else "scroll"
    return f"<div class='{kind}'><table>{''.join(lines)}</table></div>"


def _row(headings: Sequence[str], cells: Iterable[object]) -> _Html:
    """Return a row whose cells know their headings, for a screen on which they stand below each other."""
    texts: list[_Html] = []
    for heading, cell in zip(headings, cells, strict=True):
        texts.append(f"<td data-of='{_text(heading)}'>{_text(cell)}</td>")
    return f"<tr>{''.join(texts)}</tr>"


def _comparisons(endpoint: str, comparisons: Mapping[str, Comparison]) -> _Html:
    rows: list[tuple[object, ...]] = []
    for name, (seeds, mean, gains) in comparisons.items():
        difference = ""
        bounds = ""
        if len(gains):
            difference = f"{gains.mean():+.4g}"
        if len(gains) > 1:
            low, high = interval(gains)
            bounds = f"{low:+.4g} to {high:+.4g}"
        rows.append((name, seeds, f"{mean:.4g}", difference, bounds))
    baseline = next(iter(comparisons))
    headings = ("run", "seeds", f"{endpoint}, last sixth", f"minus {baseline}", "95 % interval")
    note = _soft("Differences are paired by seed. The interval is a bootstrap over seeds.")
    return f"<h2>At the end</h2>{_table(headings, rows)}{note}"


def _answers(rollouts: Sequence[Mapping[str, Any]]) -> _Html:
    if not rollouts:
        return ""
    steps: list[_Html] = []
    for rollout in reversed(rollouts):
        groups = [_group(group) for group in rollout["groups"]]
        steps.append(_folded(f"Step {rollout['step']}", "".join(groups)))
    return f"<h2>Answers</h2>{''.join(steps)}"


def _group(group: Mapping[str, Any]) -> _Html:
    answers: list[_Html] = []
    for answer in group["answers"]:
        about = _soft(f"{answer['place']}, reward {answer['reward']:.4g}")
        answers.append(f"{about}<pre>{_coloured(answer)}</pre>")
    return f"<div class=card><pre>{_text(group['prompt'])}</pre>{''.join(answers)}</div>"


def _coloured(answer: Mapping[str, Any]) -> _Html:
    """Return an answer with its tokens coloured by advantage, if it has one for each token."""
    tokens: Sequence[tuple[str, float]] | None = answer.get("tokens")
    if not tokens:
        return _text(answer["text"])
    largest = max(abs(advantage) for _, advantage in tokens) or 1.0
    spans: list[_Html] = []
    for token, advantage in tokens:
        share = round(70 * abs(advantage) / largest)
        kind = " class=below" if advantage < 0 else ""
        spans.append(f"<span title='advantage {advantage:.3g}' style='--share:{share}%'{kind}>{_text(token)}</span>")
    return "".join(spans)
