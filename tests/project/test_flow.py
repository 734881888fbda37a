"""The figures of the design are drawn from the code's own names, and are of today's code."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.script import figure
from trl_steady.core.feature import Feature

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module")
def flow() -> Iterator[Any]:
    with figure("flow", draws=False) as script:
        yield script


def test_the_flow_has_every_hook_of_a_feature(flow: Any) -> None:
    lines = [line for panel in flow.described().values() for line in panel]
    hooks = {name for name, of in vars(Feature).items() if inspect.isfunction(of) and not name.startswith("_")}
    assert {line.name for line in lines if line.kind == flow.HOOK} == hooks - {"warn", "refuse"}
    ours = [line.name for line in lines if line.kind == flow.OURS]
    assert ours.index("_calculate_rewards") < ours.index("training_step") < ours.index("_compute_loss")


@pytest.mark.parametrize("name", ["flow", "rooms"])
def test_the_picture_is_up_to_date(name: str, tmp_path: Path) -> None:
    """Run `docs/figures/NAME.py` if it is not."""
    image = pytest.importorskip("PIL.Image")
    with figure(name) as script:
        script.draw(tmp_path / "now.png")
    descriptions = [image.open(path).text["Description"] for path in (FIGURES / f"{name}.png", tmp_path / "now.png")]
    assert descriptions[0] == descriptions[1]
