"""Who is asked what on the way of a micro-batch, from generation to loss.

Run it to draw `flow.png` beside this file. It reads every name from the source of `Steady`, `Part` and `GRPOTrainer`.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trl_steady.host import FeatureTrainerMixin, Part, seam

from trl_steady import GRPOTrainer

STEP, TRLS, QUESTION = "a step of Steady", "TRL's own method", "a question, and the parts that answer it"
_ROLLOUT = "_generate_and_score_completions"
PANELS = {"For each rollout": _ROLLOUT, "For each micro-batch": "training_step"}
# TRL's method -> those that it calls, and that Steady overrides
INSIDE = {"training_step": ["compute_loss"], "compute_loss": ["_compute_loss"]}
INSIDE[_ROLLOUT] = ["_generate_single_turn", "_get_per_token_logps_and_entropies", "_calculate_rewards"]
# Okabe and Ito's, which colour-blind readers tell apart, and how the source calls such a method
COLOURS = {STEP: "#56B4E9", TRLS: "#CCCCCC", QUESTION: "#F0E442"}
CALLED = {STEP: "", TRLS: "super().", QUESTION: "part."}


class Row(NamedTuple):
    """A line of the picture."""

    depth: int
    kind: str
    name: str
    parts: tuple[str, ...] = ()


def events(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return in order what a function does: `part.NAME`, `super().NAME`, `self.NAME`, or a helper of the host."""
    found: list[tuple[bool, int, int, str, str]] = []  # first if it runs later, then where it is

    def visit(node: ast.AST, runs_later: bool = False) -> None:
        for child in ast.iter_child_nodes(node):
            called = isinstance(node, ast.Call) and child is node.func
            if isinstance(child, ast.Attribute):
                owner = ast.unparse(child.value).partition("(")[0]
                if owner in ("part", "super", "self"):
                    is_passed_on = owner == "super" and not called
                    found.append((runs_later or is_passed_on, child.lineno, child.col_offset, owner, child.attr))
            elif isinstance(child, ast.Name) and called:
                found.append((runs_later, child.lineno, child.col_offset, "helper", child.id))
            visit(child, runs_later or isinstance(child, ast.FunctionDef))

    visit(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])
    return list(dict.fromkeys((owner, name) for *_, owner, name in sorted(found, reverse=True)))[::-1]


def answers(question: str) -> tuple[str, ...]:
    """Return the parts of `GRPOTrainer` that define a question of `Part` themselves."""
    assert question in vars(Part), f"Part has no {question}"
    return tuple(part.__name__.removesuffix("Part") for part in GRPOTrainer.PARTS if question in vars(part))


def rows(method: str, depth: int = 0) -> Iterator[Row]:
    """Yield the lines of a method of `Steady`, and of all that it calls."""
    inner = list(_rows(events(vars(FeatureTrainerMixin)[method]), depth + 1))
    passes_on = len([row for row in inner if row.depth == depth + 1]) == 1 and inner[0].kind == STEP
    if passes_on and method.startswith("_"):  # TRL's name of a step that has a public one
        yield from (row._replace(depth=row.depth - 1) for row in inner)
    elif inner and not (method.startswith("_") and all(row.kind == QUESTION for row in inner)):
        yield Row(depth, STEP, method)
        yield from inner
    else:
        yield from (row._replace(depth=depth) for row in inner)


def _rows(happens: list[tuple[str, str]], depth: int) -> Iterator[Row]:
    for owner, name in happens:
        if owner == "part":
            if answers(name):  # other questions are asked for PPO
                yield Row(depth, QUESTION, name, answers(name))
        elif owner == "super":
            yield Row(depth, TRLS, name)
            for hook in INSIDE.get(name, ()):
                yield from rows(hook, depth + 1)
        elif owner == "self" and inspect.isfunction(vars(FeatureTrainerMixin).get(name)):
            yield from rows(name, depth)
        elif owner == "helper" and inspect.isfunction(vars(seam).get(name)):
            yield from (row for row in _rows(events(vars(seam)[name]), depth) if row.kind == QUESTION)


def described() -> dict[str, list[Row]]:
    """Return the lines of each panel. The picture also holds them as text, to tell whether it is up to date."""
    return {title: list(rows(method)) for title, method in PANELS.items()}


def draw(path: Path) -> None:
    """Draw a panel for each of `PANELS`, top to bottom as it happens."""
    import matplotlib  # here: tests of the rows do without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    panels = described()
    height = max(map(len, panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(12.5, 0.32 * height + 0.9), layout="constrained")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, xlim=(0, 100), ylim=(height - 0.3, -0.7))
        axis.axis("off")
        for y, (depth, kind, name, parts) in enumerate(lines):
            box = {"boxstyle": "round,pad=0.25", "facecolor": COLOURS[kind], "edgecolor": "none"}
            axis.text(4 * depth + 1, y, CALLED[kind] + name, family="monospace", fontsize=9, va="center", bbox=box)
            axis.text(52, y, ", ".join(parts), fontsize=9, va="center")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Description": repr(panels)})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
