"""The figures of the design are of today's code."""

from pathlib import Path

import pytest

from tests.tools.script import figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.parametrize("name", ["flow", "rooms"])
def test_the_picture_is_up_to_date(name: str, tmp_path: Path) -> None:
    """Run `docs/figures/NAME.py` if it is not."""
    image = pytest.importorskip("PIL.Image")
    with figure(name) as script:
        script.draw(tmp_path / "now.png")
    descriptions = [image.open(path).text["Description"] for path in (FIGURES / f"{name}.png", tmp_path / "now.png")]
    assert descriptions[0] == descriptions[1]
