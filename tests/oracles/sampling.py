"""Log-probs on kept sets of tokens, and the sampling rules that leave such sets, from the definitions.

Everything is float64, one position at a time, by explicit loops; gradients are torch's own through plain operations.

Notation, common to every function:

* ``z[i]``: the scores of position i, such that pi_i = softmax(z[i]).
* ``kept[i]``: the set S of position i, a list of distinct token ids in any order; an empty one means the whole
  vocabulary.
* pi^S(a) = pi(a) / sum_{j in S} pi(j).

The vocabulary of the examples worked by hand has three tokens, of probabilities 1/2, 1/3 and 1/6.
"""

import math
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
    """(N, V) from (N, H) hidden states: the logits, then scaled, then capped, then divided by the temperature.

    tanh(log 3) = (9 - 1) / (9 + 1) = 0.8, so that with scale 2 and cap 2 a logit of log 3 becomes 1.6:

    >>> weight, bias = torch.tensor([[1.0], [0.0], [-1.0]]), math.log(3) * torch.tensor([0.0, 1.0, 0.0]).double()
    >>> hidden = torch.tensor([[math.log(3)]], dtype=torch.float64)
    >>> _rounded(scores(hidden, weight, bias, temperature=0.5, softcap=2.0, logit_scale=2.0))
    [[3.2, 3.2, -3.2]]
    """
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

    >>> z = torch.tensor([[3.0, 2.0, 1.0]]).double().log().expand(3, 3)
    >>> _rounded(log_probs(z, torch.tensor([0, 1, 2]), [[0, 1], [1, 0], []]).exp())  # 3/5, 2/5, 1/6
    [0.6, 0.4, 0.1666666667]
    >>> log_probs(z[:1], torch.tensor([2]), [[2]]).item()
    0.0
    """
    rows = zip(z.double(), targets.tolist(), kept, strict=True)
    return torch.stack([row[a] - torch.logsumexp(row[_members(row, s)], dim=0) for row, a, s in rows])


def kept_mass(z: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    """(N,) sum_{j in S} pi(j), exactly 1 for an empty list.

    >>> z = torch.tensor([[3.0, 2.0, 1.0]]).double().log().expand(3, 3)
    >>> _rounded(kept_mass(z, [[0, 1], [2], []]))  # 5/6, 1/6, 1
    [0.8333333333, 0.1666666667, 1.0]
    """
    rows = zip(torch.softmax(z.double(), dim=1), kept, strict=True)
    return torch.stack([p[_members(p, s)].sum() if len(s) > 0 else torch.ones_like(p[0]) for p, s in rows])


def entropies(z: Tensor) -> Tensor:
    """(N,) -sum_a pi(a) log pi(a), always of the whole vocabulary.

    >>> _rounded(entropies(torch.tensor([[3.0, 2.0, 1.0]]).double().log()))
    [1.0114042647]
    >>> round(math.log(2) / 2 + math.log(3) / 3 + math.log(6) / 6, 10)
    1.0114042647
    """
    log_p = torch.log_softmax(z.double(), dim=1)
    return -(log_p.exp() * log_p).sum(1)


def _top_k(z_row: Tensor, k: int, candidates: Sequence[int]) -> list[int]:
    """The k highest of the candidates, and all that tie with the last of these.

    >>> _top_k(torch.tensor([1.0, 4.0, 2.0, 3.0, 2.0]), 2, [4, 3, 2, 0])
    [2, 3, 4]
    """
    z = z_row.double().tolist()
    highest = sorted((z[a] for a in candidates), reverse=True)[:k]
    return sorted(a for a in candidates if z[a] >= highest[-1])


def _top_p(z_row: Tensor, p: float, candidates: Sequence[int]) -> list[int]:
    """The smallest set of the most probable candidates whose renormalised probabilities sum to at least p.

    At least one. Of equally probable candidates the lower id goes first.

    >>> z = torch.tensor([3.0, 2.0, 1.0]).double().log()
    >>> _top_p(z, 0.49, [0, 1, 2]), _top_p(z, 0.55, [0, 1, 2]), _top_p(z, 0.84, [0, 1, 2])
    ([0], [0, 1], [0, 1, 2])
    >>> _top_p(z, 0.55, [0, 1])  # of the two, 3/5
    [0]
    """
    if p >= 1:  # no sum of rounded probabilities decides this one
        return sorted(candidates)
    probability = _renormalised(z_row, candidates)
    left: list[int] = []
    for a in sorted(candidates, key=lambda a: (-probability[a], a)):
        left.append(a)
        if math.fsum(probability[b] for b in left) >= p:
            break
    return sorted(left)


def _min_p(z_row: Tensor, p: float, candidates: Sequence[int]) -> list[int]:
    """The candidates at least p times as probable as the most probable of them.

    >>> z = torch.tensor([3.0, 2.0, 1.0]).double().log()
    >>> _min_p(z, 0.5, [0, 1, 2]), _min_p(z, 0.33, [0, 1, 2]), _min_p(z, 0.49, [1, 2])
    ([0, 1], [0, 1, 2], [1, 2])
    """
    probability = _renormalised(z_row, candidates)
    highest = max(probability.values())
    return sorted(a for a in candidates if probability[a] >= p * highest)


def sampled_from(z_row: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float | None = None) -> list[int]:
    """What the rules leave of the vocabulary, one after the other, in the order of generate in transformers.

    Rules at their defaults leave everything.

    >>> z = torch.tensor([3.0, 2.0, 1.0]).double().log()
    >>> sampled_from(z), sampled_from(z, top_k=2), sampled_from(z, top_p=0.55), sampled_from(z, min_p=0.7)
    ([0, 1, 2], [0, 1], [0, 1], [0])
    >>> sampled_from(z, top_k=2, top_p=0.55)  # 3/5 of what top-k left
    [0]
    """
    left = list(range(z_row.numel()))
    if top_k > 0:
        left = _top_k(z_row, top_k, left)
    left = _top_p(z_row, top_p, left)
    return left if min_p is None else _min_p(z_row, min_p, left)


def _members(row: Tensor, s: Sequence[int]) -> list[int]:
    """The tokens of the set: those listed, or the whole vocabulary for an empty list."""
    return [int(a) for a in s] or list(range(row.numel()))


def _renormalised(z_row: Tensor, candidates: Sequence[int]) -> dict[int, float]:
    """Of each candidate, its probability among these."""
    z = z_row.double().tolist()
    highest = max(z[a] for a in candidates)
    total = math.fsum(math.exp(z[a] - highest) for a in candidates)
    return {a: math.exp(z[a] - highest) / total for a in candidates}


def _rounded(values: Tensor) -> list[float]:
    """To ten digits, for the examples."""
    return torch.round(values, decimals=10).add(0.0).tolist()
