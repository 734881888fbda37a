"""Where the KL term of a loss takes a policy: a bandit of one token, whose optimum is known in closed form.

Run it to draw `kl_optimum.png` beside this file. Expectations are sums over the 5 tokens, so nothing here is noise.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from trl_steady.functional import kl

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REWARDS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.04, 0.16, 0.40, 0.30, 0.10], dtype=torch.float64)  # little on the best token
BETA = 0.3
UPDATES = 1000
UPDATES_PER_ROLLOUT = 4
LEARNING_RATE = 4.0

# of the log-probs under the policy and under the reference, and of log π - log π_old
Term = Callable[[Tensor, Tensor, Tensor], Tensor]
TERMS: dict[str, Term] = {
    "uncorrected": lambda logps, ref_logps, log_ratio: kl.k3(logps, ref_logps),
    "ratio detached": lambda logps, ref_logps, log_ratio: kl.k3(logps, ref_logps, log_ratio.detach()),
    "corrected": kl.k3,
}

# Okabe and Ito's, which colour-blind readers tell apart
COLOURS = {
    "reference": "#BBBBBB",
    "uncorrected": "#E69F00",
    "ratio detached": "#CC79A7",
    "corrected": "#0072B2",
    "optimum": "#000000",
}


def optimum() -> Tensor:
    """The policy with the highest E[reward] - beta KL(policy || reference)."""
    return (REFERENCE.log() + REWARDS / BETA).softmax(0)


def optimum_of_the_other_kl() -> Tensor:
    """The policy with the highest E[reward] - beta KL(reference || policy): beta reference / (level - reward)."""
    low, high = REWARDS.max(), REWARDS.max() + BETA  # the probabilities sum to more than 1 at low, to less at high
    for _ in range(60):
        level = (low + high) / 2
        policy = BETA * REFERENCE / (level - REWARDS)
        low, high = (level, high) if policy.sum() > 1 else (low, level)
    return policy


def train(term: Term) -> Tensor:
    """Gradient descent from the reference: the policy before every update and after the last."""
    logits = REFERENCE.log().requires_grad_()
    policies = []
    for update in range(UPDATES):
        logps = logits.log_softmax(0)
        if update % UPDATES_PER_ROLLOUT == 0:
            old_logps = logps.detach()
            old = old_logps.exp()
            advantages = REWARDS - old @ REWARDS
        log_ratio = logps - old_logps
        # each token's loss, weighted by how often the old policy samples it
        loss = old @ (BETA * term(logps, REFERENCE.log(), log_ratio) - log_ratio.exp() * advantages)
        policies.append(logps.detach().exp())
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - LEARNING_RATE * gradient).detach().requires_grad_()
    return torch.stack([*policies, logits.detach().softmax(0)])


def distances(policies: Tensor, target: Tensor) -> Tensor:
    """Total variation: the share of probability that sits on the wrong tokens."""
    return (policies - target).abs().sum(-1) / 2


def draw(path: Path, runs: Mapping[str, Tensor]) -> None:
    """Left, where each run ends; right, how it gets there."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    bars = {"reference": REFERENCE, **{name: run[-1] for name, run in runs.items()}, "optimum": optimum()}
    for i, (name, policy) in enumerate(bars.items()):
        places = torch.arange(len(policy)) + 0.16 * (i - 2)
        left.bar(places, policy, 0.16, label=name, color=COLOURS[name])
    left.set(title="Policy at the end", xlabel="reward of the token", ylabel="probability")
    left.set_xticks(range(len(REWARDS)), [f"{reward:.1f}" for reward in REWARDS.tolist()])
    for name, run in runs.items():
        style = "--" if name == "ratio detached" else "-"  # lies on the uncorrected one
        right.plot(distances(run, optimum()), style, color=COLOURS[name], linewidth=2)
    right.set(title="Distance to the optimum (total variation)", xlabel="update", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(bars))
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    runs = {name: train(term) for name, term in TERMS.items()}
    ends = {"reference": REFERENCE, **{name: run[-1] for name, run in runs.items()}}
    ends |= {"optimum": optimum(), "optimum of KL(reference || policy)": optimum_of_the_other_kl()}
    lines = [f"{'':<34} {'probability of each token':<34} {'distance to the two optima'}"]
    for name, policy in ends.items():
        away = [distances(policy, target).item() for target in (optimum(), optimum_of_the_other_kl())]
        probabilities = " ".join(f"{p:.4f}" for p in policy.tolist())
        lines.append(f"{name:<34} {probabilities} {away[0]:.1e} {away[1]:.1e}")
    print("\n".join(lines))
    draw(Path(__file__).with_suffix(".png"), runs)
