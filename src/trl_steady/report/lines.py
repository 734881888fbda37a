"""What a run prints: one line for a log, and what it shows at its end."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trl_steady.report.diagnosis import Finding, Skipped

# name in the line -> metric, and its form
_SHOWN = {
    "reward": ("reward", "{:.2f}"),
    "held out": ("eval_reward", "{:.2f}"),
    "KL": ("kl", "{:.2g}"),
    "engine KL": ("mismatch/kl", "{:.1e}"),
    "clipped": ("clip_ratio/region_mean", "{:.0%}"),
    "routes changed": ("routing/changed", "{:.1%}"),
    "explained": ("value/explained_variance", "{:.2f}"),
    "refreshes": ("ref/refreshes", "{:.0f}"),
}
_RATIO = ("ratio/sequence_min", "ratio/sequence_max")


def log_line(logs: Mapping[str, Any], step: int, last: int) -> str:
    """Return one line for a row of the log, with the usual metrics that it has."""
    known = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
    words = [f"step {step}/{last}"]
    words += [f"{name} {form.format(known[key])}" for name, (key, form) in _SHOWN.items() if key in known]
    if known.keys() >= {*_RATIO}:
        words.append("ratio {:.3g}..{:.3g}".format(*(known[key] for key in _RATIO)))
    if dropped := [value for key, value in known.items() if key.startswith("dropped/")]:
        words.append(f"dropped {max(dropped):.0%}")
    if "step_time" in known:
        words.append(f"{known['step_time']:.2g} s")
    return "  ".join(words)


def verdict(findings: Sequence[Finding], skipped: Sequence[Skipped]) -> str:
    """Return what a run shows: a line for each symptom, and which symptoms its log cannot show."""
    lines = [f"symptoms: {len(findings)}", *(f"  {finding}" for finding in findings)]
    if skipped:
        lines.append(f"  not in the log: {', '.join(each.symptom.name for each in skipped)}")
    return "\n".join(lines)


def clean(text: object) -> str:
    """Return a text without lone surrogates, control characters, and those that change the direction of text."""
    no_text = "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
    return re.sub(no_text, "\N{REPLACEMENT CHARACTER}", str(text))
