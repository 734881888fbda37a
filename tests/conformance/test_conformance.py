"""What every feature and every loss must do. `cases.py` has the table."""

from pathlib import Path
from typing import Any

import pytest

from tests.conformance import cases
from tests.tools import resumable, tiny
from tests.tools.headroom import within
from trl_steady import features

EACH = pytest.mark.parametrize(("feature", "case"), cases.names(), ids=lambda own: own)


def test_every_feature_has_a_row() -> None:
    found = {path.stem for path in Path(features.__path__[0]).glob("[a-z]*")}
    found.remove("scalar_head")  # what the critic and the reward model share
    assert found == cases.CASES.keys() | cases.WITH_AN_ENGINE | cases.EVERYWHERE


@pytest.mark.fast_rows(6)
@EACH
def test_a_resume_inside_a_generation_window_is_exact(build: Any, feature: str, case: str, tmp_path: Path) -> None:
    """In the second window of two steps, when a reference has moved once."""
    saving = {"save_strategy": "steps", "save_steps": 3, "num_iterations": 1}
    expected = resumable.state(tiny.train(build(feature, case, **saving)))
    resumed = build(feature, case, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumable.differences(expected, resumable.state(resumed)) == []


SETS = {"keep_sampling_mask": True, "top_p": 0.8}


@pytest.mark.fast_rows(6)
@EACH
@pytest.mark.parametrize("sets", [{}, pytest.param(SETS, marks=pytest.mark.slow)], ids=["", "kept sets"])
def test_packing_changes_nothing(build: Any, feature: str, case: str, sets: dict[str, Any]) -> None:
    """Within rounding, over the steps of one rollout. Adam would make a step of a rounding error."""
    options = {"optim": "sgd", "learning_rate": 3e-3, "max_steps": 4, **sets}
    packed, padded = (
        tiny.train(build(feature, case, **options, **more))
        for more in ({}, {"trim_padding": False, "token_budget": None, "share_prompts": False})
    )
    expected = tiny.parameters(padded)
    for name, value in tiny.parameters(packed).items():
        if value.dtype.is_floating_point:
            assert within((value - expected[name]).abs(), 1e-5 * expected[name].abs() + 1e-6), name
