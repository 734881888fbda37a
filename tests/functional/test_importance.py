"""Sequence log-ratio and GSPO-token surrogate: numbers by hand, identities, gradients in float64."""

import pytest
import torch

from trl_steady.functional import importance


def random_batch(sequences: int = 4, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logps = torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)
    old_logps = logps + 0.3 * torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(sequences, tokens, generator=generator) < 0.7
    mask[0] = True
    return logps, old_logps, mask


def test_sequence_ratio_is_the_geometric_mean_of_the_token_ratios() -> None:
    # token ratios 2, 8, 1/2 over three loss tokens: (2 * 8 / 2) ** (1/3) = 2
    ratios = torch.tensor([[2.0, 8.0, 0.5, 100.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    log_s = importance.sequence_log_ratio(ratios.log(), torch.zeros_like(ratios), mask)
    assert log_s.exp().item() == pytest.approx(2.0, abs=1e-15)


def test_garbage_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    garbage = torch.nan
    logps, old_logps, mask = random_batch()
    clean = logps.clone().requires_grad_()
    importance.sequence_log_ratio(clean, old_logps, mask).sum().backward()
    dirty = logps.masked_fill(~mask, garbage).requires_grad_()
    log_s = importance.sequence_log_ratio(dirty, old_logps.masked_fill(~mask, -garbage), mask)
    log_s.sum().backward()
    assert torch.equal(log_s, importance.sequence_log_ratio(logps, old_logps, mask))
    assert torch.equal(dirty.grad, clean.grad)


def test_surrogate_is_bit_equal_to_the_sequence_ratio_at_every_token_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    logps = -20 * torch.rand(64, 33, generator=generator)
    old_logps = logps + 1e-3 * torch.randn(64, 33, generator=generator)
    mask = torch.ones(64, 33, dtype=torch.bool)
    centred, surrogate = importance.gspo_token_surrogate(logps, old_logps, mask)
    log_s = importance.sequence_log_ratio(logps, old_logps, mask)
    assert torch.equal(centred - surrogate, log_s.expand(64, 33))
    # negative control: the same on paper, with log π left in place
    assert not torch.equal(logps - (logps - log_s), log_s.expand(64, 33))


def test_surrogate_gives_each_token_its_own_gradient_times_the_sequence_ratio() -> None:
    logps, old_logps, mask = random_batch()
    logps.requires_grad_()
    centred, surrogate = importance.gspo_token_surrogate(logps, old_logps, mask)
    (centred - surrogate).exp().sum().backward()
    s = importance.sequence_log_ratio(logps.detach(), old_logps, mask).exp()
    assert torch.allclose(logps.grad, s.expand_as(logps), rtol=1e-15)


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 3), torch.ones(3, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)]
)
def test_shapes_that_would_broadcast_are_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="values like the mask"):
        importance.sequence_log_ratio(torch.zeros(3, 3), torch.zeros(3, 3), mask)
