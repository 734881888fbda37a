"""The picture of `padding.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.padding_sets import SETS, TRL

# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = {"padding": "#DDDDDD", "prompt": "#56B4E9", "completion": "#0072B2", "ours": "#009E73", "TRL": "#000000"}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the ratio of seconds for each set, and a micro-batch as each of the two computes it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, strips) = plt.subplots(ncols=2, figsize=(12, 4.2), width_ratios=(1.15, 1))
    labels: list[str] = []
    for name, of_set in results["sets"].items():
        for variant, found in of_set["variants"].items():
            if variant == TRL:
                continue
            ratio = found["ratio"]
            whiskers = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            bars.barh(len(labels), ratio["median"], xerr=whiskers, color=COLOURS["ours"], capsize=3, height=0.65)
            bars.text(ratio["high"] + 0.04, len(labels), f"{ratio['median']:.2f}", va="center")
            labels.append(f"{name}\n{variant}")
    bars.set_yticks(range(len(labels)), labels, fontsize=8)
    bars.axvline(1, color=COLOURS["TRL"], linewidth=1)
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set(title="Seconds of a step: TRL over trl-steady", xlabel="ratio, median and quartiles; 1 = as fast as TRL")
    drawn = next((name for name in SETS if name in results["sets"]), None)
    if drawn is not None:
        _strips(strips, results["sets"][drawn])
        strips.set(title=f"One micro-batch of “{drawn}”", yticks=[], xlabel="tokens")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
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
    below, start = len(prompts) + 1.5, 0
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens(below, start, prompt, "prompt")
        tokens(below, start + prompt, completion, "completion")
        axis.plot(
            [start % width] * 2, [below + start // width - 0.4, below + start // width + 0.4], "w", linewidth=1.5
        )
        start += prompt + completion
    for row, says in (
        (-0.75, "TRL: padded to the longest of the rollout"),
        (below - 0.75, "trl-steady: packed in one row, wrapped here"),
    ):
        axis.text(0, row, f"{says}, {width * len(prompts) if row < 0 else start:,} tokens", fontsize=9)
    kinds = ("prompt", "completion", "padding")
    handles = [axis.barh([0], [0], color=COLOURS[kind], label=kind) for kind in kinds]
    axis.legend(handles=handles, loc="lower right", fontsize=8, ncols=3)
    axis.set_xlim(0, width)
    axis.set_ylim(below + start // width + 2, -1.6)
