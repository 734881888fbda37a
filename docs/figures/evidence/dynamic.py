"""Dynamic sampling: the expected update with the option, beside the one without it.

    python docs/figures/evidence/dynamic.py [--write]

The policy has one logit for each prompt, and answers right or wrong. A right answer earns 1. Groups differ only in
their number of right answers, so all batches can be listed. Nothing is sampled, and everything is float64.

Axes: `P` prompts, which are equally frequent; `K` = G + 1 numbers of right answers of a group of `G`.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import shown
import torch
from torch import Tensor

PAGE = Path(__file__).parents[2] / "dynamic-sampling.md"
SIZE, GROUPS = 8, 16
LENGTHS = (4, 1)
"""Tokens of a wrong and of a right answer."""
EPSILON = 1e-4
"""TRL adds it to deviations."""
RATES = torch.linspace(-8, 4, 17, dtype=torch.float64).sigmoid()
"""(P,) success rates of the prompts. Most are hard."""
COPIES = 10
"""Prompts of each rate, if no prompt comes twice."""
EACH = torch.arange(SIZE + 1)
FILTERS = {
    '`"zero_std"`': (EACH > 0) & (EACH < SIZE),
    "`(0.2, 0.8)`": (EACH > 0.2 * SIZE) & (EACH < 0.8 * SIZE),
    "`at_most_half_right`": EACH <= SIZE / 2,
}
"""Name -> (K,) bool, True = the group is kept."""
KEPT = FILTERS['`"zero_std"`']
BATCHES = (2, 4, 8, 16, 32, 64)


def chances(rates: Tensor, size: int) -> Tensor:
    """Return the (P, K) probability that a slot has a prompt and this number of its answers is right."""
    right = torch.arange(size + 1)
    ways = torch.tensor([math.comb(size, int(k)) for k in right], dtype=torch.float64)
    return ways * rates[:, None] ** right * (1 - rates[:, None]) ** (size - right) / len(rates)


def update(
    rates: Tensor,
    size: int,
    groups: int,
    kept: Tensor | None = None,
    *,
    loss_type: str = "grpo",
    scale_rewards: str = "group",
) -> Tensor:
    """Return the (P,) expected gradient of the logits, over batches of independent groups.

    Args:
        rates: (P,) success rates.
        size: G.
        groups: Groups of a batch.
        kept: (K,) bool: all slots have groups of which this is True, as after rounds without end. None: any group.
        loss_type: `"grpo"`, `"dr_grpo"` or `"dapo"`.
        scale_rewards: `"group"`, `"batch"` or `"none"`.
    """
    of_slot, right, answers = chances(rates, size), torch.arange(size + 1).double(), groups * size
    if kept is not None:
        of_slot = of_slot * kept / (of_slot * kept).sum()
    # sums over the right and the wrong answers of a group: advantage times derivative of the log-prob
    of_right = right * (1 - right / size) * (1 - rates[:, None])
    of_wrong = (size - right) * (right / size) * rates[:, None]
    if loss_type == "grpo":
        of_wrong, of_right = of_wrong / LENGTHS[0], of_right / LENGTHS[1]
    slopes = (of_right + of_wrong) / size
    if scale_rewards == "group":
        slopes = slopes / (deviation(right, size) + EPSILON)
    total = torch.arange(answers + 1).double()  # right answers of the batch
    factor = torch.ones_like(total)
    if loss_type == "dapo":
        factor = answers / (LENGTHS[1] * total + LENGTHS[0] * (answers - total))
    if scale_rewards == "batch":
        factor = factor / (deviation(total, answers) + EPSILON)
    of_others = torch.ones(1, dtype=torch.float64)  # probability of their number of right answers
    for _ in range(groups - 1):
        of_others = torch.nn.functional.conv1d(
            of_others[None, None], of_slot.sum(0).flip(0)[None, None], padding=size
        )[0, 0]
    return (of_slot * slopes * (factor.unfold(0, len(of_others), 1) @ of_others)).sum(1)


def deviation(right: Tensor, answers: int) -> Tensor:
    """Return the standard deviation of rewards, `right` of which are 1, as `torch.std` has it."""
    return (right * (answers - right) / (answers * (answers - 1))).sqrt()


def idle(rates: Tensor, size: int, kept: Tensor) -> float:
    """Return z, the share of groups that the filter rejects."""
    return 1 - float((chances(rates, size) * kept).sum())


def filled(groups: int, share: float, rounds: int) -> float:
    """Return the expected share of slots with a kept group after some rounds, if `share` of all groups is kept."""

    @cache
    def after(generated: int, kept: int, left: int) -> float:
        missing = groups - kept
        if missing <= 0 or left == 0:
            return min(kept, groups) / groups
        asked = min(groups, 2 * missing, math.ceil(missing * generated / max(kept, 1))) if generated else groups
        ways = ((math.comb(asked, k) * share**k * (1 - share) ** (asked - k), k) for k in range(asked + 1))
        return sum(chance * after(generated + asked, kept + k, left - 1) for chance, k in ways)

    return after(0, 0, rounds)


def subsets(weights: Sequence[float], most: int) -> Tensor:
    """Return (T, C): the probability that c of t random prompts are kept. The last column has `most` and more."""
    found = torch.zeros(len(weights) + 1, most + 1, dtype=torch.float64)
    found[0, 0] = 1
    for weight in weights:
        longer = found[:-1] * (1 - weight)
        longer[:, 1:] += found[:-1, :-1] * weight
        longer[:, -1] += found[:-1, -1] * weight
        found[1:] += longer
    ways = [[float(math.comb(len(weights), t))] for t in range(len(weights) + 1)]
    return found / torch.tensor(ways, dtype=torch.float64)


def in_passes(rates: Tensor, size: int, groups: int, kept: Tensor, copies: int) -> Tensor:
    """Return (P,) how many groups of a batch are tried for prompts of a rate, if no prompt comes twice.

    The first round takes prompts of one order, and all further rounds those of another, until nothing is missing. Each
    rate has some copies.
    """
    weights = (chances(rates, size) * kept).sum(1).mul(len(rates)).repeat_interleave(copies).tolist()
    first = subsets(weights, groups)[groups]
    tried = []
    for number in range(0, len(weights), copies):
        before = subsets([*weights[:number], *weights[number + 1 :]], groups)  # (T, C) of the prompts before this one
        few = before.cumsum(1).mean(0)  # that at most c of them are kept, at any place of the order
        tried.append(sum(float(first[groups - missing] * few[missing - 1]) for missing in range(1, groups + 1)))
    return groups / len(rates) + copies * torch.tensor(tried, dtype=torch.float64)


Outcome = tuple[float, float, float]
"""1 - cosine to the update without the option and to the true gradient, and the size as a multiple of the former."""


def beside(found: Tensor, without: Tensor) -> Outcome:
    """Compare two expected updates (P,)."""

    def turned(other: Tensor) -> float:
        return float(1 - found @ other / (found.norm() * other.norm()))

    return turned(without), turned(RATES * (1 - RATES)), float(found.norm() / without.norm())


@cache
def outcome(loss_type: str, scale_rewards: str, name: str, groups: int) -> Outcome:
    """Compare the expected update with a filter and without the option."""
    options = {"loss_type": loss_type, "scale_rewards": scale_rewards}
    without, found = (update(RATES, SIZE, groups, kept, **options) for kept in (None, FILTERS[name]))
    return beside(found, without)


@cache
def of_passes(groups: int) -> Outcome:
    """Compare as above if no prompt comes twice."""
    without = update(RATES, SIZE, groups)
    return beside(without * in_passes(RATES, SIZE, groups, KEPT, COPIES) * len(RATES) / groups, without)


def tables() -> dict[str, str]:
    """Return the table of the page by name."""
    zero_std, middle, half = FILTERS
    rows = {
        "`grpo`": outcome("grpo", "group", zero_std, GROUPS),
        '`dr_grpo`, `scale_rewards="none"`': outcome("dr_grpo", "none", zero_std, GROUPS),
        "`dapo`": outcome("dapo", "group", zero_std, GROUPS),
        '`scale_rewards="batch"`': outcome("grpo", "batch", zero_std, GROUPS),
        f"filter {middle}": outcome("grpo", "group", middle, GROUPS),
        f"filter {half}": outcome("grpo", "group", half, GROUPS),
    }
    cells = [[name, *map(shown.digits, found)] for name, found in rows.items()]
    heading = ["", "1 - cosine to the update without it", "to the true gradient", "size"]
    return {"dynamic": shown.rendered(heading, cells)}


def draw(path: Path) -> None:
    """Draw the update by the success rate, and the change of direction by the size of the batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    rates = torch.linspace(0, 1, 201, dtype=torch.float64)
    curves = {
        "true gradient": rates * (1 - rates),
        'scale_rewards="none"': update(rates, SIZE, 1, KEPT, loss_type="dr_grpo", scale_rewards="none"),
        'scale_rewards="group"': update(rates, SIZE, 1, KEPT, loss_type="dr_grpo"),
        "group, filter (0.2, 0.8)": update(rates, SIZE, 1, FILTERS["`(0.2, 0.8)`"], loss_type="dr_grpo"),
        "share of groups with a signal": (chances(rates, SIZE) * KEPT).sum(1),
    }
    for i, (name, curve) in enumerate(curves.items()):
        left.plot(rates, curve / curve.max(), shown.STYLES[i % 4], color=shown.COLOURS[i], linewidth=2, label=name)
    left.set(
        title=f"Expected update of a prompt, {SIZE} answers", xlabel="success rate", ylabel="relative to its maximum"
    )
    left.legend(loc="lower center", fontsize="small")
    drawn = {
        'loss_type="dapo"': [outcome("dapo", "group", '`"zero_std"`', n)[0] for n in BATCHES],
        'scale_rewards="batch"': [outcome("grpo", "batch", '`"zero_std"`', n)[0] for n in BATCHES],
        f"no prompt of {COPIES * len(RATES)} comes twice": [of_passes(n)[0] for n in BATCHES],
        "filter (0.2, 0.8)": [outcome("grpo", "group", "`(0.2, 0.8)`", n)[0] for n in BATCHES],
        "filter: at most half are right": [outcome("grpo", "group", [*FILTERS][2], n)[0] for n in BATCHES],
    }
    for i, (name, curve) in enumerate(drawn.items()):
        style, colour = shown.STYLES[i % 4], shown.COLOURS[i + 1]
        right.plot(BATCHES[: len(curve)], curve, style, color=colour, marker="o", linewidth=2, label=name)
    right.set(title="Change of direction by dynamic sampling", xlabel="groups in a batch", ylabel="1 - cosine")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.legend(fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.9))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    shown.run(__file__, tables, draw, PAGE)
