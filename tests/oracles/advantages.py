"""Reference values for advantages from step rewards in group-relative RL, written from the formulas alone.

Everything is in `Fraction`; only square roots and the returned values are rounded to floats. i counts completions,
j steps, t tokens.

* A batch is a list of completions. Each ``group_size`` consecutive ones share a prompt and form a group.
* A completion is ``(tokens, steps)``, or None: unscored. Its tokens are 0, ..., tokens - 1.
* ``steps`` is a list of ``(end, reward)``. ``end`` is exclusive (the step's last token is end - 1), strictly
  increasing, and at most ``tokens``. A completion without a step is scored.
* An unscored completion takes no part in any mean, std or count. None does not say how many tokens it has, so its list
  of advantages is empty: its advantage is 0 at whatever tokens it has.
* std has n - 1 in its denominator, and is taken as 0 for fewer than two values.
* ``scale`` is "group", "batch" or "none".

Papers:

* DeepSeekMath: arXiv 2402.03300, section 4.1.3 (process supervision).
"""

import math
from fractions import Fraction

EPS = Fraction(1, 10_000)

Completion = tuple[int, list[tuple[int, float]]] | None


def _groups(batch: list[Completion], group_size: int) -> list[list[Completion]]:
    """The batch, cut into consecutive groups."""
    assert len(batch) % group_size == 0
    return [batch[start : start + group_size] for start in range(0, len(batch), group_size)]


def _mean(values: list[Fraction]) -> Fraction:
    """The mean; 0 for no values."""
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def _std(values: list[Fraction]) -> Fraction:
    """The std with n - 1 in the denominator; 0 for fewer than two values."""
    if len(values) < 2:
        return Fraction(0)
    mean = _mean(values)
    return Fraction(math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def _divisor(of_group: Fraction, of_batch: Fraction, scale: str) -> Fraction:
    """The spread of the group or of the batch, + 1e-4; or 1."""
    if scale == "group":
        return of_group + EPS
    if scale == "batch":
        return of_batch + EPS
    assert scale == "none"
    return Fraction(1)


# Process supervision


def _pool(completions: list[Completion]) -> list[Fraction]:
    """All step rewards of all scored completions."""
    return [Fraction(reward) for completion in completions if completion is not None for _, reward in completion[1]]


def process(batch: list[Completion], group_size: int, scale: str) -> list[list[float]]:
    """The sum of the normalised rewards of the steps that end at or after the token.

    A_it = sum_{j : end_ij - 1 >= t} r~_ij, with r~_ij = (r_ij - mean(R)) / (std(R) + 1e-4)

    R is the pool of all step rewards of the group. "batch" takes the std over all step rewards of the batch; "none"
    divides by 1. The mean is always the group's.
    """
    advantages = []
    for group in _groups(batch, group_size):
        mean = _mean(_pool(group))
        divisor = _divisor(_std(_pool(group)), _std(_pool(batch)), scale)
        for completion in group:
            if completion is None:
                advantages.append([])
                continue
            tokens, steps = completion
            normalised = [(end, (Fraction(reward) - mean) / divisor) for end, reward in steps]
            advantages.append([float(sum(r for end, r in normalised if end - 1 >= t)) for t in range(tokens)])
    return advantages


# Return-to-go


def _covering_steps(tokens: int, steps: list[tuple[int, float]]) -> list[tuple[int, Fraction]]:
    """The steps, and one more of reward 0 up to the last token if there is no step or the last one ends before it."""
    covering = [(end, Fraction(reward)) for end, reward in steps]
    if not covering or covering[-1][0] < tokens:
        covering.append((tokens, Fraction(0)))
    return covering


def _returns(completion: Completion) -> list[Fraction]:
    """R_i0, R_i1, ...: R_ij is the sum of the rewards of steps j, j + 1, ... . An unscored completion has no step."""
    if completion is None:
        return []
    rewards = [reward for _, reward in _covering_steps(*completion)]
    return [sum(rewards[j:], Fraction(0)) for j in range(len(rewards))]


def _running(completions: list[Completion], j: int) -> list[Fraction]:
    """R_ij of every completion i that is running at j: that has a step j."""
    return [_returns(completion)[j] for completion in completions if j < len(_returns(completion))]


def _unscaled(group: list[Completion]) -> list[list[Fraction]]:
    """U_ij = (G - 1)/G (R_ij - b_ij), for every completion i and each of its steps j."""
    g = sum(completion is not None for completion in group)
    unscaled = []
    for i, completion in enumerate(group):
        others = group[:i] + group[i + 1 :]
        returns = enumerate(_returns(completion))
        unscaled.append([Fraction(g - 1, g) * (r - _mean(_running(others, j))) for j, r in returns])
    return unscaled


def _spread(groups: list[list[Completion]]) -> Fraction:
    """D: the largest std of the returns at a step number, or |U_ij| of a completion alone in its group at j; or 0."""
    together = [completion for group in groups for completion in group]
    spread = Fraction(0)
    for j in range(max(len(_returns(completion)) for completion in together)):
        if len(_running(together, j)) >= 2:
            spread = max(spread, _std(_running(together, j)))
        for group in groups:
            if len(_running(group, j)) == 1:
                for row in _unscaled(group):
                    if j < len(row):
                        spread = max(spread, abs(row[j]))
    return spread


def return_to_go(batch: list[Completion], group_size: int, scale: str) -> list[list[float]]:
    """The return from the token's step on, less that of the other completions at the same step.

    A_it = U_ij / divisor, with token t in step j of completion i, and U_ij = (G - 1)/G (R_ij - b_ij)

    G counts the group's scored completions. b_ij is the mean of R_kj over the others of them that are running at j
    (that have a step j), and 0 if there is none. G = 1 gives 0. divisor is 1 for "none", and D + 1e-4 for the others.

    D("group") is the largest of
    * for every step number j at which two or more of the group's completions are running: the std of R_ij over them;
    * for every completion that is alone in its group at step number j: |U_ij|;
    and 0 if there are neither. D("batch") is the largest of the same over the whole batch: the std of R_ij over all
    completions of the batch that are running at j, if there are two or more; alone still means alone in its group.
    """
    groups = _groups(batch, group_size)
    advantages = []
    for group in groups:
        divisor = _divisor(_spread([group]), _spread(groups), scale)
        for completion, unscaled in zip(group, _unscaled(group), strict=True):
            row = []
            for (end, _), u in zip(_covering_steps(*completion) if completion else [], unscaled, strict=True):
                row += [float(u / divisor)] * (end - len(row))
            advantages.append(row)
    return advantages
