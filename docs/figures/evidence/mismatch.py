"""Engine mismatch: the sampler is the policy with an error in every logit.

    python docs/figures/evidence/mismatch.py [--write]

There is one update per rollout, so the policy is the old policy. The error of a logit is a fixed normal number times
a size. The sizes of the table give the shares of ratios outside 0.8 to 1.2 that rounding SmolLM2-135M gave.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import cache
from pathlib import Path

import exact
import shown
import torch
from exact import INF, Method, Pass, Task, softmax
from staleness import LENGTH, VOCABULARY, problem
from torch import Tensor

from trl_steady.functional import kl

SIZES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
ROUNDED = {"bf16": 0.0075, "int8": 0.047, "fp8 e4m3": 0.237}
"""Share of ratios outside 0.8 to 1.2 when the sampler's weights are rounded: SmolLM2-135M, temperature 1."""


@cache
def exact_engine(seed: int) -> tuple[Task, Tensor, Pass, Tensor]:
    """Return a task, its logits, the pass of a policy that samples itself, and the true gradient."""
    task, theta = problem(seed)
    return task, theta, Pass.of(task, softmax, theta, softmax(theta)), task.gradient(softmax, theta)


def rounded(seed: int, size: float) -> tuple[Task, Pass, Tensor]:
    """Return a task, its pass with errors in the sampler's logits, and the true gradient."""
    task, theta, given, true = exact_engine(seed)
    engine = softmax(theta + size * exact.gaussians(2000 + seed, *theta.shape))
    return task, replace(given, sampler_logps=task.log_probs(engine)), true


def outside(size: float) -> float:
    """Return the share of ratios outside 0.8 to 1.2, the mean over tasks."""
    return sum(float(p.share_outside(t)) for t, p, _ in (rounded(s, size) for s in range(shown.TASKS))) / shown.TASKS


@cache
def size_of(share: float) -> float:
    """Return the size, in thousandths, at which this share of ratios is outside 0.8 to 1.2."""
    return bisect_left(range(1000), share, key=lambda i: outside(i / 1000)) / 1000


def log_ratios() -> Tensor:
    """Return quantiles 1 % and 99 % of the tokens' log-ratios at int8's size, as the log of a run has them."""
    each = [rounded(seed, size_of(ROUNDED["int8"])) for seed in range(shown.TASKS)]
    values = torch.cat([(p.old_logps - p.sampler_logps).flatten() for _, p, _ in each])
    chances = torch.cat([p.sampler_logps.sum(-1).exp().repeat_interleave(LENGTH) for _, p, _ in each])
    ordered, order = values.sort()
    levels = torch.tensor([0.01, 0.99], dtype=torch.float64)
    return ordered[torch.searchsorted((chances[order] / chances.sum()).cumsum(0), levels)]


@cache
def arms() -> dict[str, Method]:
    """Return the arms by name. The first seven are drawn. The policy ratio is 1, so no clip acts."""
    low, high = (float(f"{value:.2g}") for value in log_ratios().exp())
    logged, veto = (low, high), 1e-4
    return {
        "no correction": Method(),
        "`token_truncate`, 3": Method(vllm_importance_sampling_mode="token_truncate"),
        "`sequence_mask`, 3": Method(vllm_importance_sampling_mode="sequence_mask"),
        f"geometric mask {low:g}, {high:g}": Method(geometric_mask_range=logged),
        "geometric mask 0.99, 1.01": Method(geometric_mask_range=(0.99, 1.01)),
        "off-policy mask 0.063": Method(off_policy_mask_threshold=0.063),
        "`token_truncate`, both masks": Method(
            vllm_importance_sampling_mode="token_truncate", geometric_mask_range=logged, token_veto_threshold=veto
        ),
        "`token_mask`, 3": Method(vllm_importance_sampling_mode="token_mask"),
        "`sequence_truncate`, 3": Method(vllm_importance_sampling_mode="sequence_truncate"),
        "`sequence_truncate`, no limit": Method(
            vllm_importance_sampling_mode="sequence_truncate", vllm_importance_sampling_clip_max=INF
        ),
        "veto 1e-4": Method(token_veto_threshold=veto),
        "GSPO, clip 3e-4, 4e-4": Method("gspo", 3e-4, 4e-4),
        "GMPO, clip 0.4": Method("gmpo", 0.4),
        'DPPO, `"tv"`, 0.2': Method("dppo"),
        'DPPO, `"kl"`, 0.05': Method("dppo", 0.05, dppo_divergence="kl"),
        "M2PO, budget 0.04": Method("m2po"),
        "penalty 1e-3": Method(sampler_penalty=1e-3),
    }


@cache
def outcomes(size: float) -> dict[str, Tensor]:
    """Return arm -> (4,) at a size, the median over tasks."""
    tasks = [rounded(seed, size) for seed in range(shown.TASKS)]
    return shown.medians({name: [arm.outcome(p, t, true) for t, p, true in tasks] for name, arm in arms().items()})


def spoiled(share: float) -> dict[str, Tensor]:
    """Return arm -> (4,) if the engine draws one token far too often as the first of a completion, over tasks.

    Args:
        share: Probability of the token under the engine. The policy gives it about 1e-6.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in arms()}
    for seed in range(shown.TASKS):
        task, theta = problem(seed)
        theta = theta.clone()
        theta[0, 0] = theta[0, 1:].logsumexp(0) - 14
        engine = theta.clone()
        engine[0, 0] += 14 + torch.tensor(share / (1 - share), dtype=torch.float64).log()
        given, true = Pass.of(task, softmax, theta, softmax(theta), softmax(engine)), task.gradient(softmax, theta)
        for name, arm in arms().items():
            found[name].append(arm.outcome(given, task, true))
    return shown.medians(found)


def of_kl(size: float) -> dict[str, Tensor]:
    """Return arm -> (4,) of the gradient of KL(policy || reference), for completions of one token.

    The policy is one gradient step away from the old one, so that the two denominators differ from it and each other.
    """
    found: dict[str, list[Tensor]] = {}
    for seed in range(shown.TASKS):
        start, noise, reference = (exact.gaussians(k + seed, 1, VOCABULARY) for k in (1000, 2000, 3000))
        task = Task.of(VOCABULARY, 1, lambda n, own=seed: exact.gaussians(own, n))
        theta = task.climb(start, 1, 1.0).requires_grad_()
        ref_logps = softmax(reference)
        true = torch.autograd.grad((softmax(theta).exp() * (softmax(theta) - ref_logps)).sum(), theta)[0]
        given = Pass.of(task, softmax, theta, softmax(start), softmax(start + size * noise))
        logps, ref = given.logps.requires_grad_(), task.log_probs(ref_logps)
        terms = {
            "`use_bias_correction_kl=False`": kl.k3(logps, ref),
            '`kl_ratio_denominator="old"`': kl.k3(logps, ref, logps - given.old_logps),
            '`kl_ratio_denominator="sampler"`': kl.k3(logps, ref, logps - given.sampler_logps),
        }
        for name, term in terms.items():
            slopes = torch.autograd.grad(term.sum(), logps, retain_graph=True)[0]
            gradients = torch.einsum("nt,ntp->np", slopes, given.scores)
            measured = exact.measured(gradients, given.sampler_logps.sum(-1).exp(), true.detach())
            found.setdefault(name, []).append(measured)
    return shown.medians(found)


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    sizes = {name: size_of(ROUNDED[name]) for name in ("bf16", "fp8 e4m3")}
    levels = [f"{name}: {size:g} ({outside(size):.1%} outside)" for name, size in sizes.items()]
    rows = [[name, *(shown.cells(outcomes(size)[name]) for size in sizes.values())] for name in arms()]
    shares = (0.01, 0.05)
    far = {share: spoiled(share) for share in shares}
    of_far = [[name, *(shown.cells(far[share][name]) for share in shares)] for name in arms()]
    terms = {size: of_kl(size) for size in sizes.values()}
    of_terms = [[name, *(shown.cells(own[name]) for own in terms.values())] for name in terms[sizes["bf16"]]]
    return {
        "mismatch": shown.rendered(["method", *levels], rows),
        "one token": shown.rendered(["method", *(f"{share:.0%} of completions" for share in shares)], of_far),
        "kl": shown.rendered(["KL term", *levels], of_terms),
    }


def draw(path: Path) -> None:
    """Draw the first seven arms over the size of the error."""
    with shown.picture(path, 1) as (axes,):
        names = [*arms()][:7]
        shown.panels(axes, SIZES, {name: [outcomes(size)[name] for size in SIZES] for name in names})
        for axis in axes:
            axis.set(xlabel="standard deviation of a logit's error")
            for name, share in ROUNDED.items():
                axis.axvline(size_of(share), color="grey", linewidth=0.8, zorder=0)
                side = "right" if name == "bf16" else "left"
                at = {"xy": (size_of(share), 0.98), "xycoords": ("data", "axes fraction"), "va": "top", "ha": side}
                axis.annotate(name, **at, rotation=90, fontsize="x-small")


if __name__ == "__main__":
    shown.run(__file__, tables, draw)
