"""Generalized advantage estimation over action tokens: two oracles, numbers by hand, and tool gaps full of garbage."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles import ppo as oracles
from tests.tools.headroom import within
from trl_steady.functional import advantages

EXACT = 1e-12  # thousands of roundings of float64 in numbers near 1
BATCHES = range(100)
GARBAGE = (torch.nan, 1e30, -1e30, torch.inf)

# torchrl multiplies gamma by a mask of integers, which gives the default dtype
TORCHRL = """
import sys, torch
torch.set_default_dtype(torch.float64)
from torchrl.objectives.value.functional import generalized_advantage_estimate as gae
torch.save([gae(**row)[0] for row in torch.load(sys.argv[1])], sys.argv[2])
"""


class Rollout(NamedTuple):
    """Garbage is outside the mask. `bootstrap` is 0 where the episode ended."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    gamma: float
    lam: float | Tensor
    bootstrap: Tensor
    truncated: list[bool]

    def ours(self) -> Tensor:
        return advantages.gae(
            self.rewards, self.values, self.mask, gamma=self.gamma, lam=self.lam, bootstrap=self.bootstrap
        )

    def oracles(self) -> Tensor:
        return tensor(oracles.gae(self.rewards, self.values, self.mask, self.gamma, self.lam, self.bootstrap)).view_as(
            self.rewards
        )


def tensor(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def with_garbage(x: Tensor, mask: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(GARBAGE), x.shape, generator=generator)
    return x.where(mask, tensor(GARBAGE)[kinds])


def random_rollout(seed: int) -> Rollout:
    """Tool gaps, tools that speak first or last, padding, empty answers, and answers that were truncated."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = (rng.randint(1, 6), rng.randint(1, 14))
    lengths = torch.tensor([rng.randint(0, size[1]) for _ in range(size[0])])
    mask = torch.rand(size, generator=generator) < rng.choice([0.5, 0.8, 1.0])
    mask &= torch.arange(size[1]) < lengths.unsqueeze(1)
    rewards, values = torch.randn(2, *size, generator=generator, dtype=torch.float64)
    truncated = [rng.random() < 0.5 for _ in range(size[0])]
    bootstrap = torch.randn(size[0], generator=generator, dtype=torch.float64) * torch.tensor(truncated)
    lam: float | Tensor = rng.choice([0.0, 0.5, 0.95, 1.0])
    if rng.random() < 0.5:
        lam = torch.rand(size[0], 1, generator=generator, dtype=torch.float64)
    rewards, values = with_garbage(rewards, mask, seed), with_garbage(values, mask, seed + 1)
    return Rollout(rewards, values, mask, rng.choice([0.9, 0.99, 1.0]), lam, bootstrap, truncated)


def test_gae_is_that_of_an_oracle_that_saw_the_formulas_only() -> None:
    gaps = empty = 0
    for seed in BATCHES:
        rollout = random_rollout(seed)
        assert within((rollout.ours() - rollout.oracles()).abs(), EXACT), seed
        inner = rollout.mask.cumsum(1).bool() & rollout.mask.flip(1).cumsum(1).flip(1).bool() & ~rollout.mask
        gaps, empty = gaps + int(inner.any(1).sum()), empty + int((~rollout.mask.any(1)).sum())
    assert gaps > 50
    assert empty > 25


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs torchrl")
def test_gae_is_torchrls_on_the_action_tokens_alone(tmp_path: Path) -> None:
    """Another process imports torchrl, because torchrl sets the start method of processes and patches torch."""
    inputs, ours, ours_by_loop = [], [], []
    for rollout in map(random_rollout, BATCHES):
        for i, row in enumerate(rollout.mask):
            if not row.any():
                continue
            values = torch.cat([rollout.values[i, row], rollout.bootstrap[i, None]]).unsqueeze(1)
            done = torch.zeros(len(values) - 1, 1, dtype=torch.bool)
            done[-1] = True
            terminated = done & (not rollout.truncated[i])
            # torchrl has to read `terminated`, so its last value is garbage where the episode ended
            values[-1] = values[-1] if rollout.truncated[i] else 1e3
            lam = rollout.lam if isinstance(rollout.lam, float) else rollout.lam[i].item()
            arguments = {"state_value": values[:-1], "next_state_value": values[1:]}
            arguments |= {"reward": rollout.rewards[i, row].unsqueeze(1), "done": done, "terminated": terminated}
            inputs.append({"gamma": rollout.gamma, "lmbda": lam, **arguments})
            ours.append(rollout.ours()[i, row])
            ours_by_loop.append(rollout.oracles()[i, row])

    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", TORCHRL, str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    theirs = torch.load(tmp_path / "outputs.pt")
    assert len(theirs) > 250
    for each, advantage, loop in zip(theirs, ours, ours_by_loop, strict=True):
        assert within((each.squeeze(1) - advantage).abs(), EXACT)
        assert within((each.squeeze(1) - loop).abs(), EXACT)


# gamma = 1/2. The action tokens are 0, 2 and 3: rewards 1, 5/2, 3 and values 1/2, 3/2, -1.
#
# delta_0 = 1 + 3/4 - 1/2 = 5/4,  delta_1 = 5/2 - 1/2 - 3/2 = 1/2
# truncated, with the value 4 after the last token:  delta_2 = 3 + 2 + 1 = 6
# ended:                                             delta_2 = 3 + 0 + 1 = 4
#
# lambda = 0:   A = delta
# lambda = 1:   A = the discounted sum of the rewards, less the value:
#               truncated: 1 + 5/4 + 3/4 + 4/8 - 1/2 = 3,  5/2 + 3/2 + 4/4 - 3/2 = 7/2,  3 + 4/2 + 1 = 6
#               ended:     1 + 5/4 + 3/4 - 1/2 = 5/2,      5/2 + 3/2 - 3/2 = 5/2,        3 + 1 = 4
# lambda = 1/2: truncated: A_2 = 6,  A_1 = 1/2 + 6/4 = 2,  A_0 = 5/4 + 2/4 = 7/4
#               ended:     A_2 = 4,  A_1 = 1/2 + 4/4 = 3/2,  A_0 = 5/4 + 3/8 = 13/8
BY_HAND: dict[tuple[float, float], list[float]] = {
    (0.0, 4.0): [1.25, 0.5, 6.0],
    (0.0, 0.0): [1.25, 0.5, 4.0],
    (1.0, 4.0): [3.0, 3.5, 6.0],
    (1.0, 0.0): [2.5, 2.5, 4.0],
    (0.5, 4.0): [1.75, 2.0, 6.0],
    (0.5, 0.0): [1.625, 1.5, 4.0],
}
REWARDS, VALUES = tensor([[1, 1e30, 2.5, 3, torch.nan]]), tensor([[0.5, torch.nan, 1.5, -1, 1e30]])
MASK = torch.tensor([[True, False, True, True, False]])


@pytest.mark.parametrize(("lam", "bootstrap"), BY_HAND)
def test_by_hand(lam: float, bootstrap: float) -> None:
    first, second, third = BY_HAND[lam, bootstrap]
    expected = tensor([[first, 0, second, third, 0]])
    ours = advantages.gae(REWARDS, VALUES, MASK, gamma=0.5, lam=lam, bootstrap=tensor([bootstrap]))
    torch.testing.assert_close(ours, expected, rtol=0, atol=EXACT)
    if bootstrap == 0:
        ours = advantages.gae(REWARDS, VALUES, MASK, gamma=0.5, lam=lam)
        torch.testing.assert_close(ours, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["rewards", "values", "mask"])
def test_shapes_that_would_broadcast_and_masks_of_numbers_are_refused(name: str) -> None:
    arguments = {"rewards": REWARDS, "values": VALUES, "mask": MASK}
    for value in (arguments[name][:, :1], arguments[name][0], MASK.long() if name == "mask" else REWARDS.repeat(2, 1)):
        with pytest.raises(ValueError, match="mask"):
            advantages.gae(**{**arguments, name: value}, gamma=1.0, lam=1.0)
    with pytest.raises(RuntimeError, match="expand"):  # of one lambda per token
        advantages.gae(torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, 3) > 0, gamma=1.0, lam=torch.ones(3))


def test_the_number_of_operations_grows_with_the_logarithm_of_the_length() -> None:
    """A loop over tokens would start thousands of kernels on a GPU."""

    class Counted(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for width in (64, 4096):
        rewards, values = torch.rand(2, 2, width).unbind()
        with Counted() as counted:
            advantages.gae(rewards, values, rewards > 0.1, gamma=1.0, lam=0.9)
        counts.append(counted.operations)
    assert counts[1] <= 2 * counts[0]  # twelve rounds instead of six


@pytest.mark.parametrize(("tokens", "lam"), [(1023, 1e-3), (1024, 1.0), (1025, 0.5)])
def test_long_answers_are_as_exact_as_short_ones(tokens: int, lam: float) -> None:
    """A formula that divides by products of lambda would underflow."""
    generator = torch.Generator().manual_seed(tokens)
    rewards, values = torch.randn(2, 2, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, tokens, generator=generator) < 0.8
    rollout = Rollout(rewards, values, mask, 1.0, tensor([[lam], [0.5]]), tensor([0.0, 2.0]), [False, True])
    assert within((rollout.ours() - rollout.oracles()).abs(), EXACT)
