"""Step rewards into advantages per token: an independent oracle, hand-worked groups, and what must hold exactly."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from tests.oracles import advantages as oracles
from tests.oracles.trust_regions import token_baseline, variance_filter
from trl_steady.functional import advantages

SCALES = ("group", "batch", "none")
Formula = Callable[..., Tensor]
FORMULAS: dict[str, Formula] = {"process": advantages.process, "return_to_go": advantages.return_to_go}


def by_ours(
    name: str, batch: list[oracles.Completion], group_size: int, scale: str, dtype: torch.dtype = torch.float64
) -> list[list[float]]:
    """As the oracles take and return it."""
    rows = []
    for completion in batch:
        tokens, steps = completion or (0, [])
        if name == "return_to_go" and completion is not None and (not steps or steps[-1][0] < tokens):
            steps = [*steps, (tokens, 0.0)]  # the caller's part: see the docstring
        rows.append(steps)
    size = (len(rows), max(1, *map(len, rows)))
    rewards, ends = torch.full(size, torch.nan, dtype=dtype), torch.full(size, 10_000)
    for i, steps in enumerate(rows):
        for j, (end, reward) in enumerate(steps):
            rewards[i, j], ends[i, j] = reward, end
    result = FORMULAS[name](rewards, group_size=group_size, scale=scale)
    tokens = [completion[0] if completion else 0 for completion in batch]
    by_token = advantages.per_token(result, ends, max(tokens, default=0))
    return [row[:length].tolist() for row, length in zip(by_token, tokens, strict=True)]


def random_batch(seed: int, group_size: int, groups: int) -> list[oracles.Completion]:
    """Unequal step counts, completions without a step or a verdict, tokens after the last step."""
    rng = random.Random(seed)

    def completion() -> oracles.Completion:
        if rng.random() < 0.15:
            return None
        tokens = rng.randint(1, 9)
        ends = sorted(rng.sample(range(1, tokens + 1), rng.randint(0, min(tokens, 4))))
        return tokens, [(end, rng.choice([-1.0, 0.0, 0.5, rng.gauss(0, 1)])) for end in ends]

    return [completion() for _ in range(group_size * groups)]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMULAS)
def test_advantages_are_those_of_an_oracle_that_saw_the_formulas_only(name: str, scale: str) -> None:
    for seed in range(20):
        group_size = 1 + seed % 5
        batch = random_batch(seed, group_size, 3)
        expected = getattr(oracles, name)(batch, group_size, scale)
        for ours, theirs in zip(by_ours(name, batch, group_size, scale), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9), seed


def as_trl_trainer(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """As TRL 1.16's _generate_and_score_completions normalises scalar rewards, with exact zeros for equal ones."""
    mean = torch.nanmean(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size, dim=0)
    std = nanstd(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size, dim=0)
    if scale == "batch":
        std = nanstd(rewards).expand_as(rewards)
    groups = [set(group[~group.isnan()].tolist()) for group in rewards.view(-1, group_size)]
    is_equal = torch.tensor([len(values) < 2 for values in groups]).repeat_interleave(group_size)
    result = (rewards - mean).masked_fill(is_equal, 0)
    return torch.nan_to_num(result if scale == "none" else result / (std + 1e-4), nan=0.0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMULAS)
def test_one_step_is_outcome_supervision_bit_for_bit(name: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for group_size in (2, 3, 7, 64):
        for groups in (1, 33):
            rewards = torch.randn(groups * group_size, generator=generator)
            rewards[torch.rand(len(rewards), generator=generator) < 0.3] = torch.nan
            rewards[:group_size] = 0.1  # a group without spread
            ours = FORMULAS[name](rewards.unsqueeze(1), group_size=group_size, scale=scale)
            assert torch.equal(ours.squeeze(1), as_trl_trainer(rewards, group_size, scale))


@pytest.mark.parametrize("name", FORMULAS)
def test_no_spread_is_no_advantage(name: str) -> None:
    for value, scale, size in itertools.product((0.1, 0.7, 0.9, torch.nan), SCALES, (2, 3, 8, 64)):
        rewards = torch.full((2 * size, 3), value)
        rewards[::5] = torch.nan  # not scored
        rewards[size:] = torch.arange(size * 3).view(size, 3)  # another group of the batch
        found = FORMULAS[name](rewards, group_size=size, scale=scale)
        assert torch.equal(found[:size], torch.zeros(size, 3)) and found[size:].any()


@pytest.mark.parametrize("name", FORMULAS)
def test_an_unknown_scale_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match="std"):
        FORMULAS[name](torch.zeros(6, 2), group_size=3, scale="std")


def test_largest_variances_are_those_of_an_oracle() -> None:
    for seed in range(50):
        rewards = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed)) * torch.rand(24, 1)
        rewards[::5] = 0.3  # without variance
        variances = advantages.group_variances(rewards)
        found = variances >= advantages.least_variance(variances)
        assert found.tolist() == variance_filter(rewards.flatten().tolist(), 4)


def test_groups_of_the_same_variance_stay_together() -> None:
    right = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 1], [0, 0, 1, 1]]).float().repeat(20, 1)
    variances = advantages.group_variances(right * 0.7 + 0.1)
    assert (variances >= advantages.least_variance(variances)).all()  # an order would leave out some of them
    assert advantages.least_variance(torch.zeros(3)) == 0


@pytest.mark.parametrize(
    ("group", "is_equal"), [((-torch.inf, 1.0), False), ((1.0, torch.inf), False), ((1.0,) * 2, True)]
)
def test_an_infinite_reward_equals_no_number(group: tuple[float, ...], is_equal: bool) -> None:
    """Advantages of such a group are not finite, as in TRL, and not 0."""
    assert advantages.all_equal(torch.tensor([group]), 1).tolist() == [is_equal]


def test_token_baselines_are_those_of_an_oracle() -> None:
    """In units of any scale. A completion keeps the group's mean where it is alone."""
    for seed in range(20):
        random, size = torch.Generator().manual_seed(seed), 4
        probs = torch.randn(3 * size, 7, 5, generator=random).double().mul(2).softmax(-1)
        rewards = torch.randn(3 * size, generator=random).double()
        mask = torch.arange(7) < torch.randint(0, 8, (3 * size, 1), generator=random)
        pi, squares = probs[..., 0], probs.square().sum(-1)
        energies = (1 - 2 * pi + squares).where(mask, torch.nan)
        groups = rewards.view(-1, size)
        centred = (groups - groups.mean(1, keepdim=True)).flatten()
        found = advantages.token_baseline(centred / 3, energies, group_size=size) * 3
        expected = token_baseline(rewards.tolist(), pi.log(), squares, mask, size)
        running = mask.view(-1, size, 7).sum(1).repeat_interleave(size, 0)
        for i, values in enumerate(expected):
            own = [value if running[i, t] > 1 else centred[i].item() for t, value in enumerate(values)]
            assert found[i].tolist() == pytest.approx([*own, *[0.0] * (7 - len(own))], abs=1e-6)
        # equal weights, a certain policy's too
        for energy in (0.3, 0.0):
            same = advantages.token_baseline(centred, torch.full((3 * size, 7), energy), group_size=size)
            torch.testing.assert_close(same, centred.unsqueeze(1).expand_as(same))
