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
from trl_steady.report.plots import clean, pictures
from trl_steady.report.symptoms import Finding, diagnose

_PAGE = Template((Path(__file__).with_suffix(".html")).read_text())
_Html = str


def write(file: Path, name: str, history: History) -> None:
    """Write the report of a run. It replaces `file` at once."""
    findings, missing = diagnose(history)
    settings = [(option, json.dumps(value)) for option, value in history.settings.items()]
    versions = [f"{package} {number}" for package, number in history.run.get("versions", {}).items()]
    about = ". ".join(filter(None, (counted(history.last_step, "optimizer step"), ", ".join(versions))))
    sections = [
        f"<h1>{_text(name)}</h1><p class=soft>{_text(about)}</p>",
        _cards(findings),
        _folded(
            f"Not looked for, because the log lacks a metric: {len(missing)}",
            _table(("symptom", "metric"), missing.items()),
        ),
        _folded(f"Settings: {len(settings)}", _table(("option", "value"), settings)) if settings else "",
        _gallery(pictures({name: [history]}, findings)),
        _answers(history.run.get("answers", ())),
    ]
    _save(file, name, sections)


def write_comparison(file: Path, histories: Mapping[str, History]) -> None:
    """Write the report of several runs, by path, beside each other."""
    runs = by_name(histories)
    figure, found = compared(runs)
    sections = [
        f"<h1>{_text(' / '.join(runs))}</h1>",
        _comparisons(figure, found) if found else "",
        _gallery(pictures({name: list(seeds.values()) for name, seeds in runs.items()})),
        "<h2>Symptoms</h2>",
    ]
    for path, history in histories.items():
        sections.append(f"<h3>{_text(path)}</h3>{_cards(diagnose(history)[0])}")
    _save(file, " / ".join(runs), sections)


def _save(file: Path, title: str, sections: Sequence[_Html]) -> None:
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(_PAGE.substitute(title=_text(title), body="\n".join(sections)), encoding="utf-8")
    os.replace(unfinished, file)


def _text(value: object) -> _Html:
    return escape(clean(value))


def _cards(findings: Sequence[Finding]) -> _Html:
    """Return a card for each symptom, with those that follow from it inside, and then those that have passed."""
    cards, passed = list[_Html](), "".join(f"<p class=soft>{_text(each)}</p>" for each in findings if each.passed)
    for head in (finding for finding in findings if not finding.cause and not finding.passed):
        effects = (f"<p class=soft>{_text(each)}</p>" for each in findings if each.cause == head.symptom.name)
        cards.append(_card(head, "".join(effects)))
    return "".join(cards or ["<div class='card steady'>No symptom was found.</div>"]) + passed


def _card(finding: Finding, effects: _Html) -> _Html:
    symptom = finding.symptom
    since = f", since step {finding.since}" if finding.since else ""
    more = _folded("What follows from it", effects) if effects else ""
    return (
        f"<div class='card {symptom.level}'><p><b>{symptom.level}</b>: {_text(symptom.what)}{since}.</p>"
        f"<p class=soft>{_text(finding.evidence)}</p><p>{_text(finding.advice)}</p>{more}"
        f"<p class=soft>{_link(symptom.page)}</p></div>"
    )


def _link(page: str) -> _Html:
    """Return a link to a section of the site, or of the docs of a checkout, as far as one is known."""
    (name, anchor), urls = page.split("#"), metadata("trl-steady").get_all("Project-URL", [])
    file = Path(__file__).parents[3] / "docs" / name
    sites = [url.split(", ")[1].rstrip("/") for url in urls if url.startswith("Documentation, ")]
    links = [f"{site}/{name.removesuffix('.md')}/" for site in sites] + [file.as_uri()] * file.is_file()
    return f"<a href='{_text(links[0])}#{_text(anchor)}'>{_text(page)}</a>" if links else f"docs/{_text(page)}"


def _folded(title: str, content: _Html) -> _Html:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _gallery(drawn: Iterable[tuple[str, str]]) -> _Html:
    figures = (f"<figure class=card><h3>{_text(title)}</h3>{svg}</figure>" for title, svg in drawn)
    return f"<div class=grid>{''.join(figures)}</div>"


def _table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> _Html:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _comparisons(figure: str, found: Mapping[str, Comparison]) -> _Html:
    rows: list[tuple[object, ...]] = []
    for name, (seeds, mean, gains) in found.items():
        difference = f"{gains.mean():+.4g}" if len(gains) else ""
        bounds = "{:+.4g} to {:+.4g}".format(*interval(gains)) if len(gains) > 1 else ""
        rows.append((name, seeds, f"{mean:.4g}", difference, bounds))
    headings = ("run", "seeds", f"{figure}, last sixth", f"minus {next(iter(found))}", "95 % interval")
    note = "<p class=soft>Differences are paired by seed. The interval is a bootstrap over seeds.</p>"
    return f"<h2>At the end</h2>{_table(headings, rows)}{note}"


def _answers(rollouts: Sequence[Mapping[str, Any]]) -> _Html:
    steps = [_folded(f"Step {one['step']}", "".join(map(_group, one["groups"]))) for one in reversed(rollouts)]
    return f"<h2>Answers</h2>{''.join(steps)}" if steps else ""


def _group(group: Mapping[str, Any]) -> _Html:
    answers = "".join(
        f"<p class=soft>{_text(answer['place'])}, reward {answer['reward']:.4g}</p><pre>{_coloured(answer)}</pre>"
        for answer in group["answers"]
    )
    return f"<div class=card><pre>{_text(group['prompt'])}</pre>{answers}</div>"


def _coloured(answer: Mapping[str, Any]) -> _Html:
    tokens = answer.get("tokens")
    if not tokens:
        return _text(answer["text"])
    largest = max(abs(advantage) for _, advantage in tokens) or 1.0
    return "".join(
        f"<span title='advantage {advantage:.3g}' style='--share:{round(70 * abs(advantage) / largest)}%'"
        f"{' class=below' * (advantage < 0)}>{_text(token)}</span>"
        for token, advantage in tokens
    )
