"""Attention in segments, against the set of tokens that each token may see."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from transformers import PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward

from tests.features.padding_free import tools
from tests.oracles import kernels
from tests.oracles.padding import Batch, padded
from tests.tools.devices import CUDA, pretended_gpu
from trl_steady.features.padding_free import attention
from trl_steady.features.padding_free.attention import PackedAttention
from trl_steady.features.padding_free.packing import Packing

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def _drawn(packing: Packing, key_heads: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    count = len(packing.rows)
    return tuple(
        torch.randn(1, heads, count, tools.SIZE, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (tools.HEADS, key_heads, key_heads)
    )


def _packed_mask(implementation: str, packing: Packing, window: int | None) -> tuple[PackedAttention, Any]:
    """Attention and the mask that it gives, as in a forward that gets no further than its masks."""
    packed = tools.packed_attention(implementation)
    with pytest.raises(RuntimeError, match="does not call its attention function"), packed.within(packing.segments):
        mask = packed._mask(local_size=window)
    return packed, mask


def _attend(
    layer: torch.nn.Module,
    packing: Packing,
    implementation: str,
    window: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """(1, N, heads, size), by the functions that transformers calls."""
    packed, mask = _packed_mask(implementation, packing, window)
    options = {"scaling": 0.4, "dropout": 0.0, **options}
    return packed._attend(layer, query, key, value, mask, **options)[0]


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [None, 2])
def test_half_precision_is_masked_too(implementation: str, window: int | None) -> None:
    """A mask of the least number of another type would let tokens through, or be infinite."""
    batch = tools.BATCHES["one prompt"]
    packing = tools.packing_of(batch, True)
    layer = tools.attention_layer(2)
    whole = _drawn(packing, 2)
    expected = _attend(layer, packing, implementation, window, *whole)
    for dtype in (torch.bfloat16, torch.float16):
        got = _attend(layer, packing, implementation, window, *(x.to(dtype) for x in whole))
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=5e-2, atol=5e-2)


def test_under_autocast_a_kernel_gets_what_sdpa_would() -> None:
    """Rotary positions make float32 of queries and keys, but not of values."""
    packing = tools.packing_of(tools.BATCHES["one prompt"], True)
    query, key, value = _drawn(packing, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), kernels.torch_varlen() as calls:
        assert attention._autocast(query) == torch.bfloat16
        got = _attend(tools.attention_layer(2), packing, "sdpa", None, query, key, value.bfloat16())
    assert calls.count == 1 and got.dtype == torch.bfloat16
    exact = _attend(tools.attention_layer(2), packing, "sdpa", None, query, key, value)
    torch.testing.assert_close(got.float(), exact, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("heads", "of_values", "is_taken"), [(64, 64, True), (64, 32, True), (100, 100, False)])
def test_heads_that_the_kernel_takes(
    heads: int, of_values: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenLLaMA has heads of 100, for which torch's kernel raises."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pretended_gpu():
        query, value = (torch.zeros(1, 2, 3, size, dtype=torch.bfloat16, device=CUDA) for size in (heads, of_values))
        assert attention._takes_varlen(query, value) == is_taken


def _laid(batch: Batch) -> tuple[Packing, dict[str, torch.Tensor]]:
    packing = tools.packing_of(batch, False)
    return packing, {"input_ids": packing.gather(batch.ids), "position_ids": packing.columns[None]}


def _implementations(model: PreTrainedModel) -> Sequence[str | None]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def test_a_kernel_from_the_hub_goes_by_its_own_name() -> None:
    """transformers registers its function for FlashAttention under the name of the repository."""
    batch = tools.BATCHES["ragged"]
    name = "kernels-community/flash-attn2"
    attention.AttentionInterface.register(name, flash_attention_forward)
    attention.AttentionMaskInterface.register(name, attention.ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    model = tools.llama()
    packing, inputs = _laid(batch)
    with tools.attend_within(model, packing.segments):
        expected = model(**inputs).logits
    kernels.use(model, name)
    assert attention.why_not_packed(name) is None
    with kernels.flash_attention(name) as calls, tools.attend_within(model, packing.segments):
        logits = model(**inputs).logits
    assert calls.count == len(model.model.layers)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # float32, and sums in another order
    assert set(_implementations(model)) == {name}


def test_nothing_is_left_of_a_forward_that_fails() -> None:
    model, batch = tools.llama(), tools.BATCHES["ragged"]
    before = model(batch.ids).logits
    packing, inputs = _laid(batch)

    def fail(*_: Any) -> None:
        assert set(_implementations(model)) != {"sdpa"}
        raise ZeroDivisionError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), tools.attend_within(model, packing.segments):
        model(**inputs)
    hook.remove()
    assert set(_implementations(model)) == {"sdpa"}
    assert torch.equal(model(batch.ids).logits, before)


def test_a_layer_that_gets_another_mask() -> None:
    model = tools.llama()
    packing, inputs = _laid(tools.BATCHES["ragged"])

    def swap(_: Any, args: Any, keywords: dict[str, Any]) -> Any:
        return args, {**keywords, "attention_mask": None}

    model.model.layers[1].self_attn.register_forward_pre_hook(swap, with_kwargs=True)
    with (
        tools.attend_within(model, packing.segments),
        pytest.raises(RuntimeError, match="LlamaAttention does not pass on the attention mask"),
    ):
        model(**inputs)


def test_segments_may_be_cut_as_a_mask_is_to_what_there_is() -> None:
    """Some layers cut a mask to the keys they have; from elsewhere than its start that would be another row's."""
    _, mask = _packed_mask("sdpa", tools.packing_of(tools.BATCHES["ragged"], False), window=3)
    assert mask[:, :, :, :16] is mask
    for elsewhere in ((slice(None), slice(1, None)), (slice(None), slice(-3, None)), (slice(None, None, 2),)):
        with pytest.raises(IndexError):
            mask[elsewhere]


def test_a_model_that_attends_by_itself_is_found_out() -> None:
    """As one whose attention another package has replaced."""
    model, batch = tools.llama(), tools.BATCHES["ragged"]
    packing, inputs = _laid(batch)
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    refused = pytest.raises(RuntimeError, match="does not call its attention function through transformers' interface")
    with refused, tools.attend_within(model, packing.segments):
        model(**inputs)


def test_fsdp2_hands_segments_on_as_they_are() -> None:
    """It rebuilds dataclasses to cast what is in them, and each layer would make masks of its own."""
    segments = attention.Segments(tools.packing_of(tools.BATCHES["ragged"], False).segments)
    assert _apply_to_tensors(lambda tensor: tensor.half(), {"attention_mask": segments})["attention_mask"] is segments


@pytest.mark.parametrize("window", [None, 24])
def test_no_mask_waits_for_the_backward(window: int | None) -> None:
    """It would have the square of a sequence's length; what waits has the length alone."""
    packing = tools.packing_of(padded([([1, 2, 3, 4], [5] * 60), ([1, 2, 3, 4], [6] * 60)]), True)
    inputs = _drawn(packing, 2)
    sizes: list[int] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        _attend(tools.attention_layer(2), packing, "sdpa", window, *inputs)
    assert 0 < max(sizes) <= inputs[0].numel() < 60 * 61
