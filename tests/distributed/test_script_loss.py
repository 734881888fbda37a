"""A term that a script adds to the loss, with `token_budget`, on two processes."""

from pathlib import Path

import trl_steady
from tests.distributed import processes
from tests.features.padding_free.test_script_loss import BUDGET, adds, assert_same, by_width, trained


@processes.on_two
def test_a_term_counts_as_without_a_budget(models: dict[str, Path], tmp_path: Path) -> None:
    kind = adds(trl_steady.GRPOTrainer, by_width)
    without, with_budget = (trained(kind, models["dense"], tmp_path, **budget) for budget in ({}, BUDGET))
    assert with_budget.seen == without.seen
    assert_same(with_budget, without)
