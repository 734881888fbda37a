"""Longer completions: how bias and variance grow with the number of tokens.

    python docs/figures/evidence/long.py [--write]

The vocabulary has two tokens, drawn independently. The order of tokens then changes nothing, so a completion of 1,024
tokens is one of 1,025 counts, each with its number of orders. It earns 1 if it has more of the second token than the
policy's mean. The stale policy has moved along the true gradient. The engine errs in one direction in the first half
of a completion and in the other direction in the second half, so there are two counts.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import exact
import shown
import torch
from exact import INF, Method, Pass, Task, softmax
from torch import Tensor

LENGTHS = {"stale": (4, 16, 64, 256, 1024), "engine": (2, 4, 8, 16, 32, 64, 128)}
SHOWN = {"stale": (4, 1024), "engine": (4, 128)}
CASES = ("stale", "engine")
SPREAD = {"stale": 0.01, "engine": 0.1}
"""Standard deviation of a token's log-ratio. With 0.1, about as many ratios are outside 0.8 to 1.2 as with int8."""
TRUNCATE: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


def counts(lengths: Sequence[int], above: float) -> Task:
    """Return a task of two tokens whose completions are listed by their counts.

    Args:
        lengths: Numbers of tokens of each kind of position. The policy has a row for each kind.
        above: The share of the second token above which a completion earns 1.
    """
    grid = torch.meshgrid(*(torch.arange(length + 1) for length in lengths), indexing="ij")
    numbers = [own.flatten() for own in grid]
    kinds = zip(numbers, lengths, strict=True)
    tokens = torch.cat([(torch.arange(length) < number[:, None]).long() for number, length in kinds], 1)
    prefixes = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand_as(tokens)
    # the logarithm of the binomial coefficient of each kind
    factorials = [torch.arange(1, length + 2).double().lgamma() for length in lengths]
    copies = sum(own[-1] - own[n] - own[-1 - n] for n, own in zip(numbers, factorials, strict=True))
    rewards = (tokens.double().mean(1) > above).double()
    return Task(tokens, torch.ones_like(tokens, dtype=torch.bool), prefixes, rewards, copies)


@cache
def passes(seed: int, length: int, case: str) -> tuple[Task, Pass, Tensor]:
    """Return a task, its pass, and the true gradient."""
    kinds = 2 if case == "engine" else 1
    policy = torch.tensor([[0.0, 0.5 * exact.gaussians(seed, 1).item()]] * kinds, dtype=torch.float64)
    chance = softmax(policy).exp()[0, 1]
    task = counts([length // kinds] * kinds, float(chance))
    error = torch.tensor([[0.0, 1.0], [0.0, -1.0]])[:kinds] * SPREAD[case] / (chance * (1 - chance)).sqrt()
    if case == "engine":
        given = Pass.of(task, softmax, policy, softmax(policy), softmax(policy + error))
    else:
        given, policy = Pass.of(task, softmax, policy + error, softmax(policy)), policy + error
    return task, given, task.gradient(softmax, policy)


def arms(case: str) -> dict[str, Method]:
    """Return the arms of a case by name. All are drawn."""
    if case == "stale":
        return {
            "no ratio": Method("none"),
            "GRPO, clip 0.2": Method(),
            "GSPO, clip 3e-4, 4e-4": Method("gspo", 3e-4, 4e-4),
            "GSPO, no clip": Method("gspo", INF),
            "GMPO, clip 0.4": Method("gmpo", 0.4),
            "product of the ratios, no clip": Method("product"),
        }
    return {
        "no correction": Method(),
        "`token_truncate`, 3": Method(**TRUNCATE),
        "`sequence_mask`, 3": Method(vllm_importance_sampling_mode="sequence_mask"),
        "`sequence_truncate`, 3": Method(vllm_importance_sampling_mode="sequence_truncate"),
        "`sequence_truncate`, no limit": Method(
            vllm_importance_sampling_mode="sequence_truncate", vllm_importance_sampling_clip_max=INF
        ),
        "geometric mask 0.99, 1.01": Method(geometric_mask_range=(0.99, 1.01)),
        "`token_truncate`, geometric mask 0.99, 1.01": Method(geometric_mask_range=(0.99, 1.01), **TRUNCATE),
    }


@cache
def outcomes(length: int, case: str) -> dict[str, Tensor]:
    """Return arm -> (4,) for a length, the median over tasks."""
    tasks = [passes(seed, length, case) for seed in range(shown.TASKS)]
    return shown.medians({name: [m.outcome(p, t, true) for t, p, true in tasks] for name, m in arms(case).items()})


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    found = {}
    for case in CASES:
        rows = [[name, *(shown.cells(outcomes(n, case)[name]) for n in SHOWN[case])] for name in arms(case)]
        found[f"long, {case}"] = shown.rendered(["method", *(f"{n:,} tokens" for n in SHOWN[case])], rows)
    return found


def draw(path: Path) -> None:
    """Draw all arms over the length, a row for each case."""
    with shown.picture(path, 2) as grid:
        for axes, case in zip(grid, CASES, strict=True):
            curves = {name: [outcomes(n, case)[name] for n in LENGTHS[case]] for name in arms(case)}
            shown.panels(axes, LENGTHS[case], curves, columns="023")
            for axis in axes:
                axis.set(xlabel=f"tokens ({case}: log-ratios spread by {SPREAD[case]:g})", xscale="log")
                axis.set_xticks(LENGTHS[case], [str(n) for n in LENGTHS[case]])
                axis.minorticks_off()
            axes[1].set_yscale("log")


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
