"""Attention in segments by kernels of a GPU, against float64 loops. Not yet run on a GPU."""

import importlib.util

import pytest
import torch
from tests.oracles import padding as oracles
from tests.padding import test_attention
from tests.padding.test_attention import BATCHES, HEADS

from trl_steady.padding import attention
from trl_steady.padding.segments import Segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
SIZE = 32  # kernels take no heads as small as those of the CPU's tests


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize(
    "name",
    [
        "sdpa",
        "flex_attention",
        pytest.param("flash_attention_2", marks=pytest.mark.skipif(not HAS_FLASH, reason="needs flash_attn")),
    ],
)
def test_a_kernel_attends_to_what_a_token_may_see(name: str, shared: bool, window: int | None) -> None:
    batch = BATCHES["one prompt"]
    packing = test_attention._packing(batch, shared)
    draw = torch.Generator().manual_seed(3)
    count = len(packing.rows)
    inputs = [torch.randn(1, heads, count, SIZE, generator=draw).bfloat16() for heads in (HEADS, 2, 2)]
    on_device = [each.cuda().requires_grad_() for each in inputs]
    exact = [each.double().requires_grad_() for each in inputs]
    if name == "sdpa":
        assert attention._takes_varlen(on_device[0], on_device[2])
    options = {"sliding_window": window} if name.startswith("flash") else {}
    layer = test_attention._layer(2).cuda().bfloat16()
    segments = Segments(packing.segments, window)
    got = attention._attend(name, layer, *on_device, segments, scaling=0.4, dropout=0.0, **options)[0]
    allowed = test_attention._visible(packing, batch, shared, window)
    expected = oracles.attention(*(each[0] for each in exact), allowed, scale=0.4)[None]
    # bf16 has 8 bits, and a few roundings add up
    torch.testing.assert_close(got.cpu().double(), expected, rtol=3e-2, atol=3e-2)
    weights = torch.randn(got.shape, generator=draw)
    gradients = torch.autograd.grad((got * weights.cuda().bfloat16()).sum(), on_device)
    for own, should in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(own.cpu().double(), should, rtol=5e-2, atol=5e-2)
