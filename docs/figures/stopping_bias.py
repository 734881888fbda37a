"""What step rewards do to the length of a completion where going on is worth nothing.

Run it to draw `stopping_bias.png` beside this file. Expectations are sums over all outcomes, so nothing is noise.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trl_steady.functional import advantages

Rewards = Mapping[float, float]  # what a step is worth: each value with its probability
Formula = Callable[..., Tensor]

FIRST_GOOD: Rewards = {0.0: 1 / 2, 1.0: 1 / 2}
FIRST_BAD: Rewards = {0.0: 1 / 2, -1.0: 1 / 2}
SYMMETRIC: Rewards = {-0.5: 1 / 2, 0.5: 1 / 2}  # mean 0: from every decision on the expected rest is 0
SKEWED: Rewards = {-1 / 3: 3 / 4, 1.0: 1 / 4}  # mean 0 too

# where the token stands with which the policy goes on or stops
LAST_OF_THE_STEP = "last token of a step"
FIRST_OF_THE_NEXT = "first token of the next"
PLACEMENTS = (LAST_OF_THE_STEP, FIRST_OF_THE_NEXT)

STEPS = 4
UPDATES = 400
LEARNING_RATE = 1.0
CURVES: dict[str, tuple[Formula, tuple[Rewards, ...]]] = {
    "process, first step worth 1/2 on average": (advantages.process, (FIRST_GOOD,)),
    "process, first step worth -1/2": (advantages.process, (FIRST_BAD,)),
    "return_to_go, either": (advantages.return_to_go, (FIRST_GOOD, FIRST_BAD)),  # lie on each other
}

# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = dict(zip(CURVES, ("#E69F00", "#CC79A7", "#0072B2"), strict=True))


class Toy:
    """All outcomes of a group: one step at least, then after step j another with probability sigmoid(theta[j])."""

    def __init__(self, first: Rewards, later: Rewards, steps: int, group_size: int = 3) -> None:
        self.steps, self.group_size = steps, group_size
        rewards, chances = [], []  # of one completion
        outcomes: list[tuple[list[float], float]] = [([], 1.0)]
        for step in range(steps):
            outcomes = [
                ([*before, reward], so_far * chance)
                for before, so_far in outcomes
                for reward, chance in (later if step else first).items()
            ]
            rewards += [[*outcome, *[torch.nan] * (steps - 1 - step)] for outcome, _ in outcomes]
            chances += [chance for _, chance in outcomes]
        self.rewards = torch.tensor(rewards, dtype=torch.float64)  # (N, S)
        self.chances = torch.tensor(chances, dtype=torch.float64)  # (N,), given how many steps there are
        self.last = (~self.rewards.isnan()).sum(1) - 1  # (N,)
        self.members = self.groups_of(len(rewards))
        decisions = torch.arange(steps - 1)  # and (S, S - 1), by the last step:
        self.decides = torch.arange(steps)[:, None] >= decisions
        self.goes_on = torch.arange(steps)[:, None] > decisions

    def groups_of(self, kinds: int) -> Tensor:
        """(groups, group_size): all ways to fill a group."""
        return torch.cartesian_prod(*torch.arange(kinds).expand(self.group_size, -1))

    def probabilities(self, theta: Tensor) -> Tensor:
        """(S,), that a step is the last."""
        each = torch.where(self.goes_on, theta.sigmoid(), (-theta).sigmoid())
        return each.where(self.decides, 1).prod(1)

    def expected_steps(self, theta: Tensor) -> Tensor:
        """How many a completion has."""
        return self.probabilities(theta) @ torch.arange(1, self.steps + 1).double()

    def expected_reward(self, theta: Tensor) -> Tensor:
        """The sum over the steps of a completion: what a policy gradient ought to raise."""
        return self.probabilities(theta)[self.last] @ (self.chances * self.rewards.nansum(1))

    def on_decisions(self, formula: Formula, placement: str, scale: str, rest_is_a_step: bool = True) -> Tensor:
        """The advantages of the decision tokens, which stand after the token of a step, averaged over the rewards.

        With `rest_is_a_step`, a stop that is outside the steps is a step of reward 0 to every formula but `process`.

        Returns:
            (groups, group_size, S - 1), the groups by the last steps of their completions.
        """
        rows = self.members.flatten()
        rewards, last, tokens = self.rewards[rows], self.last[rows, None], 2 * self.steps - 1
        steps = torch.arange(self.steps).expand_as(rewards)
        ends = (2 * steps + (2 if placement == LAST_OF_THE_STEP else 1)).where(steps <= last, tokens)
        if placement == FIRST_OF_THE_NEXT and rest_is_a_step and formula is not advantages.process:
            rest = steps == last + 1
            rewards, ends = rewards.where(~rest, 0), ends.where(~rest, 2 * steps)
        of_steps = formula(rewards, group_size=self.group_size, scale=scale)
        on_decisions = advantages.per_token(of_steps, ends, tokens)[:, 1::2].view(*self.members.shape, -1)
        by_last = self.groups_of(self.steps)
        group = (self.last[self.members][:, None] == by_last).all(-1).double()  # (all groups, those by the last steps)
        return torch.einsum("m,ml,mgd->lgd", self.chances[self.members].prod(1), group, on_decisions)

    def expected_gradient(self, on_decisions: Tensor, theta: Tensor) -> Tensor:
        """(S - 1,): of a policy-gradient step, E[advantage d log π(decision) / d theta], a mean over the group."""
        by_last = self.groups_of(self.steps)
        scores = (self.goes_on.double() - theta.sigmoid()) * self.decides
        weights = self.probabilities(theta)[by_last].prod(1)
        return torch.einsum("l,lgd,lgd->d", weights, on_decisions, scores[by_last]) / self.group_size


def train(toy: Toy, on_decisions: Tensor) -> Tensor:
    """Gradient ascent from theta = 0: the expected number of steps before every update and after the last."""
    theta = torch.zeros(toy.steps - 1, dtype=torch.float64)
    lengths = [toy.expected_steps(theta)]
    for _ in range(UPDATES):
        theta = theta + LEARNING_RATE * toy.expected_gradient(on_decisions, theta)
        lengths.append(toy.expected_steps(theta))
    return torch.stack(lengths)


def draw(path: Path) -> None:
    """Left, where the first update pushes each decision; right, what that makes of the length."""
    import matplotlib  # here: the enumeration, which tests share, does without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    theta, decisions = torch.zeros(STEPS - 1, dtype=torch.float64), torch.arange(1, STEPS)
    bars = itertools.product(CURVES.items(), zip(PLACEMENTS, (None, "///"), ("-", "--"), strict=True))
    for i, ((name, (formula, firsts)), (placement, hatch, line)) in enumerate(bars):
        for first in firsts:
            toy = Toy(first, SYMMETRIC, STEPS)
            on_decisions = toy.on_decisions(formula, placement, "none")
            gradient, places = toy.expected_gradient(on_decisions, theta), decisions + 0.14 * (i - 2.5)
            face = "white" if hatch else COLOURS[name]
            if gradient.abs().max() < 1e-12:  # no bar to see
                left.plot(places, gradient, "o", color=COLOURS[name], markerfacecolor=face)
            else:
                left.bar(places, gradient, 0.13, facecolor=face, edgecolor=COLOURS[name], hatch=hatch)
            right.plot(train(toy, on_decisions), line, color=COLOURS[name], linewidth=2)
    left.axhline(0, color="black", linewidth=0.8, zorder=1)
    left.set(title='Expected gradient of going on (true: 0), scale "none"', xlabel="decision after step")
    left.set_xticks(decisions.tolist())
    right.set(title="Expected number of steps", xlabel="update", ylim=(0.9, STEPS + 0.1))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    handles = [Patch(color=COLOURS[name], label=name) for name in CURVES]
    handles += [
        Patch(color="grey", label=f"filled, solid: the decision is the {LAST_OF_THE_STEP}"),
        Patch(facecolor="white", edgecolor="grey", hatch="///", label=f"hatched, dashed: the {FIRST_OF_THE_NEXT}"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    start = torch.zeros(STEPS - 1, dtype=torch.float64)
    print(f"{'rewards':<22} {'formula':<13} {'scale':<6} {'decision':<23} {'expected gradient':<30} steps at the end")
    for rewards, first, later in (
        ("first step good", FIRST_GOOD, SYMMETRIC),
        ("first step bad", FIRST_BAD, SYMMETRIC),
        ("good, later skewed", FIRST_GOOD, SKEWED),
        ("bad, later skewed", FIRST_BAD, SKEWED),
    ):
        toy = Toy(first, later, STEPS)
        true = torch.func.grad(toy.expected_reward)(start)
        print(f"{rewards:<22} {'true':<44} {' '.join(f'{g:9.1e}' for g in true.tolist())}")
        for formula, scale, placement in itertools.product(
            (advantages.process, advantages.return_to_go), ("none", "group"), PLACEMENTS
        ):
            on_decisions = toy.on_decisions(formula, placement, scale)
            gradient = " ".join(f"{g:9.1e}" for g in toy.expected_gradient(on_decisions, start).tolist())
            end = train(toy, on_decisions)[-1]
            print(f"{'':<22} {formula.__name__:<13} {scale:<6} {placement:<23} {gradient:<30} {end:.3f}")
    draw(Path(__file__).with_suffix(".png"))
