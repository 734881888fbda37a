"""Micro-batches whose log-probs we choose, and what a trainer makes of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOW, HIGH = 0.2, 0.27


class Outcome(NamedTuple):
    loss: Tensor
    grad: Tensor  # with respect to the policy's log-probs, (B, T)
    metrics: dict[str, float]


class Batch(NamedTuple):
    logps: Tensor
    old_logps: Tensor
    mask: Tensor
    advantages: Tensor

    def inputs(self, **others: Any) -> dict[str, Any]:
        """As TRL hands them to `_compute_loss`."""
        sequences, tokens = self.mask.shape
        ids = torch.ones(sequences, tokens, dtype=torch.long)
        return {
            "prompt_ids": torch.ones(sequences, 2, dtype=torch.long),
            "prompt_mask": torch.ones(sequences, 2, dtype=torch.long),
            "completion_ids": ids,
            "completion_mask": self.mask.int(),
            "advantages": self.advantages,
            "old_per_token_logps": self.old_logps,
            "num_items_in_batch": self.mask.sum(),
            **others,
        }


def random_batch(sequences: int = 6, tokens: int = 5, *, spread: float = 0.5, per_token: bool = False) -> Batch:
    """Float64; log-ratios of the size of the clip range, unequal lengths, an empty completion, a zero advantage."""
    generator = torch.Generator().manual_seed(sequences * 100 + tokens)
    noise = lambda: torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)
    old_logps = -noise().abs() - 0.1
    shift = spread * torch.randn(sequences, 1, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, tokens + 1, (sequences, 1), generator=generator)
    lengths[-1] = 0
    advantages = noise() if per_token else noise()[:, 0]
    advantages[0] = 0.0
    return Batch(old_logps + shift + 0.3 * noise(), old_logps, torch.arange(tokens) < lengths, advantages)


Evaluate = Callable[..., Outcome]
TRL_SEQUENCE_LEVEL = {"loss_type": "grpo", "importance_sampling_level": "sequence", "ours": False}
