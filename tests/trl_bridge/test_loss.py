"""How TRL reduces the values of tokens to a loss, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_steady.trl_bridge.loss import REDUCTIONS, trl_token_weights

FIRST, SECOND = [True, True, True], [True, False, False]


@pytest.mark.parametrize(
    ("loss_type", "training", "evaluation"),
    [
        ("grpo", (1 / 12, 1 / 4), (1 / 6, 1 / 2)),  # the mean of an answer, of 2 answers, of 2 micro-batches
        ("luspo", (1 / 4, 1 / 4), (1 / 2, 1 / 2)),  # the sum of an answer
        ("bnpo", (1 / 8, 1 / 8), (1 / 4, 1 / 4)),  # the mean of 4 tokens, of 2 micro-batches
        ("dapo", (1 / 10, 1 / 10), (1 / 20, 1 / 20)),  # 20 tokens in the rollout, half of them in this window
        ("dr_grpo", (1 / 20, 1 / 20), (1 / 10, 1 / 10)),  # 2 answers of at most 5 tokens
    ],
)
def test_weights_in_a_window_of_two_micro_batches(
    loss_type: str, training: tuple[float, float], evaluation: tuple[float, float]
) -> None:
    """Two answers of 3 and 1 tokens, in the first of two windows of a rollout. An evaluation has no window."""
    for is_training, (first, second) in ((True, training), (False, evaluation)):
        trainer: Any = SimpleNamespace(
            model=SimpleNamespace(training=is_training),
            accelerator=SimpleNamespace(num_processes=1),
            args=SimpleNamespace(steps_per_generation=4),
            current_gradient_accumulation_steps=2,
            max_completion_length=5,
        )
        inputs = {"num_items_in_batch": torch.tensor(20)}
        found = trl_token_weights(trainer, torch.tensor([FIRST, SECOND]), inputs, loss_type, torch.float64)
        assert found.flatten().tolist() == pytest.approx([first] * 3 + [second, 0, 0], rel=1e-15)


def test_each_reduction_is_worked_by_hand_above() -> None:
    assert {REDUCTIONS[name] for name in ("grpo", "luspo", "bnpo", "dapo", "dr_grpo")} == {*REDUCTIONS.values()}
