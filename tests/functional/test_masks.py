"""Means and masks as functions: what they read. Decisions: `losses/test_masks.py`."""

import pytest
import torch
from torch import Tensor

from trl_steady.functional import masks

MASK = torch.arange(4) < torch.tensor([[4], [2], [1], [0]])


def log_probs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, sampler = -torch.randn(2, 4, 4, generator=generator, dtype=torch.float64).abs()
    return policy, sampler


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 3), torch.ones(3, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)]
)
def test_shapes_that_would_broadcast_are_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="values like the mask"):
        masks.sequence_mean(torch.zeros(3, 3), mask)


@pytest.mark.parametrize("garbage", [float("nan"), -float("inf"), 1e4])
def test_values_under_the_mask_are_never_read(garbage: float) -> None:
    policy, sampler = log_probs()
    spoil = lambda values: values.masked_fill(~MASK, garbage)
    for logps, sampler_logps in ((spoil(policy), sampler), (policy, spoil(sampler)), (spoil(policy), spoil(sampler))):
        statistic = masks.off_policy_statistic(logps, sampler_logps, MASK)
        assert torch.equal(statistic, masks.off_policy_statistic(policy, sampler, MASK))
        clean, spoiled = masks.log_ratio(policy, sampler), masks.log_ratio(logps, sampler_logps)
        for low, high in ((0.9, 1.1), (0.5, 2.0)):
            expected = masks.geometric_mask(clean, MASK, low=low, high=high)
            assert torch.equal(masks.geometric_mask(spoiled, MASK, low=low, high=high), expected)
        for threshold in (0.1, 0.5):
            expected = masks.token_veto(clean, MASK, threshold=threshold)
            assert torch.equal(masks.token_veto(spoiled, MASK, threshold=threshold), expected)


def test_a_sequence_without_loss_tokens_is_kept_by_all() -> None:
    policy, sampler = log_probs()
    log_ratio = masks.log_ratio(policy, sampler + 5)
    assert masks.geometric_mask(log_ratio, MASK, low=0.9, high=1.1).flatten().tolist() == [False, False, False, True]
    assert masks.token_veto(log_ratio, MASK, threshold=0.5).flatten().tolist() == [False, False, False, True]
    assert masks.off_policy_statistic(policy, sampler + 5, MASK)[3] == 0


def test_a_token_that_was_not_scored_counts_as_agreed_upon() -> None:
    policy, sampler = log_probs()
    agreed, unscored = sampler.clone(), sampler.clone()
    agreed[0, 1], unscored[0, 1] = policy[0, 1], torch.nan
    assert torch.equal(masks.log_ratio(policy, unscored), masks.log_ratio(policy, agreed))
    expected = masks.off_policy_statistic(policy, agreed, MASK)
    assert torch.equal(masks.off_policy_statistic(policy, unscored, MASK), expected)
