"""The pure functions compute where their tensors are: on a pretended GPU they give what they give on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.tools.devices import CUDA, pretended_gpu
from trl_steady.functional import advantages, kl, masks, pooling

B, T = 4, 6

Inputs = dict[str, Tensor]
CALLS: dict[str, Callable[[Inputs], Any]] = {
    "process": lambda i: advantages.process(i["rewards"], group_size=2, scale="group"),
    "return_to_go": lambda i: advantages.return_to_go(i["rewards"], group_size=2, scale="batch"),
    "per_token": lambda i: advantages.per_token(i["rewards"].nan_to_num(), i["ends"], T),
    "engine_weights": lambda i: [
        masks.engine_weights(i["logps"] - i["old"], i["mask"], mode=mode, high=1.5)
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ],
    "kl": lambda i: [each(i["logps"], i["old"]) for each in (kl.k1, kl.k2, kl.k3)],
    "corrected k3": lambda i: kl.k3(i["logps"], i["old"], i["logps"] - i["old"]),
    "off_policy_statistic": lambda i: masks.off_policy_statistic(i["logps"], i["old"], i["mask"]),
    "geometric_mask": lambda i: masks.geometric_mask(i["logps"] - i["old"], i["mask"], low=0.9, high=1.1),
    "token_veto": lambda i: masks.token_veto(i["logps"] - i["old"], i["mask"], threshold=0.5),
    "mean": lambda i: pooling.mean(pooling.mean_totals(i["logps"].flatten())),
    "effective_sample_size": lambda i: pooling.effective_sample_size(pooling.sample_size_totals(i["logps"][0])),
    "quantile": lambda i: pooling.quantile(pooling.histogram(i["logps"].flatten()), 0.4),
}


def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(B, 2, generator=generator)
    rewards[1, 1] = torch.nan
    mask = torch.arange(T) < torch.tensor([6, 3, 1, 0]).unsqueeze(-1)
    logps, old = torch.randn(2, B, T, generator=generator)
    return {
        "rewards": rewards,
        "ends": torch.tensor([[2, 6], [3, 9], [1, 2], [1, 4]]),
        "mask": mask,
        "logps": logps,
        "old": old,
    }


def plain(result: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.nan_to_num(nan=-7.0).tolist(), result)


@pytest.mark.parametrize("name", CALLS)
def test_functions_give_on_a_gpu_what_they_give_on_the_cpu(name: str) -> None:
    expected = plain(CALLS[name](inputs()))
    with pretended_gpu():
        result = CALLS[name]({key: value.to(CUDA) for key, value in inputs().items()})
        for each in torch.utils._pytree.tree_leaves(result):
            assert not isinstance(each, Tensor) or each.device == CUDA
        assert plain(result) == expected
