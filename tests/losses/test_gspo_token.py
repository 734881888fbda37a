"""GSPO-token's log-probs, from which TRL's loss of tokens makes its ratio: identities, and gradients in float64."""

import torch
from torch import Tensor

from trl_steady.core.types import MicroBatch
from trl_steady.losses import gspo_token


def surrogate(logps: Tensor, old_logps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the ratio that TRL forms, (B, T), and of the sequence's ratio, (B, 1)."""
    batch = MicroBatch(mask, logps, logps, None, torch.ones(len(mask)), old_logps)
    rewritten = gspo_token(batch)
    return rewritten.logps - rewritten.old_logps, batch.sequence_log_ratio


def test_surrogate_is_bit_equal_to_the_sequence_ratio_at_every_token_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    logps = -20 * torch.rand(64, 33, generator=generator)
    old_logps = logps + 1e-3 * torch.randn(64, 33, generator=generator)
    log_ratio, log_s = surrogate(logps, old_logps, torch.ones(64, 33, dtype=torch.bool))
    assert torch.equal(log_ratio, log_s.expand(64, 33))
    # negative control: the same on paper, with log π left in place
    assert not torch.equal(logps - (logps - log_s), log_s.expand(64, 33))


def test_surrogate_gives_each_token_its_own_gradient_times_the_sequence_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    logps = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    old_logps = logps.detach() + 0.3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [0]])
    log_ratio, log_s = surrogate(logps, old_logps, mask)
    log_ratio.exp().sum().backward()
    assert torch.allclose(logps.grad, log_s.exp().expand_as(logps), rtol=1e-15)
