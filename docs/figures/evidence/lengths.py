"""Unequal lengths: how a loss averages over tokens, when longer completions earn more.

    python docs/figures/evidence/lengths.py [--write]

Completions have one to four tokens, the last of which may end them. The policy's lengths have the mean 2.5 and a
spread that varies. The reward is normal, plus half of the length.
"""

from functools import cache
from pathlib import Path

import exact
import shown
import torch
from exact import INF, Method, Pass, Task, softmax
from torch import Tensor

VOCABULARY, LENGTH, RATE = 4, 4, 0.5
WIDTHS = (0.3, 0.4, 0.5, 0.7, 1.0, 1.5, INF)
"""Widths of the normal curve on the lengths 1 to 4 that gives their probabilities."""
STEPS = 2
"""Exact gradient steps since sampling, in the stale case."""


def problem(seed: int, width: float) -> tuple[Task, Tensor]:
    """Return a task and logits under which the lengths have the given spread."""
    task = Task.of(VOCABULARY, LENGTH, lambda n: exact.gaussians(seed, n), ends=True)
    lengths = task.mask.sum(-1)
    task = Task(task.tokens, task.mask, task.prefixes, task.rewards + lengths / 2)
    theta = exact.gaussians(7000 + seed, task.size, VOCABULARY)
    each = torch.arange(1, LENGTH + 1).double()
    chances = (-((each - each.mean()) ** 2) / (2 * width**2)).softmax(0)
    ends = chances / chances.flip(0).cumsum(0).flip(0)  # that a completion ends, given that it has come so far
    depths = torch.zeros(task.size, dtype=torch.long)
    for t in range(LENGTH):
        depths[task.prefixes[task.mask[:, t], t]] = t
    before_last = depths < LENGTH - 1  # where nothing but the end token ends a completion
    of_ends = theta[:, :-1].logsumexp(-1) + ends[depths].logit()
    theta[:, -1] = of_ends.where(before_last, theta[:, -1])
    return task, theta


def arms() -> dict[str, Method]:
    """Return the arms by name."""
    return {
        '`"grpo"`': Method(),
        '`"dapo"`': Method(reduction="rollout_tokens"),
        '`"dr_grpo"`': Method(reduction="constant"),
        '`"gspo"`, clip 0.2': Method("gspo"),
        '`"gspo_token"`, clip 0.2': Method("gspo_token"),
        '`"gmpo"`, clip 0.4': Method("gmpo", 0.4),
        '`"gspo"`, clip 3e-4, 4e-4': Method("gspo", 3e-4, 4e-4),
    }


@cache
def passes(seed: int, width: float, steps: int) -> tuple[Task, Pass, Tensor, Tensor]:
    """Return a task, the pass after some steps, the true gradient there, and the sampler's spread of the length."""
    task, start = problem(seed, width)
    theta = task.climb(start, steps, RATE)
    given = Pass.of(task, softmax, theta, softmax(start))
    lengths = task.mask.sum(-1).double()
    spread = (given.probabilities(task) @ (lengths - given.mean_length(task)) ** 2).sqrt()
    return task, given, task.gradient(softmax, theta), spread


@cache
def outcomes(width: float, steps: int) -> dict[str, Tensor]:
    """Return arm -> (4,), the median over tasks."""
    tasks = [passes(seed, width, steps) for seed in range(shown.TASKS)]
    return shown.medians({name: [arm.outcome(p, t, true) for t, p, true, _ in tasks] for name, arm in arms().items()})


def spread(width: float) -> float:
    """Return the standard deviation of the length, which all tasks share."""
    return float(passes(0, width, 0)[3])


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    cases = [(0.3, 0), (INF, 0), (INF, STEPS)]
    heading = [f"spread {spread(width):.2f}" + (f", {steps} steps" if steps else "") for width, steps in cases]
    rows = [[name, *(shown.cells(outcomes(*case)[name]) for case in cases)] for name in arms()]
    return {"lengths": shown.rendered(["`loss_type`", *heading], rows)}


def draw(path: Path) -> None:
    """Draw all arms over the spread, a row without and a row with stale completions."""
    with shown.picture(path, 2) as grid:
        for axes, steps, names in ((grid[0], 0, [*arms()][:6]), (grid[1], STEPS, [*arms()])):
            x = [spread(width) for width in WIDTHS]
            shown.panels(axes, x, {name: [outcomes(width, steps)[name] for width in WIDTHS] for name in names})
            for axis in axes:
                axis.set(xlabel="spread of the length" + (f", after {steps} steps" if steps else ", on-policy"))


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
