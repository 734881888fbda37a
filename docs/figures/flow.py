"""An optimizer step: TRL's methods, ours around them, and the hooks that features define, from generation to loss.

Run it to draw `flow.png` beside this file. It reads every name from the source of `FeatureTrainerMixin`, `Feature` and
`GRPOTrainer`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trl_steady import GRPOTrainer
from trl_steady.core.feature import Feature
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

OURS, TRL, HOOK = "a method of FeatureTrainerMixin", "TRL's own method", "a hook, and the features that define it"
PANELS = {"For each rollout": "_generate_and_score_completions", "For each micro-batch": "training_step"}
# TRL's method -> those that it calls, and that FeatureTrainerMixin overrides
CALLS = {
    "_generate_and_score_completions": [
        "_generate_single_turn",
        "_get_per_token_logps_and_entropies",
        "_calculate_rewards",
        "_on_rewards",
    ],
    "training_step": ["compute_loss"],
    "compute_loss": ["_compute_loss"],
}
# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = {OURS: "#56B4E9", TRL: "#CCCCCC", HOOK: "#F0E442"}
PREFIX = {OURS: "self.", TRL: "super().", HOOK: "feature."}


class Line(NamedTuple):
    """A line of the picture."""

    depth: int
    kind: str
    name: str
    features: tuple[str, ...] = ()


class _Use(NamedTuple):
    owner: str
    name: str
    is_deferred: bool
    """True if it runs inside the middleware of the method: in an inner function, or as an argument."""


def uses(function: Callable[..., Any]) -> list[_Use]:
    """Return what a method uses, in order: `super().NAME`, `self.NAME`, `feature.NAME`, `Feature.NAME`."""
    found: list[tuple[int, int, _Use]] = []

    def visit(node: ast.AST, is_deferred: bool = False) -> None:
        for child in ast.iter_child_nodes(node):
            is_called = isinstance(node, ast.Call) and child is node.func
            if isinstance(child, ast.Attribute):
                owner = ast.unparse(child.value).partition("(")[0]
                use = _Use(owner, child.attr, is_deferred or (owner in ("super", "self") and not is_called))
                found.append((child.lineno, child.col_offset, use))
            visit(child, is_deferred or isinstance(child, ast.FunctionDef))

    visit(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0])
    return list(dict.fromkeys(use for *_, use in sorted(found)))


def defining(hook: str) -> tuple[str, ...]:
    """Return the features of `GRPOTrainer` that define a hook themselves."""
    own = getattr(Feature, hook)
    return tuple(feature.__name__ for feature in GRPOTrainer.FEATURES if getattr(feature, hook) is not own)


def lines(method: str, depth: int = 0) -> Iterator[Line]:
    """Yield the lines of a method of `FeatureTrainerMixin`, and of all that it calls."""
    yield Line(depth, OURS, method)
    every = uses(vars(FeatureTrainerMixin)[method])
    deferred = [use for use in every if use.is_deferred]
    for use in every:
        if use.owner in ("feature", "Feature"):
            yield Line(depth + 1, HOOK, use.name, defining(use.name))
            if use.name.startswith("around_"):
                yield from _inside(deferred, depth + 2)
                deferred = []
        elif not use.is_deferred:
            yield from _inside([use], depth + 1)
    yield from _inside(deferred, depth + 1)


def _inside(found: list[_Use], depth: int) -> Iterator[Line]:
    for use in found:
        if use.owner == "super":
            yield Line(depth, TRL, use.name)
            for method in CALLS.get(use.name, ()):
                yield from lines(method, depth + 1)
        elif use.owner == "self" and inspect.isfunction(vars(FeatureTrainerMixin).get(use.name)):
            if use.name.startswith("_trl_"):  # TRL's method, with the arguments that it wants
                yield from (line._replace(depth=line.depth - 1) for line in [*lines(use.name, depth)][1:])
            elif use.name not in ("feature", "until_backward", "_as_trl_reads", "_on_rewards"):
                yield from lines(use.name, depth)


def described() -> dict[str, list[Line]]:
    """Return the lines of each panel. The picture also holds them as text, to tell whether it is up to date."""
    panels = {title: list(lines(method)) for title, method in PANELS.items()}
    drawn = {line.name for panel in panels.values() for line in panel}
    hooks = [name for name, of in vars(Feature).items() if inspect.isfunction(of) and not name.startswith("_")]
    rest = [name for name in hooks if name not in drawn and name not in ("warn", "refuse")]
    panels["When a trainer is built, in steps, and for checkpoints"] = [Line(0, HOOK, n, defining(n)) for n in rest]
    return panels


def _text(line: Line) -> str:
    return textwrap.fill(", ".join(line.features), 66)


def _rows(line: Line) -> float:
    """Return the height of a line of the picture in rows: two lines of text fit into one."""
    return max(1.0, 0.45 * (_text(line).count("\n") + 1))


def draw(path: Path) -> None:
    """Draw a panel for each of `PANELS`, top to bottom as it happens."""
    import matplotlib  # here: tests of the lines do without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    panels = described()
    _, *right = (sum(_rows(line) for line in panel) for panel in panels.values())
    figure = plt.figure(figsize=(15, 0.36 * sum(right) + 1.5), layout="constrained")
    axes = figure.subplot_mosaic([["left", "top"], ["left", "bottom"]], height_ratios=right)
    heights = (sum(right) + 1, *right)
    for axis, height, (title, drawn) in zip(axes.values(), heights, panels.items(), strict=True):
        axis.set(title=title, xlim=(0, 100), ylim=(height - 0.3, -0.7))
        axis.axis("off")
        top = -0.5
        for line in drawn:
            y = top + _rows(line) / 2
            top += _rows(line)
            label = PREFIX[line.kind] + line.name
            box = {"boxstyle": "round,pad=0.25", "facecolor": COLOURS[line.kind], "edgecolor": "none"}
            axis.text(2.5 * line.depth + 1, y, label, family="monospace", fontsize=8, va="center", bbox=box)
            axis.text(56, y, _text(line), fontsize=6.5, va="center", linespacing=1.1)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Description": repr(panels)})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
