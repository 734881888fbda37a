"""Staleness: the completions come from an older policy.

    python docs/figures/evidence/staleness.py [--write]

The policy takes exact gradient steps away from the policy that sampled. Nothing else differs.
"""

from functools import cache
from pathlib import Path

import exact
import shown
import torch
from exact import INF, Method, Pass, Task, softmax
from torch import Tensor

VOCABULARY, LENGTH, RATE = 6, 3, 0.5
STEPS = (0, 1, 2, 4, 8, 16, 32)
SHOWN = (4, 16, 32)
"""Steps of the table."""
LOGGED = 8
"""Step from which the off-policy mask's threshold is set, as docs/methods/masks.md advises."""


def problem(seed: int) -> tuple[Task, Tensor]:
    """Return a task whose completions earn 1 with probability 1/4 or else 0, and the logits of the sampler."""
    task = Task.of(VOCABULARY, LENGTH, exact.one_in_four(seed))
    return task, exact.gaussians(1000 + seed, task.size, VOCABULARY)


@cache
def stale(seed: int, steps: int) -> tuple[Task, Pass, Tensor]:
    """Return a task, the pass after some steps, and the true gradient there."""
    task, start = problem(seed)
    theta = task.climb(start, steps, RATE)
    return task, Pass.of(task, softmax, theta, softmax(start)), task.gradient(softmax, theta)


@cache
def threshold() -> float:
    """Return the off-policy mask's threshold that 5 % of all completions exceed, with two digits."""
    statistics, chances = [], []
    for seed in range(shown.TASKS):
        _, given, _ = stale(seed, LOGGED)
        statistics.append((given.sampler_logps - given.logps).mean(-1))
        chances.append(given.sampler_logps.sum(-1).exp() / shown.TASKS)
    ordered, order = torch.cat(statistics).sort()
    place = torch.searchsorted(torch.cat(chances)[order].cumsum(0), torch.tensor(0.95, dtype=torch.float64))
    return float(f"{ordered[place]:.2g}")


def arms() -> dict[str, Method]:
    """Return the arms by name. The first seven are drawn."""
    mask = threshold()
    return {
        "no ratio": Method("none"),
        "token ratio, no clip": Method(epsilon=INF),
        "GRPO, clip 0.2": Method(),
        f"GRPO, off-policy mask {mask:g}": Method(off_policy_mask_threshold=mask),
        "GSPO, clip 3e-4, 4e-4": Method("gspo", 3e-4, 4e-4),
        "GSPO, no clip": Method("gspo", INF),
        "GMPO, clip 0.4": Method("gmpo", 0.4),
        "product of the ratios, no clip": Method("product"),
        "GRPO, `delta=4`": Method(delta=4.0),
        "GSPO, clip 0.2": Method("gspo"),
        "GSPO-token, clip 3e-4, 4e-4": Method("gspo_token", 3e-4, 4e-4),
        'DPPO, `"tv"`, 0.2': Method("dppo"),
        'DPPO, `"kl"`, 0.05': Method("dppo", 0.05, dppo_divergence="kl"),
        "M2PO, budget 0.04": Method("m2po"),
        "GRPO, penalty 1e-3": Method(sampler_penalty=1e-3),
        f"token ratio, only the mask {mask:g}": Method(epsilon=INF, off_policy_mask_threshold=mask),
    }


@cache
def outcomes(steps: int) -> dict[str, Tensor]:
    """Return arm -> (4,) after some steps, the median over tasks."""
    tasks = [stale(seed, steps) for seed in range(shown.TASKS)]
    return shown.medians({name: [arm.outcome(p, t, true) for t, p, true in tasks] for name, arm in arms().items()})


def outside(steps: int) -> float:
    """Return the share of ratios outside 0.8 to 1.2 after some steps, the mean over tasks."""
    return sum(float(p.share_outside(t)) for t, p, _ in (stale(s, steps) for s in range(shown.TASKS))) / shown.TASKS


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    heading = ["method", *(f"{n} steps ({outside(n):.1%} outside)" for n in SHOWN)]
    rows = [[name, *(shown.cells(outcomes(n)[name]) for n in SHOWN)] for name in arms()]
    return {"staleness": shown.rendered(heading, rows)}


def draw(path: Path) -> None:
    """Draw the first seven arms over the steps."""
    with shown.picture(path, 1) as (axes,):
        names = [*arms()][:7]
        shown.panels(axes, STEPS, {name: [outcomes(n)[name] for n in STEPS] for name in names})
        for axis in axes:
            axis.set(xlabel="exact gradient steps since sampling")
            axis.set_xscale("symlog", base=2, linthresh=1)
            axis.set_xticks(STEPS, [str(n) for n in STEPS])


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
