"""Log-probs on kept sets of tokens, from the definitions.

Everything is float64, one position at a time, by explicit loops; gradients are torch's own through plain operations.

Notation, common to every function:

* ``z[i]``: the scores of position i, such that pi_i = softmax(z[i]).
* ``kept[i]``: the set S of position i, a list of distinct token ids in any order; an empty one means the whole
  vocabulary.
* pi^S(a) = pi(a) / sum_{j in S} pi(j).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """(N, V) from (N, H) hidden states: the logits, then scaled, then capped, then divided by the temperature."""
    rows = []
    for h in hidden.double():
        z = weight.double() @ h
        if bias is not None:
            z = z + bias.double()
        z = z * logit_scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        rows.append(z / temperature)
    return torch.stack(rows)


def log_probs(z: Tensor, targets: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    """(N,) log pi^S(a) = z_a - log sum_{j in S} exp(z_j), of the token a = ``targets[i]`` of each row.

    Only the formula: that a is in S is for the caller to see to.
    """
    rows = zip(z.double(), targets.tolist(), kept, strict=True)
    return torch.stack([row[a] - torch.logsumexp(row[_members(row, s)], dim=0) for row, a, s in rows])


def kept_mass(z: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    """(N,) sum_{j in S} pi(j), exactly 1 for an empty list."""
    rows = zip(torch.softmax(z.double(), dim=1), kept, strict=True)
    return torch.stack([p[_members(p, s)].sum() if len(s) > 0 else torch.ones_like(p[0]) for p, s in rows])


def entropies(z: Tensor) -> Tensor:
    """(N,) -sum_a pi(a) log pi(a), always of the whole vocabulary."""
    log_p = torch.log_softmax(z.double(), dim=1)
    return -(log_p.exp() * log_p).sum(1)


def _members(row: Tensor, s: Sequence[int]) -> list[int]:
    """The tokens of the set: those listed, or the whole vocabulary for an empty list."""
    return [int(a) for a in s] or list(range(row.numel()))
