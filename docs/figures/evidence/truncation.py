"""Truncation: the sampler leaves tokens out by top-p.

    python docs/figures/evidence/truncation.py [--write]

The policy samples itself, and there is one update per rollout. Two gradients are true here. The policy of all tokens
earns J. The truncated policy, which samples and is deployed with the same top-p, earns another J, whose gradient is
taken with the sets held fixed.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import exact
import shown
import torch
from exact import Method, Pass, Policy, Task, softmax
from staleness import problem
from torch import Tensor

from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.log_probs import candidate_log_probs
from trl_steady.trl_bridge.lm_head import Head

TOP_P = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
SHOWN = (0.95, 0.8)
TARGETS = ("truncated policy", "policy of all tokens")


def top_p_sets(logps: Tensor, top_p: float) -> Tensor:
    """Return (R, V) bool: the most probable tokens whose probabilities reach `top_p`, as transformers keeps them."""
    ordered, order = logps.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(logps, dtype=torch.bool).scatter(1, order, before < top_p)


def kept_policy(is_kept: Tensor) -> Policy:
    """Return trl-steady's log-probs among kept tokens, as a function of the logits (R, V); -inf for other tokens."""
    rows, vocabulary = is_kept.shape
    kept = CandidateSets.from_mask(is_kept.repeat_interleave(vocabulary, 0))
    hidden = torch.eye(rows, dtype=torch.float64).repeat_interleave(vocabulary, 0)
    tokens = torch.arange(vocabulary).repeat(rows)

    def policy(theta: Tensor) -> Tensor:
        head = Head(hidden, theta.T, None, tokens, 1.0, 0, None, 1.0, (), {})
        among = candidate_log_probs(head, kept).view(rows, vocabulary)
        # a set of the whole vocabulary is stored as none, and the caller's log-prob counts
        return among.where(~is_kept.all(-1, keepdim=True), softmax(theta)).where(is_kept, -torch.inf)

    return policy


def arms() -> dict[str, tuple[bool, Method]]:
    """Return the arms by name: whether log-probs are those among kept tokens, and the options. All are drawn."""
    truncate = Method(vllm_importance_sampling_mode="token_truncate")
    return {
        "all tokens, no correction": (False, Method()),
        "all tokens, `token_truncate`": (False, truncate),
        "all tokens, `sequence_mask`": (False, Method(vllm_importance_sampling_mode="sequence_mask")),
        "all tokens, geometric mask 0.9, 1.1": (False, Method(geometric_mask_range=(0.9, 1.1))),
        "kept sampling mask": (True, Method()),
        "kept sampling mask, `token_truncate`": (True, truncate),
    }


@cache
def truncated(seed: int, top_p: float) -> tuple[Task, dict[bool, Pass], dict[str, Tensor]]:
    """Return the completions that the sampler can draw, the pass of each kind of log-probs, and the true gradients."""
    task, theta = problem(seed)
    # with rewards of 0 and 1, the true gradient of some truncated policies is 0
    task = replace(task, rewards=exact.gaussians(seed, len(task.rewards)))
    is_kept = top_p_sets(softmax(theta), top_p)
    among = theta.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    drawn = is_kept[task.prefixes, task.tokens].all(-1)
    possible = Task(task.tokens[drawn], task.mask[drawn], task.prefixes[drawn], task.rewards[drawn])

    def renormalised(own: Tensor) -> Tensor:  # not the package's, so that the true gradient has another source
        return own.masked_fill(~is_kept, -torch.inf).log_softmax(-1)

    true: dict[str, Tensor] = dict(
        zip(TARGETS, (possible.gradient(renormalised, theta), task.gradient(softmax, theta)), strict=True)
    )
    passes = {
        False: Pass.of(possible, softmax, theta, softmax(theta), among),
        True: Pass.of(possible, kept_policy(is_kept), theta, among),
    }
    return possible, passes, true


@cache
def outcomes(top_p: float, target: str) -> dict[str, Tensor]:
    """Return arm -> (4,) at a top-p against one of the true gradients, the median over tasks."""
    tasks = [truncated(seed, top_p) for seed in range(shown.TASKS)]
    return shown.medians(
        {name: [m.outcome(p[kept], t, true[target]) for t, p, true in tasks] for name, (kept, m) in arms().items()}
    )


def kept_mass(top_p: float) -> float:
    """Return the mean over sampled tokens of the policy's probability of the kept set."""
    masses = []
    for seed in range(shown.TASKS):
        _, passes, _ = truncated(seed, top_p)
        full, among = passes[False].logps, passes[False].sampler_logps
        masses.append(float(among.sum(-1).exp() @ (full - among).exp().mean(-1)))
    return sum(masses) / len(masses)


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    heading = ["method", *(f"top-p {p:g} (kept mass {kept_mass(p):.3f})" for p in SHOWN)]
    return {
        f"truncation, {target}": shown.rendered(
            heading, [[name, *(shown.cells(outcomes(p, target)[name]) for p in SHOWN)] for name in arms()]
        )
        for target in TARGETS
    }


def draw(path: Path) -> None:
    """Draw all arms over top-p, a row for each true gradient."""
    with shown.picture(path, 2) as grid:
        for axes, target in zip(grid, TARGETS, strict=True):
            shown.panels(axes, TOP_P, {name: [outcomes(p, target)[name] for p in TOP_P] for name in arms()})
            for axis in axes:
                axis.set(xlabel=f"top-p (true: {target})")
                axis.invert_xaxis()


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
