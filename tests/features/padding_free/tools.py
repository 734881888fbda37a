"""Batches, their segments, and a tiny Llama."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.oracles import padding as oracles
from tests.oracles.padding import Batch, padded
from trl_steady.features.padding_free.attention import PackedAttention
from trl_steady.features.padding_free.packing import Length, Packing, Segment, pack, sequence_lengths

BATCHES = {
    "ragged": padded([([5, 6, 7], [8, 3]), ([9], [4, 10, 11, 12, 3, 9, 8]), ([13, 14], [15, 16, 3])], left=2, right=1),
    "one prompt": padded(
        [([5, 6, 7, 8, 9, 4], [8, 3, 4]), ([5, 6, 7, 8, 9, 4], [4, 10, 11, 12, 9, 8]), ([5, 6, 7, 8, 9, 4], [])],
        left=1,
    ),
    "two prompts in turn": padded(
        [([5, 6, 7], [8, 3]), ([7, 7], [4, 10]), ([5, 6, 7], [9, 9, 4, 5, 6]), ([7, 7], [11]), ([6, 7], [12, 13])],
        right=2,
    ),
    "prompts that differ at their end": padded([([5, 6, 7], [8, 3, 4]), ([5, 6, 8], [8, 3]), ([5, 6, 7], [9])]),
    "one row": padded([([5, 6], [7, 8, 9, 10, 11])], left=1, right=2),
    "the pad token in the text": padded([([0, 0, 5], [0, 6, 0]), ([0, 5], [0]), ([0, 0, 5], [0, 0]), ([0, 5], [7])]),
    "answers of no tokens": padded([([5, 6], []), ([7], [])], left=1, right=2),
    "prompts of one token": padded([([5], []), ([7], [8, 9, 3])], right=1),
    "prompts of one token, answers of none": padded([([5], []), ([5], [])], right=2),
}
HEADS, SIZE = 4, 6  # of `llama`


def lengths_in(batch: Batch, shared: bool) -> list[Length]:
    lengths = sequence_lengths(batch.mask, prompt_width=batch.prompt_columns, input_ids=batch.ids if shared else None)
    assert lengths is not None
    return lengths


def packing_of(batch: Batch, shared: bool) -> Packing:
    return pack(lengths_in(batch, shared), prompt_width=batch.prompt_columns, device=batch.ids.device)


@contextlib.contextmanager
def attend_within(model: PreTrainedModel, segments: Sequence[Segment]) -> Iterator[None]:
    attention = PackedAttention(model)
    with attention.switched(), attention.within(segments):
        yield


def llama(implementation: str = "sdpa", key_heads: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * SIZE,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        vocab_size=24,
        initializer_range=0.5,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).eval()


def attention_layer(key_heads: int) -> torch.nn.Module:
    return llama(key_heads=key_heads).model.layers[0].self_attn


def visible(packing: Packing, batch: Batch, shared: bool, window: int | None) -> torch.Tensor:
    names = list(zip(packing.rows.tolist(), packing.columns.tolist(), strict=True))
    return oracles.visible(names, oracles.segments(batch, shared), window)


def packed_attention(implementation: str) -> PackedAttention:
    """By an attention function that need not be installed."""
    packed = PackedAttention(llama())
    vars(packed)["_name"] = implementation
    return packed
