"""Draw `padding.png` beside this file, from `padding.json`: results of `benchmarks/padding.py --json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = {"padding": "#DDDDDD", "prompt": "#56B4E9", "completion": "#0072B2", "ours": "#009E73", "TRL": "#000000"}
TRL = "TRL"


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the ratio of seconds for each set, and a micro-batch as each of the two computes it.

    The picture is legible at a width of 400 pixels.
    """
    figure, (bars, strips) = plt.subplots(nrows=2, figsize=(6, 8.2), height_ratios=(1.1, 1), layout="constrained")
    drawn = 0
    for name, of_set in results["sets"].items():
        for variant, found in of_set["variants"].items():
            if variant == TRL:
                continue
            ratio = found["ratio"]
            whiskers = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            bars.barh(drawn, ratio["median"], xerr=whiskers, color=COLOURS["ours"], capsize=4, height=0.5)
            bars.text(ratio["high"] + 0.1, drawn, f"{ratio['median']:.2f}", va="center", fontsize=15)
            options = variant.removeprefix("ours").removeprefix(", ").replace(" and ", ", ") or "default"
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            bars.text(0.05, drawn - 0.32, f"{name}: {options}", va="bottom", fontsize=13, bbox=ground)
            drawn += 1
    bars.axvline(1, color=COLOURS["TRL"], linewidth=1.5, zorder=0)
    bars.set_ylim(drawn - 0.5, -0.8)
    bars.margins(x=0.14)
    bars.tick_params(labelsize=13)
    bars.set_yticks([])
    bars.set_title("TRL's seconds over ours, for one step", fontsize=15)
    bars.set_xlabel("1 = as fast as TRL; median and quartiles", fontsize=13)
    drawn_set = next(iter(results["sets"]))
    _strips(strips, results["sets"][drawn_set])
    strips.set_title(f"One micro-batch of “{drawn_set}”", fontsize=15)
    strips.set_xlabel("tokens", fontsize=13)
    strips.tick_params(labelsize=13)
    strips.set_yticks([])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _strips(axis: Any, of_set: Mapping[str, Any]) -> None:
    """Draw TRL's padded rows, and below them the same tokens packed and wrapped at the same width."""
    prompts, completions = of_set["micro_batch"]
    prompt_width, completion_width = of_set["widths"]
    width = prompt_width + completion_width

    def tokens(row: float, start: int, length: int, kind: str) -> None:
        while length > 0:
            line, column = divmod(start, width)
            taken = min(length, width - column)
            axis.barh(row + line, taken, left=column, height=0.8, color=COLOURS[kind], linewidth=0)
            start, length = start + taken, length - taken

    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens(row, 0, width, "padding")
        tokens(row, prompt_width - prompt, prompt, "prompt")
        tokens(row, prompt_width, completion, "completion")
    below, start = len(prompts) + 1.7, 0
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens(below, start, prompt, "prompt")
        tokens(below, start + prompt, completion, "completion")
        axis.plot(
            [start % width] * 2, [below + start // width - 0.4, below + start // width + 0.4], "w", linewidth=1.5
        )
        start += prompt + completion
    for row, says in (
        (-0.75, "TRL, padded"),
        (below - 0.75, "trl-steady, packed in one row (wrapped here)"),
    ):
        axis.text(0, row, f"{says}: {width * len(prompts) if row < 0 else start:,} tokens", fontsize=13)
    kinds = ("prompt", "completion", "padding")
    handles = [axis.barh([0], [0], color=COLOURS[kind], label=kind) for kind in kinds]
    axis.legend(handles=handles, loc="lower right", fontsize=12, ncols=3, columnspacing=1)
    axis.set_xlim(0, width)
    axis.set_ylim(below + start // width + 2.6, -2.2)


if __name__ == "__main__":
    recorded = Path(__file__).with_suffix(".json")
    draw(recorded.with_suffix(".png"), json.loads(recorded.read_text()))
