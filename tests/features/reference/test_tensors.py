"""Refreshing, gathering and restoring tensors, on numbers worked by hand."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from trl_steady.features.reference.tensors import Pair, gather, paired, refresh, restore


def test_a_hard_refresh_copies_what_a_mix_would_spoil() -> None:
    """0 * inf is nan: a diverged reference could never be left behind by mixing."""
    values = torch.tensor([1.0, 1e-45]), torch.tensor([float("inf"), float("nan")])
    pair = Pair("weight", *map(nn.Parameter, values))
    refresh([pair], 1.0)
    assert torch.equal(pair.reference, pair.policy)


def test_the_reference_takes_the_policys_dtype() -> None:
    """A cast after its creation: TRL makes the policy's adapter bf16, a user may make it float32 again."""
    for policy, reference in itertools.permutations((torch.float32, torch.bfloat16)):
        pair = Pair(
            "weight", nn.Parameter(torch.tensor([1.001], dtype=policy)), nn.Parameter(torch.zeros(1).to(reference))
        )
        refresh([pair], 1.0)
        assert pair.reference.dtype == policy and torch.equal(pair.reference, pair.policy)


def test_a_model_is_its_parameters_and_buffers() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)
            self.tied = self.linear

    policy, reference = Normalised(), Normalised()
    policy.norm(torch.randn(3, 2))  # moves the running statistics
    pairs = paired(policy, reference)
    assert {p.name for p in pairs} == {
        *("linear.weight", "linear.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }
    refresh(pairs, 0.5)
    assert torch.equal(reference.norm.running_mean, policy.norm.running_mean)
    assert reference.norm.num_batches_tracked == 1
    assert not torch.equal(reference.linear.weight, policy.linear.weight)


class Adapted(nn.Module):
    """The names that PEFT's layers have: the adapter's in the middle, and at the end."""

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in adapters})
        self.lora_embedding_A = nn.ParameterDict({name: nn.Parameter(torch.randn(1, 2)) for name in adapters})
        self.default_scale = nn.Parameter(torch.ones(1))  # not the adapter's


def test_adapters_are_paired_by_whole_names() -> None:
    pairs = paired(Adapted("default", "ref", "other"))
    assert [p.name for p in pairs] == ["lora_A.default.weight", "lora_embedding_A.default"]
    assert all(p.policy is not p.reference for p in pairs)


def test_an_adapter_without_a_partner_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"do not have the same tensors .*Use LoRA"):
        paired(Adapted("default"))


def test_what_is_gathered_comes_back_with_its_dtype() -> None:
    first = paired(Adapted("default", "ref"))
    first[0].reference.data = first[0].reference.data.bfloat16()
    saved = gather(first)
    second = paired(Adapted("default", "ref"))
    restore(second, saved)
    for before, after in zip(first, second, strict=True):
        assert before.reference.dtype == after.reference.dtype and torch.equal(before.reference, after.reference)
        assert not torch.equal(after.reference, after.policy)
    assert gather(first, keep=False) == {}
    saved["lora_embedding_A.default"].zero_()
    assert first[1].reference.abs().sum() > 0  # a copy was taken


@pytest.mark.parametrize(
    "change", [{"lora_A.default.weight": torch.zeros(2, 2)}, {"lora_B.default.weight": torch.zeros(2, 1)}]
)
def test_tensors_of_another_adapter_are_refused(change: dict[str, Tensor]) -> None:
    pairs = paired(Adapted("default", "ref"))
    before = gather(pairs)
    saved = {**before, **change}
    with pytest.raises(ValueError, match=f"1 tensors differ in name or shape, for example {min(change)}"):
        restore(pairs, saved)
    assert all(torch.equal(value, before[name]) for name, value in gather(pairs).items())
