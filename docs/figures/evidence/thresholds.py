"""Thresholds: where the recommended values sit between bias and noise.

    python docs/figures/evidence/thresholds.py [--write]

Each panel holds one disturbance fixed and moves one threshold. Noise is the square root of the variance of a mean of
256 completions, so that bias and noise have one unit. In each task, their squares add up to that of the error.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import long
import mismatch
import shown
import staleness
import torch
from exact import ANSWERS, INF, Method
from torch import Tensor

STEPS = 8


class Panel(NamedTuple):
    """One threshold under one disturbance."""

    title: str
    where: str
    """`"stale"`: after `STEPS` steps. `"fp8"`: with that rounding. Or a case and a number of tokens of `long.py`."""
    method: Callable[[float], Method]
    values: tuple[float, ...]
    marked: dict[str, float]
    """Values that papers, TRL or frameworks use."""


def grid(low: float, high: float) -> tuple[float, ...]:
    """Return 13 values at equal ratios."""
    return tuple(low * (high / low) ** (i / 12) for i in range(13))


def mode(name: str) -> Callable[[float], Method]:
    """Return TRL's engine correction as a function of its upper limit."""
    return lambda cap: Method(vllm_importance_sampling_mode=name, vllm_importance_sampling_clip_max=cap)


def geometric(width: float) -> Method:
    """Return the geometric mask of log-ratios up to a width on both sides."""
    return Method(geometric_mask_range=(math.exp(-width), math.exp(width)))


PANELS = (
    Panel("GRPO: epsilon", "stale", lambda x: Method(epsilon=x), grid(0.01, 1), {"TRL": 0.2}),
    Panel("GMPO: epsilon", "stale", lambda x: Method("gmpo", x), grid(0.01, 1), {"paper": 0.4}),
    Panel("GSPO: epsilon", "stale", lambda x: Method("gspo", x), grid(1e-4, 1), {"paper": 3e-4}),
    Panel(
        "off-policy mask: threshold",
        "stale",
        lambda x: Method(epsilon=INF, off_policy_mask_threshold=x),
        grid(1e-4, 1),
        {"slime": 1e-4, "from the log": staleness.threshold(), "TRL's example": 0.5},
    ),
    Panel("token_truncate: limit", "fp8", mode("token_truncate"), grid(1, 5), {"TRL": 3.0}),
    Panel("geometric mask: log of the range", "fp8", geometric, grid(1e-3, 1), {"verl": 1e-3, "SkyRL": 0.01}),
    Panel("GSPO, 256 tokens: epsilon", "stale 256", lambda x: Method("gspo", x), grid(1e-5, 0.01), {"paper": 3e-4}),
    Panel("sequence_mask, 64 tokens: limit", "engine 64", mode("sequence_mask"), grid(1, 100), {"TRL": 3.0}),
    Panel(
        "geometric mask, 64 tokens: log range",
        "engine 64",
        geometric,
        grid(1e-3, 0.1),
        {"verl": 1e-3, "SkyRL": 0.01},
    ),
)


@cache
def outcome(number: int, value: float) -> Tensor:
    """Return (4,) of a panel at a value of its threshold, the median over tasks."""
    panel, found = PANELS[number], []
    for seed in range(shown.TASKS):
        if panel.where == "stale":
            task, given, true = staleness.stale(seed, STEPS)
        elif panel.where == "fp8":
            task, given, true = mismatch.rounded(seed, mismatch.size_of(mismatch.ROUNDED["fp8 e4m3"]))
        else:
            case, length = panel.where.split()
            task, given, true = long.passes(seed, int(length), case)
        found.append(panel.method(value).outcome(given, task, true))
    return shown.medians({"": found})[""]


def tables() -> dict[str, str]:
    """Return the table of the page by name: the marked values, and the one of the scan with the smallest error."""
    rows = []
    for number, panel in enumerate(PANELS):
        best = min(panel.values, key=lambda value, own=number: float(outcome(own, value)[3]))
        for source, value in {**panel.marked, "smallest error here": best}.items():
            bias, _, variance, error = outcome(number, value)
            noise = (variance / ANSWERS).sqrt()
            cells = [shown.digits(each) for each in (value, bias, noise, error)]
            rows.append([panel.title, panel.where, source, *cells])
    heading = ["threshold", "disturbance", "value of", "value", "bias", "noise", "error"]
    return {"thresholds": shown.rendered(heading, rows)}


def draw(path: Path) -> None:
    """Draw bias, noise and error over each threshold, with the values in use."""
    with shown.picture(path, 3) as rows:
        for number, panel in enumerate(PANELS):
            axis = rows[number // 3][number % 3]
            points = torch.stack([outcome(number, value) for value in panel.values])
            noise = (points[:, 2] / ANSWERS).sqrt()
            for i, (name, y) in enumerate({"bias": points[:, 0], "noise": noise, "error": points[:, 3]}.items()):
                axis.plot(panel.values, y, shown.STYLES[i], color=shown.COLOURS[(5, 4, 0)[i]], linewidth=2, label=name)
            for source, value in panel.marked.items():
                axis.axvline(value, color="grey", linewidth=0.8)
                axis.annotate(
                    source,
                    (value, 0.98),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    ha="right",
                    va="top",
                    fontsize="small",
                )
            axis.set_title(panel.title, fontsize="medium")
            axis.set(xscale="log", xlabel=panel.where)
            axis.grid(alpha=0.3)


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
