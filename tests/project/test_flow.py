"""The figure of the flow is drawn from the code's own names, and is of today's code."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.script import figure
from trl_steady.features.legacy import Part

FLOW = Path(__file__).parents[2] / "docs" / "figures" / "flow.py"
# asked when a trainer is built, around a step, or for a checkpoint: not on the way of a micro-batch
ELSEWHERE = {
    *("building", "captures", "adapter_sync", "built"),
    *("beginning", "drawing", "stepping", "logged", "ending"),
    *("saving", "save", "load"),
}


@pytest.fixture(scope="module")
def flow() -> Iterator[Any]:
    with figure("flow", draws=False) as script:
        yield script


def test_the_flow_has_every_question_of_a_part(flow: Any) -> None:
    """Asked on the way of a micro-batch, and answered by a part of the trainer."""
    lines = [row for rows in flow.described().values() for row in rows]
    asked = {row.name for row in lines if row.kind == flow.QUESTION}
    questions = {name for name, of in vars(Part).items() if inspect.isfunction(of) and not name.startswith("_")}
    assert asked == questions - ELSEWHERE - {"warn", "refuse"}  # which a part does by itself
    assert all(row.parts for row in lines if row.kind == flow.QUESTION)
    steps = {row.name for row in lines if row.kind == flow.STEP}
    assert {"rollout", "generate", "log_probs", "compute_loss", "_compute_loss", "score"} <= steps


def test_the_picture_of_the_flow_is_up_to_date(flow: Any, tmp_path: Path) -> None:
    """Run `docs/figures/flow.py` if it is not."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    assert image.open(FLOW.with_suffix(".png")).text["Description"] == repr(flow.described())
    flow.draw(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
