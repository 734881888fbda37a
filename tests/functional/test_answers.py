"""pass@k and maj@k against all subsets."""

import itertools
import random
from collections import Counter
from math import comb
from typing import Any

import pytest

from trl_steady.functional.answers import maj_at_k, pass_at_k


def votes(answers: tuple[Any, ...], truth: Any) -> float:
    """Return the share of the winners, those with the most votes, that is right. None does not vote."""
    counts = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer in counts if counts[answer] == max(counts.values())]
    return winners.count(truth) / len(winners) if winners else 0.0


@pytest.mark.parametrize("n", range(1, 13))
def test_both_metrics_equal_the_mean_over_all_subsets(n: int) -> None:
    rng = random.Random(n)
    for kinds in (1, 2, 4, 12):
        answers = rng.choices([None, *range(kinds)], k=n)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(answers, k))
            passed = sum(0 in subset for subset in subsets) / len(subsets)
            voted = sum(votes(subset, 0) for subset in subsets) / len(subsets)
            assert pass_at_k(answers, 0, k) == pytest.approx(passed, abs=1e-12)
            assert maj_at_k(answers, 0, k) == pytest.approx(voted, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a", "b"], 1 / 2),
        (["a", "b", "c"], 1 / 3),
        (["a", "a", "b", "b", "c", None], 1 / 2),
        (["a", None, None], 1),
        (["b", None], 0),
        ([None, None], 0),
    ],
)
def test_ties_are_drawn_and_unread_answers_do_not_vote(answers: list[Any], expected: float) -> None:
    assert maj_at_k(answers, "a", len(answers)) == pytest.approx(expected)


def test_the_majority_among_64_samples_is_exact() -> None:
    n, right = 64, 35
    answers = ["a"] * right + ["b"] * (n - right)
    for k in (1, 2, 4, 8, 16, 32, 64):
        odds = [comb(right, own) * comb(n - right, k - own) / comb(n, k) for own in range(k + 1)]
        expected = sum(odd * (1.0 if 2 * own > k else 0.5 * (2 * own == k)) for own, odd in enumerate(odds))
        assert maj_at_k(answers, "a", k) == pytest.approx(expected, rel=1e-12)
    # of different answers, each is as likely to win
    assert maj_at_k(range(n), 7, 16) == pytest.approx(1 / n, rel=1e-12)
