"""Estimates from n sampled answers to one problem: pass@k, and the majority of k."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb

import torch


def pass_at_k(answers: Sequence[Hashable | None], truth: Hashable, k: int) -> float:
    """Return the probability that k of the n answers, drawn without replacement, contain a right one.

    This is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k), where
    c answers are right.

    Args:
        answers: The n sampled answers to one problem.
        truth: The right answer.
        k: From 1 to n.
    """
    wrong = sum(answer != truth for answer in answers)
    return 1 - comb(wrong, k) / comb(len(answers), k)


def maj_at_k(answers: Sequence[Hashable | None], truth: Hashable, k: int) -> float:
    """Return the probability that the majority of k of the n answers, drawn without replacement, is right.

    This is exact: it counts the subsets by the numbers of equal answers. If several answers have the most votes, one
    of them wins at random, with equal odds. None does not vote, and nobody wins if all k are None.

    Args:
        answers: The n sampled answers to one problem, n up to 1,000. None: the answer could not be read.
        truth: The right answer.
        k: From 1 to n.
    """
    others = Counter(answers)
    right = others.pop(truth, 0)
    silent = others.pop(None, 0)
    wins = 0.0
    for votes in range(1, min(right, k) + 1):
        left = k - votes
        # ways[t, m]: choices of m answers that are not right, t of which tie, and none has more votes
        ways = torch.zeros((left // votes + 1, left + 1), dtype=torch.float64)
        ways[0] = torch.tensor([float(comb(silent, m)) for m in range(left + 1)], dtype=torch.float64)
        for count in others.values():
            before = ways
            ways = torch.zeros_like(before)
            for own in range(min(count, votes, left) + 1):
                tie = int(own == votes)
                ways[tie:, own:] += float(comb(count, own)) * before[: len(before) - tie, : left + 1 - own]
        winners = torch.arange(1, len(ways) + 1)
        won = float((ways[:, left] / winners).sum())
        wins += comb(right, votes) * won
    return wins / comb(len(answers), k)
