"""Sequence means."""

import pytest
import torch

from trl_steady.functional import reduction

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def test_each_sequence_is_averaged_over_its_own_loss_tokens() -> None:
    values = torch.tensor([[1.0, 3.0, 99.0], [5.0, 99.0, torch.nan], [99.0, torch.inf, 99.0]])
    assert reduction.sequence_mean(values, MASK).flatten().tolist() == [2.0, 5.0, 0.0]


def test_a_column_of_one_value_per_sequence_is_not_broadcast() -> None:
    with pytest.raises(ValueError, match="values like the mask"):
        reduction.sequence_mean(torch.zeros(3, 1), MASK)
