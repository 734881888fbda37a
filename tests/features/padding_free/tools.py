"""Tiny models of several families, batches, and calls of the models with and without padding."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.oracles import padding as oracles
from tests.oracles.padding import Batch, padded
from trl_steady.features.padding_free.attention import PackedAttention
from trl_steady.features.padding_free.model import PaddingFreeModel
from trl_steady.features.padding_free.packing import Length, Packing, Segment, pack, sequence_lengths
from trl_steady.features.padding_free.support import find_support

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,  # spread logits, and attention that is not flat
    "attention_dropout": 0.0,
}
WINDOW = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
EAGER_ONLY = ("gemma2", "gpt_oss")  # a cap on the logits of attention, and sinks
WAYS = [
    (name, implementation)
    for name in MODELS
    for implementation in ("sdpa", "eager")
    if not (implementation == "sdpa" and name in EAGER_ONLY)
]

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
RAGGED = BATCHES["ragged"]
HEADS, SIZE = 4, 6  # of `llama`


def model_of(
    name: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float32, **changed: Any
) -> PreTrainedModel:
    torch.manual_seed(1)
    config = MODELS[name]()
    for field, value in changed.items():
        setattr(config, field, value)
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=implementation,
        # whose default has no float64
        **({"experts_implementation": "eager"} if name in ("qwen3_moe", "gpt_oss") else {}),
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)  # biases, norms and sinks that tell
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.eval()


def exact(model: PreTrainedModel) -> Callable[..., Any]:
    """The model with a head that is as exact as the model, where TRL's sums up in float32."""

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool = True, **others: Any) -> Any:
        rows = torch.log_softmax(model(input_ids=input_ids, use_cache=False, **others).logits[:, :-1].double(), -1)
        targets = labels[:, 1:]
        told = rows.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return SimpleNamespace(
            log_probs=told.masked_fill(targets == -100, 0),
            entropy=-(rows.exp() * rows).sum(-1).masked_fill(targets == -100, 0),
            aux_loss=None,
        )

    return forward


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


def unpadded(
    model: PreTrainedModel,
    batch: Batch,
    *,
    share: bool = False,
    called: Callable[..., Any] | None = None,
    within: Callable[[Sequence[Segment]], contextlib.AbstractContextManager[None]] | None = None,
) -> PaddingFreeModel:
    """A proxy for any number of passes of one batch."""
    support = find_support(model)
    assert support.why_not_packed is None, support.why_not_packed
    return PaddingFreeModel(
        called or model,
        support,
        prompt_width=batch.prompt_columns,
        lengths=itertools.cycle(lengths_in(batch, share)),
        attend_within=within or functools.partial(attend_within, model),
    )


def answers_of(called: Callable[..., Any], batch: Batch, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (B, T), as TRL reads them off."""
    outputs = called(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, fused_lm_head=True, **others)
    assert outputs.log_probs.shape == outputs.entropy.shape == (batch.shape[0], batch.shape[1] - 1)
    width = batch.shape[1] - batch.prompt_columns
    return outputs.log_probs[:, -width:], outputs.entropy[:, -width:]


def gradients_of(model: PreTrainedModel, answers: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    model.zero_grad()
    weights = [torch.randn(values.shape, generator=draw, dtype=torch.float64) for values in answers]
    sum((w * values).sum() for w, values in zip(weights, answers, strict=True)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
