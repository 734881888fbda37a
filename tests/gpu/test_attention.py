"""Attention in segments by kernels of a GPU, against float64."""

import pytest
import torch
from torch import Tensor

from tests.features.padding_free.tools import (
    BATCHES,
    HEADS,
    attention_layer,
    packed_attention,
    packing_of,
    visible,
)
from tests.gpu.places import KERNELS, Place, everywhere
from tests.gpu.recorder import Figures
from tests.oracles.padding import Batch, padded
from trl_steady.features.padding_free import attention
from trl_steady.features.padding_free.attention import Segments

SIZE = 32  # kernels take no heads as small as those of the CPU's tests
SCALE = 0.2
LONG = "more than a block"
# kernels compute in blocks of 64 or 128 tokens
PLACES: dict[str, Batch] = {
    "one prompt": BATCHES["one prompt"],
    LONG: padded([([*range(1, 131)], [7] * 9), ([*range(1, 131)], [8] * 140), ([5, 6], [9] * 70)]),
}


def off(own: Tensor, true: Tensor) -> float:
    """The largest error, relative to the largest entry."""
    return float((own.detach().cpu().double() - true.detach()).abs().max() / true.detach().abs().max())


@everywhere
@pytest.mark.parametrize(
    ("batch", "shared", "window"),
    [
        *(("one prompt", shared, window) for shared in (False, True) for window in (None, 2, 3)),
        *((LONG, shared, window) for shared in (False, True) for window in (None, 100)),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_attends_to_what_a_token_may_see(
    place: Place, name: str, batch: str, shared: bool, window: int | None, figures: Figures
) -> None:
    place.need_bf16()
    packing = packing_of(PLACES[batch], shared)
    draw = torch.Generator().manual_seed(3)
    count = len(packing.rows)
    inputs = [torch.randn(1, heads, count, SIZE, generator=draw).bfloat16() for heads in (HEADS, 2, 2)]
    on_device = [each.to(place.device).requires_grad_() for each in inputs]
    exact = [each.double().requires_grad_() for each in inputs]
    options = {"sliding_window": window} if name.startswith("flash") else {}
    layer = attention_layer(2).to(place.device).bfloat16()
    segments = Segments(packing.segments, window)
    with place.kernel(name):
        if name == "sdpa":
            assert attention._takes_varlen(on_device[0], on_device[2]) == place.has_varlen
        got = packed_attention(name)._attend(layer, *on_device, segments, scaling=SCALE, dropout=0.0, **options)[0]
        weights = torch.randn(got.shape, generator=draw)
        gradients = torch.autograd.grad((got * weights.to(got)).sum(), on_device)
    allowed = visible(packing, PLACES[batch], shared, window)
    # with every score of every pair of tokens
    query, *others = exact
    key, value = (each.repeat_interleave(query.size(1) // each.size(1), dim=1) for each in others)
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~allowed, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    true = torch.autograd.grad((expected * weights.to(got.dtype)).sum(), exact)
    # bf16 has 8 bits: a rounding is at most 2**-9 of a number. Scores and values are at most about 4, and a gradient
    # is a sum over the tokens that see a key.
    error, of_gradients = off(got, expected), max(map(off, gradients, true))
    assert error < 0.02 and of_gradients < 0.04
    figures("output, largest error of its largest entry", error, "")
    figures("gradients, largest error of their largest entry", of_gradients, "")
