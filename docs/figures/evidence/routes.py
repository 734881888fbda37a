"""Routes that change: a mixture of experts whose router chooses otherwise in another pass.

    python docs/figures/evidence/routes.py [--write]

Each prefix goes through one of four experts. Only the router's weights differ between the passes, by a fixed error
times a size. In the first case, the old policy has the error: updates have moved the router. In the second case, the
engine has it: the same weights route otherwise there, and there is one update per rollout.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import exact
import shown
import torch
from exact import INF, Method, Pass, Policy, Task
from staleness import LENGTH, VOCABULARY
from torch import Tensor, nn
from torch.func import functional_call

from trl_steady.features.router_replay.replay import Routers

EXPERTS, WIDTH = 4, 6
SIZES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
SHOWN = (0.05, 0.6)
CASES = ("old policy", "engine")
TRUNCATE: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


class Router(nn.Module):
    """A router with the softmax over all experts and a hard choice of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate weights (R, 1) and the experts (R, 1) of hidden states (R, H)."""
        values, chosen = torch.topk((hidden @ self.weight.T).softmax(-1), 1)
        return values, chosen


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = nn.ParameterList([torch.zeros(EXPERTS, VOCABULARY, WIDTH, dtype=torch.float64)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, V) of hidden states (R, H)."""
        gates, chosen = self.gate(hidden)
        return gates * torch.einsum("rvh,rh->rv", self.experts[0][chosen[:, 0]], hidden)


class Mixture(nn.Module):
    """A stack of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the log-probs (R, V) of hidden states (R, H)."""
        return self.layers[0](hidden).log_softmax(-1)


class Mixtures:
    """The policy of a task: parameters as one vector, live or with replayed routes."""

    def __init__(self, seed: int) -> None:
        self.task = Task.of(VOCABULARY, LENGTH, exact.one_in_four(seed))
        self.hidden = exact.gaussians(4000 + seed, self.task.size, WIDTH)
        self.model = Mixture()
        self.routers = Routers(self.model)
        self.theta = exact.gaussians(5000 + seed, EXPERTS * WIDTH * (1 + VOCABULARY))
        self.error = torch.zeros_like(self.theta)
        self.error[: EXPERTS * WIDTH] = exact.gaussians(6000 + seed, EXPERTS * WIDTH)

    def live(self, theta: Tensor) -> Tensor:
        """Return the (R, V) log-probs with the routes that the router chooses."""
        router, experts = theta.split([EXPERTS * WIDTH, EXPERTS * WIDTH * VOCABULARY])
        weights = {
            "layers.0.gate.weight": router.view(EXPERTS, WIDTH),
            "layers.0.experts.0": experts.view(EXPERTS, VOCABULARY, WIDTH),
        }
        return functional_call(self.model, weights, (self.hidden,))

    def routes(self, theta: Tensor) -> Tensor:
        """Return the routes (R, 1, 1) of these parameters, by trl-steady's recording."""
        with self.routers.record() as recording:
            self.live(theta)
        return recording.routes()

    def replayed(self, routes: Tensor) -> Policy:
        """Return the policy that goes through these routes, by trl-steady's replay."""

        def policy(theta: Tensor) -> Tensor:
            with self.routers.replay(routes):
                return self.live(theta)

        return policy


def arms(case: str) -> dict[str, tuple[str, Method]]:
    """Return the arms of a case by name: `router_replay`, and the options."""
    if case == "engine":
        return {
            "none": ("", Method()),
            "none, `token_truncate`": ("", Method(**TRUNCATE)),
            "R2, `token_truncate`": ("R2", Method(**TRUNCATE)),
            "R3": ("R3", Method()),
            "R3, `token_truncate`": ("R3", Method(**TRUNCATE)),
            "GSPO, clip 3e-4, 4e-4, `token_truncate`": ("", Method("gspo", 3e-4, 4e-4, **TRUNCATE)),
        }
    return {
        "none, clip 0.2": ("", Method()),
        "none, no clip": ("", Method(epsilon=INF)),
        "R2 or R3, clip 0.2": ("R2", Method()),
        "R2 or R3, no clip": ("R2", Method(epsilon=INF)),
        "GSPO, clip 3e-4, 4e-4": ("", Method("gspo", 3e-4, 4e-4)),
        "GSPO, no clip": ("", Method("gspo", INF)),
        "GSPO, clip 3e-4, 4e-4, R2": ("R2", Method("gspo", 3e-4, 4e-4)),
    }


@cache
def passes(seed: int, size: float, case: str) -> tuple[Task, dict[str, Pass], Tensor, Tensor]:
    """Return a task, the pass of each `router_replay`, the true gradient, and the share of routes that changed."""
    mixture = Mixtures(seed)
    theta, other = mixture.theta, mixture.theta + size * mixture.error
    sampler, old = mixture.live(other), theta if case == "engine" else other
    replays: dict[str, Callable[[Tensor], Tensor]] = {
        "": mixture.live,
        "R2": mixture.replayed(mixture.routes(old)),  # recorded in the pass for the old log-probs
        "R3": mixture.replayed(mixture.routes(other)),  # recorded by the sampler
    }
    task = mixture.task
    used = {"", *(replay for replay, _ in arms(case).values())}
    found = {name: Pass.of(task, own, theta, own(old), sampler) for name, own in replays.items() if name in used}
    changed = (mixture.routes(theta) != mixture.routes(other)).flatten()[task.prefixes].double().mean(-1)
    share = found[""].sampler_logps.sum(-1).exp() @ changed
    return task, found, task.gradient(mixture.live, theta), share


@cache
def outcomes(size: float, case: str) -> dict[str, Tensor]:
    """Return arm -> (4,) at a size, the median over tasks."""
    tasks = [passes(seed, size, case) for seed in range(shown.TASKS)]
    return shown.medians(
        {name: [m.outcome(p[replay], t, true) for t, p, true, _ in tasks] for name, (replay, m) in arms(case).items()}
    )


@cache
def share_changed(size: float) -> float:
    """Return the share of routes that changed at the tokens that were sampled, the mean over tasks."""
    return sum(float(passes(seed, size, CASES[0])[3]) for seed in range(shown.TASKS)) / shown.TASKS


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    found = {}
    for case in CASES:
        heading = ["method", *(f"{share_changed(size):.1%} of the routes" for size in SHOWN)]
        rows = [[name, *(shown.cells(outcomes(size, case)[name]) for size in SHOWN)] for name in arms(case)]
        found[f"routes, {case}"] = shown.rendered(heading, rows)
    return found


def draw(path: Path) -> None:
    """Draw all arms over the share of changed routes, a row for each case."""
    with shown.picture(path, 2) as grid:
        for axes, case in zip(grid, CASES, strict=True):
            shares = [share_changed(size) for size in SIZES]
            shown.panels(axes, shares, {name: [outcomes(size, case)[name] for size in SIZES] for name in arms(case)})
            for axis in axes:
                axis.set(xlabel=f"share of routes changed (error: {case})")


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
