"""The list of features and setups is that of the marks."""

import pytest

from tests.project import support
from tests.project.support import FEATURES, SETUPS


def test_the_page_has_the_list_of_the_marks() -> None:
    """If not: python -m tests.project.support --write."""
    marks, page = support.collect(), support.PAGE.read_text()
    assert support.written(page, marks) == page
    assert {feature for mark in marks for feature in mark.features} == FEATURES.keys()
    assert {setup for mark in marks for setup in mark.setups} == set(SETUPS)


def test_ci_runs_what_backs_a_sign() -> None:
    ci = support.ROOT / ".ci/run"
    if not ci.exists():
        pytest.skip("needs the checkout")
    targets = ("test", "test-slow", "test-distributed", "test-sharded", "test-vllm")
    assert {f"make {target}" for target in targets} <= set(ci.read_text().splitlines())
