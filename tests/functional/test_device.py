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


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda i: advantages.process(i["rewards"], group_size=2, scale="group"), id="process"),
        pytest.param(lambda i: advantages.return_to_go(i["rewards"], group_size=2, scale="batch"), id="return_to_go"),
        pytest.param(lambda i: advantages.per_token(i["rewards"].nan_to_num(), i["ends"], T), id="per_token"),
        pytest.param(
            lambda i: [
                masks.engine_weights(i["logps"] - i["old"], i["mask"], mode=mode, high=1.5)
                for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
            ],
            id="engine_weights",
        ),
        pytest.param(lambda i: [each(i["logps"], i["old"]) for each in (kl.k1, kl.k2, kl.k3)], id="kl"),
        pytest.param(lambda i: kl.k3(i["logps"], i["old"], i["logps"] - i["old"]), id="corrected k3"),
        pytest.param(lambda i: masks.off_policy_statistic(i["logps"], i["old"], i["mask"]), id="off_policy_statistic"),
        pytest.param(
            lambda i: masks.geometric_mask(i["logps"] - i["old"], i["mask"], low=0.9, high=1.1), id="geometric_mask"
        ),
        pytest.param(lambda i: masks.token_veto(i["logps"] - i["old"], i["mask"], threshold=0.5), id="token_veto"),
        pytest.param(lambda i: pooling.mean(pooling.mean_totals(i["logps"].flatten())), id="mean"),
        pytest.param(
            lambda i: pooling.effective_sample_size(pooling.sample_size_totals(i["logps"][0])),
            id="effective_sample_size",
        ),
        pytest.param(lambda i: pooling.quantile(pooling.histogram(i["logps"].flatten()), 0.4), id="quantile"),
    ],
)
def test_functions_give_on_a_gpu_what_they_give_on_the_cpu(call: Callable[[Inputs], Any]) -> None:
    expected = plain(call(inputs()))
    with pretended_gpu():
        result = call({key: value.to(CUDA) for key, value in inputs().items()})
        for each in torch.utils._pytree.tree_leaves(result):
            assert not isinstance(each, Tensor) or each.device == CUDA
        assert plain(result) == expected
