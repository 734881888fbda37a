"""The rollouts that `padding.py` times, and our options for each."""

import argparse
import math
import statistics
from typing import Any, NamedTuple

import torch

GROUP = 8  # completions of a prompt
MEDIAN = 63  # tokens of a completion
TRL = "TRL"
VARIANTS = {
    "lognormal": ("ours", "ours, token_budget"),
    "long prompts": ("ours", "ours, share_prompts", "ours, share_prompts and token_budget"),
    "equal": ("ours",),
}
"""By set: our options, which the name of the variant has."""
SETS = tuple(VARIANTS)


class Rollouts(NamedTuple):
    """Token ids of a rollout; completions of a group have one prompt."""

    prompts: list[list[int]]
    completions: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, [*self.prompts, *self.completions]))

    @property
    def padded_width(self) -> int:
        """Of TRL's batches, which are as wide as the longest prompt and the longest completion of the rollout."""
        return max(map(len, self.prompts)) + max(map(len, self.completions))


def rollouts(name: str, options: argparse.Namespace) -> Rollouts:
    """Of one of the `SETS`, always the same."""
    count = options.window * options.batch
    groups = count // GROUP
    generator = torch.Generator().manual_seed(0)
    if name == "lognormal":
        # quantiles in place of draws, so that 35 % of TRL's tokens are real however many sequences there are; the tail
        # is cut, as by a limit on the length
        shares = [(i + 0.5) / count for i in range(count)]
        lengths = [min(320.0, MEDIAN * math.exp(statistics.NormalDist().inv_cdf(share))) for share in shares]
        of_prompts = [20 + 40 * i / max(1, groups - 1) for i in range(groups)]
    elif name == "long prompts":
        lengths, of_prompts = [48 + 32 * i / (count - 1) for i in range(count)], [512.0] * groups
    else:
        lengths, of_prompts = [120.0] * count, [40.0] * groups

    def ids(length: float) -> list[int]:
        return torch.randint(50, 200, (max(1, round(length * options.scale)),), generator=generator).tolist()

    completions = [ids(lengths[i]) for i in torch.randperm(count, generator=generator).tolist()]
    prompts = [ids(length) for length in of_prompts]
    return Rollouts([prompt for prompt in prompts for _ in range(GROUP)], completions)


def variants(name: str, rollout: Rollouts, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of our options, in each of the `SETS`. A budget is a third of TRL's micro-batch, padding included."""
    possible = {"token_budget": options.batch * rollout.padded_width // 3, "share_prompts": True}
    return {variant: {own: value for own, value in possible.items() if own in variant} for variant in VARIANTS[name]}
