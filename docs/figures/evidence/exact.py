"""Bias and variance of a method's gradient, by enumeration: what the scripts beside this file share.

A task has so few tokens that all its completions can be listed. The policy is a table of logits, so that the expected
return and its gradient are sums. A method's gradient is computed for each completion, and its mean and variance are
sums over the sampler's probabilities. Nothing is sampled, and everything is float64.

Axes: `N` completions, `T` tokens, `R` prefixes (rows of the table), `V` tokens of the vocabulary, `P` parameters.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trl_steady import losses
from trl_steady.core.types import MicroBatch
from trl_steady.functional import masks

ANSWERS = 256
"""Completions in the mean of the last column."""
INF = math.inf
Policy = Callable[[Tensor], Tensor]
"""Takes the parameters, and returns the (R, V) log-probs of each token after each prefix."""


def gaussians(seed: int, *shape: int) -> Tensor:
    """Return standard normal numbers. Python's generator gives the same ones on every machine; torch's need not."""
    source = random.Random(seed)
    return torch.tensor([source.gauss(0, 1) for _ in range(math.prod(shape))], dtype=torch.float64).view(shape)


def one_in_four(seed: int) -> Callable[[int], Tensor]:
    """Return rewards that are 1 for about a quarter of the completions and 0 for the others."""
    return lambda completions: (gaussians(seed, completions) > 0.6745).double()


def softmax(theta: Tensor) -> Tensor:
    """Return the log-probs of a table of logits (R, V)."""
    return theta.log_softmax(-1)


@dataclass(frozen=True)
class Task:
    """All completions of a vocabulary with their rewards."""

    tokens: Tensor
    """(N, T), 0 after the end."""
    mask: Tensor
    """(N, T) bool, True = token of the completion."""
    prefixes: Tensor
    """(N, T) the row of the table from which the token is drawn, 0 after the end."""
    rewards: Tensor
    """(N,)"""
    log_copies: Tensor | float = 0.0
    """(N,) log of the number of completions that a row stands for, if those differ in their order only."""

    @classmethod
    def of(cls, vocabulary: int, length: int, rewards: Callable[[int], Tensor], *, ends: bool = False) -> "Task":
        """List the completions of `length` tokens. With `ends`, the last token of the vocabulary ends one early.

        Args:
            vocabulary: V.
            length: T, the largest number of tokens.
            rewards: Called with N.
            ends: True if completions may end early.
        """
        completions: list[tuple[int, ...]] = [()]
        rows: dict[tuple[int, ...], int] = {}
        for _ in range(length):
            longer = []
            for before in completions:
                if ends and before and before[-1] == vocabulary - 1:
                    longer.append(before)
                    continue
                rows[before] = len(rows)
                longer += [(*before, token) for token in range(vocabulary)]
            completions = longer
        padded = torch.tensor([[*own, *[0] * (length - len(own))] for own in completions])
        lengths = torch.tensor([len(own) for own in completions])
        of_rows = [[rows.get(own[:t], 0) if t < len(own) else 0 for t in range(length)] for own in completions]
        mask = torch.arange(length) < lengths[:, None]
        return cls(padded, mask, torch.tensor(of_rows), rewards(len(completions)))

    @property
    def size(self) -> int:
        """R, the number of prefixes."""
        return int(self.prefixes.max()) + 1

    def log_probs(self, table: Tensor) -> Tensor:
        """Return the (N, T) log-probs of all tokens, 0 after the end, from the (R, V) log-probs of a policy."""
        return table[self.prefixes, self.tokens].where(self.mask, 0)

    def probabilities(self, table: Tensor) -> Tensor:
        """Return the (N,) probability of each completion."""
        return (self.log_probs(table).sum(-1) + self.log_copies).exp()

    def expected(self, table: Tensor) -> Tensor:
        """Return J, the expected reward."""
        return self.probabilities(table) @ self.rewards

    def gradient(self, policy: Policy, theta: Tensor) -> Tensor:
        """Return the gradient of J with respect to the parameters, in their shape."""
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(self.expected(policy(theta)), theta)[0]

    def climb(self, theta: Tensor, steps: int, rate: float) -> Tensor:
        """Return the parameters of a `softmax` policy after exact gradient steps on J."""
        for _ in range(steps):
            theta = theta + rate * self.gradient(softmax, theta)
        return theta


@dataclass(frozen=True)
class Method:
    """Options of a loss, with TRL's names where TRL or trl-steady has the option."""

    ratio: str = "token"
    """`"none"` weights nothing. `"token"` is TRL's `"grpo"`. `"product"` is the exact weight of a whole completion,
    without a clip, for comparison. The others are those of `loss_type` that trl-steady adds."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dppo_divergence: str = "tv"
    m2po_budget: float = 0.04
    sampler_penalty: float = 0.0
    vllm_importance_sampling_mode: str = ""
    vllm_importance_sampling_clip_max: float = 3.0
    off_policy_mask_threshold: float = INF
    geometric_mask_range: tuple[float, float] = (0.0, INF)
    token_veto_threshold: float = 0.0
    reduction: str = "sequence_mean"
    """Or `"rollout_tokens"` and `"constant"`: the names of `trl_steady.trl_bridge.loss.REDUCTIONS`."""

    def engine_weights(self, given: "Pass", mask: Tensor) -> Tensor:
        """Return TRL's weights π_old / μ, as `GRPOTrainer._generate_and_score_completions` of TRL 1.16 has them.

        Args:
            given: Log-probs.
            mask: (N, T) bool, True = token of the completion.
        """
        log_ratio = (given.old_logps - given.sampler_logps).where(mask, 0)
        mode, cap = self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_max
        if not mode:
            return torch.ones_like(log_ratio)
        weights = (log_ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
        return weights.clamp(max=cap) if mode.endswith("truncate") else weights.masked_fill(weights > cap, 0)

    def slopes(self, given: "Pass", task: Task, advantages: Tensor) -> Tensor:
        """Return minus the derivative of each completion's loss with respect to its log-probs, (N, T).

        The loss of a completion is N times its share of the loss of a batch that has every completion once. The factor
        makes the expectation under the sampler the loss of a batch without end.

        Args:
            given: Log-probs.
            task: The completions.
            advantages: (N,)
        """
        mask, each = task.mask, advantages[:, None]
        logps, old_logps = given.logps.detach().requires_grad_(), given.old_logps
        low, high = self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high
        entry = losses.LOSSES.get(self.ratio)
        if entry is not None and entry.policy_term is not None:
            clip = SimpleNamespace(epsilon_low=low, epsilon_high=high, args=self)  # which has the other options
            batch = MicroBatch(mask, logps, logps, None, each, old_logps, given.sampler_logps)
            values = -entry.policy_term(batch, clip, None)
            if self.ratio == "m2po":
                values = values * self.within_budget(given, task, each)
            elif entry.token_masks:
                values = values * functools.reduce(torch.mul, entry.token_masks(batch, clip).values())
        elif self.ratio in ("none", "product"):
            weight = (logps - old_logps).sum(-1, keepdim=True).exp() if self.ratio == "product" else torch.ones(1)
            values = weight.detach() * each * logps
        else:
            own, old = logps, old_logps
            if self.ratio == "gspo_token":
                rewritten = losses.gspo_token(MicroBatch(mask, logps, logps, None, each, old_logps))
                own, old = rewritten.logps, rewritten.old_logps
            log_ratio = masks.sequence_mean(own - old, mask) if self.ratio == "gspo" else own - old
            ratio = log_ratio.exp().expand_as(logps)
            bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
            values = torch.minimum(bounded * each, ratio.clamp(1 - low, 1 + high) * each)
        weights = mask.double() / (mask.sum(-1, keepdim=True) * len(mask))
        if self.reduction != "sequence_mean":
            tokens = given.mean_length(task) if self.reduction == "rollout_tokens" else mask.size(1)
            weights = mask.double() / (len(mask) * tokens)
        values = values * self.keeps(given, task, each) * self.engine_weights(given, mask)
        values = values - self.sampler_penalty * (logps - given.sampler_logps) ** 2
        return torch.autograd.grad((values * weights).sum() * len(mask), logps)[0]

    def within_budget(self, given: "Pass", task: Task, advantages: Tensor) -> Tensor:
        """Return (N, T) bool, the tokens that M2PO keeps in a batch without end, where a completion has its chance.

        As `masks.second_moment_mask`, which takes a batch, but each square counts as often as it is sampled.
        """
        log_ratio = given.logps - given.sampler_logps
        is_counted = task.mask & (advantages * log_ratio > 0)
        squares, order = log_ratio.square().where(is_counted, INF).flatten().sort()
        chances = given.probabilities(task)[:, None].expand_as(log_ratio).flatten()[order]
        kept = torch.empty_like(order, dtype=torch.bool)
        kept[order] = (chances * squares).cumsum(0) <= self.m2po_budget * chances.cumsum(0)
        return kept.view_as(is_counted) | ~is_counted

    def keeps(self, given: "Pass", task: Task, advantages: Tensor) -> Tensor:
        """Return (N, 1) bool, False for completions that a mask drops. `advantages` is (N, 1)."""
        mask, mismatch = task.mask, masks.log_ratio(given.old_logps, given.sampler_logps)
        statistic = masks.off_policy_statistic(given.logps, given.sampler_logps, mask)
        low, high = self.geometric_mask_range
        keep = (advantages >= 0) | (statistic <= self.off_policy_mask_threshold)
        keep = keep & masks.geometric_mask(mismatch, mask, low=low, high=high)
        return keep & masks.token_veto(mismatch, mask, threshold=self.token_veto_threshold)

    def outcome(self, given: "Pass", task: Task, true: Tensor) -> Tensor:
        """Return (4,) bias, 1 - cosine, variance and error of the gradient, relative to the true gradient.

        Losses divide by a length. The gradient is multiplied by one constant that undoes this: a loss with a ratio of
        1 becomes the sum over tokens. With unequal lengths, `"sequence_mean"` is multiplied by the mean length.

        Args:
            given: Log-probs of a pass.
            task: The completions.
            true: The true gradient, in any shape.
        """
        probabilities = given.probabilities(task)
        advantages = task.rewards - probabilities @ task.rewards  # the mean of a group without end
        length = task.mask.size(1) if self.reduction == "constant" else given.mean_length(task)
        gradients = torch.einsum("nt,ntp->np", self.slopes(given, task, advantages) * length, given.scores)
        return measured(gradients, probabilities, true)


@dataclass(frozen=True)
class Pass:
    """The inputs of a loss for all completions: log-probs, each (N, T) and 0 after the end, and scores."""

    logps: Tensor
    """Under the policy."""
    old_logps: Tensor
    """Under the policy at rollout, as the trainer scores it."""
    sampler_logps: Tensor
    """Under the sampler, from which the completions come."""
    scores: Tensor
    """(N, T, P) derivatives of `logps` with respect to the parameters."""

    @classmethod
    def of(cls, task: Task, policy: Policy, theta: Tensor, old: Tensor, sampler: Tensor | None = None) -> "Pass":
        """Return the pass of a policy. `old` and `sampler` are (R, V) log-probs; without `sampler` it is `old`."""
        scores = derivatives(policy, theta)[task.prefixes, task.tokens] * task.mask[..., None]
        logps, old_logps = task.log_probs(policy(theta).detach()), task.log_probs(old)
        return cls(logps, old_logps, old_logps if sampler is None else task.log_probs(sampler), scores)

    def probabilities(self, task: Task) -> Tensor:
        """Return the (N,) probability with which the sampler draws each completion."""
        return (self.sampler_logps.sum(-1) + task.log_copies).exp()

    def mean_length(self, task: Task) -> Tensor:
        """Return the expected number of tokens of a completion."""
        return self.probabilities(task) @ task.mask.sum(-1).double()

    def share_outside(self, task: Task) -> Tensor:
        """Return the share of sampled tokens whose ratio of policy to sampler is outside 0.8 to 1.2."""
        ratio = (self.logps - self.sampler_logps).exp()
        outside = ((ratio < 0.8) | (ratio > 1.2)) & task.mask
        return self.probabilities(task) @ outside.sum(-1).double() / self.mean_length(task)


def derivatives(policy: Policy, theta: Tensor) -> Tensor:
    """Return the derivatives (R, V, P) of a policy's log-probs.

    If the parameters are a table (R, V), each row must act on the log-probs of its own prefix only. A derivative of a
    whole column then has those of all its rows, which saves most of the backward passes.
    """
    theta = theta.detach().requires_grad_()
    table = policy(theta)
    if theta.shape != table.shape:
        jacobian: Any = torch.autograd.functional.jacobian(policy, theta.detach(), vectorize=True)
        return jacobian.flatten(2)
    rows, vocabulary = table.shape
    found = theta.new_zeros(rows, vocabulary, rows, vocabulary)
    for token in range(vocabulary):
        column = table[:, token]
        (of_column,) = torch.autograd.grad(column.where(column.isfinite(), 0).sum(), theta, retain_graph=True)
        found[torch.arange(rows), token, torch.arange(rows)] = of_column
    return found.flatten(2)


def measured(gradients: Tensor, probabilities: Tensor, true: Tensor) -> Tensor:
    """Return (4,) bias, 1 - cosine, variance and root-mean-square error of a mean of `ANSWERS` completions.

    Args:
        gradients: (N, P) of each completion.
        probabilities: (N,) with which the sampler draws it.
        true: The true gradient, P numbers in any shape. All but the cosine are relative to its norm.
    """
    mean, norm = probabilities @ gradients, true.norm()
    bias = (mean - true.flatten()).norm() / norm
    cosine = (mean @ true.flatten() / (mean.norm() * norm)).nan_to_num()  # no gradient has no direction
    variance = (probabilities @ gradients.square().sum(-1) - mean.square().sum()).clamp(min=0) / norm**2
    return torch.stack([bias, 1 - cosine, variance, (bias**2 + variance / ANSWERS).sqrt()])
