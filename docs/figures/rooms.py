"""The rooms of the package, from the command line above to the formulas below, and which room imports which.

Run it to draw `rooms.png` beside this file. It reads the layers from pyproject.toml and the imports from the source,
those for type checkers too.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "trl_steady"
SAYS = {
    "cli": "the command line",
    "trainers": "TRL's class and a tuple of features",
    "features": "one folder or file for each feature",
    "config": "options",
    "trl_bridge": "every private name of TRL",
    "rewards": "StepRewards, splitters",
    "report": "log, symptoms, pictures",
    "losses": "formulas and table of the losses",
    "core": "the vocabulary, without TRL",
    "functional": "formulas of tensors",
}


def layers() -> list[list[str]]:
    """Return the rooms of each layer, top first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (order,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[room.strip().removeprefix("trl_steady.") for room in layer.split("|")] for layer in order]


def arrows() -> list[tuple[str, str]]:
    """Return (room, room that it imports) for all folders."""
    found = set[tuple[str, str]]()
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC).parts[0].removesuffix(".py")
        modules: list[str] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "")
            elif isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
        imported = {module.split(".")[1] for module in modules if module.startswith("trl_steady.")}
        found |= {(room, other) for other in imported & SAYS.keys() if room in SAYS and other != room}
    return sorted(found)


def draw(path: Path) -> None:
    """Draw the rooms and the arrows between them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 7), layout="constrained")
    drawn = layers()
    axis.set(xlim=(0, 100), ylim=(-len(drawn) * 10 + 4, 4))
    axis.axis("off")
    place = {
        room: ((column + 0.5) * 100 / len(layer) + (0, -7, 7)[row % 3], -10 * row)
        for row, layer in enumerate(drawn)
        for column, room in enumerate(layer)
    }
    for room, other in arrows():
        style = {"arrowstyle": "-|>", "color": "#888888", "shrinkA": 16, "shrinkB": 16, "linewidth": 0.7}
        bend = "arc3,rad=0.12" if place[room][0] == place[other][0] else "arc3,rad=0"
        axis.annotate("", place[other], place[room], arrowprops={**style, "connectionstyle": bend})
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#DDEEFF", "edgecolor": "#4477AA"}
        text = f"{room}{'/' if (SRC / room).is_dir() else '.py'}\n{SAYS[room]}"
        axis.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=box, zorder=3)
    figure.savefig(path, dpi=110, metadata={"Description": repr((drawn, arrows()))})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
