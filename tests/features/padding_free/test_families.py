"""Every causal-LM family of transformers says the same of a batch with its padding as without it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.oracles import kernels
from tests.tools import families
from tests.tools.headroom import within
from trl_steady.features.padding_free.attention import PackedAttention, own_implementation
from trl_steady.features.padding_free.model import PaddingFreeModel
from trl_steady.features.padding_free.packing import Segment, sequence_lengths
from trl_steady.features.padding_free.support import Support, find_support


def _set(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# What holds of each family, with the config that `families` gives it.

PACKED = _set(
    "afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cwm dbrx deepseek_v2 deepseek_v3",
    "diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text",
    "gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite",
    "granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3",
    "hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum mimo_v2_flash",
    "minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo",
    "olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open",
    "starcoder2 vaultgemma youtu",
)
"""Sequences are laid end to end."""

CUT = _set(
    "axk2 bailing_hybrid bamba cohere_compass_text deepseek_v32 dots3_note dots3_note_text falcon falcon_h1",
    "glm_moe_dsa gpt_neox_japanese hy_v4 lfm2 lfm2_moe lfm3 minimax olmo_hybrid qwen3_5 qwen3_5_moe",
    "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text stablelm zamba2 zaya",
)
"""Columns that are padding in every row are cut off at both ends."""

CUT_RIGHT = _set(
    "bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert",
    "codegen ctrl data2vec-text electra ernie falcon_mamba gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj granitemoehybrid",
    "inkling2_text inkling_text jamba kimi_linear mamba mamba2 marian mbart megatron-bert mpt mvp nemotron_h",
    "openai-gpt opt pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr",
    "whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba blt deepseek_v4 minimax_m3_vl_text",
    "recurrent_gemma",
)
"""Only at the right: positions are absolute, blocks of tokens start at the first column, or padding enters states."""

WHOLE = _set("cpmant doge")
"""Nothing: padding is read out of the tokens and taken to be at the left, or rows are mixed."""

IS_TOLD = transformers.__version__.startswith("5.23.")
"""Other versions of transformers may move a family from one set to another; what is computed must hold for all."""

# Rounding, in float32. Of log-probs and entropies: of the largest in the batch. Of the gradient of a parameter: of its
# largest, or of a hundredth of the model's largest where all of it is rounding, such as that of the biases of keys.
OUTPUTS, GRADIENTS, FLOOR = 1e-5, 1e-4, 1e-2
# the recurrent layers of Qwen3.5 round most, by 2.8e-5 on kernels for SSE4.1
GRADIENTS_OF = {"qwen3_5": 2e-4}

PACKED_NAMES = [name for name in families.names() if name in PACKED or not IS_TOLD]
# In the fast run, one family for each trait: plain, windows, a cap on attention, sinks, a mixture, values narrower
# than keys, norms of queries; then those that are cut, cut at the right, or whole, for each reason
FAST = _set(
    "llama mistral gemma2 gpt_oss qwen3_moe deepseek_v3 gemma3_text qwen3_next falcon deepseek_v32 gpt2 bloom",
    "mamba deepseek_v4 minimax_m3_vl_text recurrent_gemma blt cpmant doge qwen3_5",
)


def _by_speed(names: Sequence[str]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


# 3 columns of padding at the left and 2 at the right of all rows; the first two have the same prompt.
PROMPT_WIDTH, COMPLETION_WIDTH = 11, 15
PROMPTS, COMPLETIONS = (8, 8, 3, 5), (10, 4, 0, 13)

Batch = dict[str, Tensor]


@dataclass
class Computed:
    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


def _batch() -> Batch:
    mask = torch.tensor(
        [
            [0] * (PROMPT_WIDTH - prompt) + [1] * (prompt + completion) + [0] * (COMPLETION_WIDTH - completion)
            for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    )
    ids = torch.randint(2, families.VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0))
    ids[1, :PROMPT_WIDTH] = ids[0, :PROMPT_WIDTH]
    ids *= mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT_WIDTH] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _build(name: str, **options: Any) -> PreTrainedModel:
    """With another transformers, skip all but models that work with padding, where no code of ours runs."""
    try:
        model = families.build(name, **options)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if not IS_TOLD:
            _compute(model, model, _batch())
    except Exception as error:
        if IS_TOLD:
            raise
        pytest.skip(f"transformers {transformers.__version__} has another {name}: {error!r}")
    return model


def _compute(call: Callable[..., Any], model: PreTrainedModel, batch: Batch) -> Computed:
    """Of random weights, so that each place has its own share in the gradients."""
    model.zero_grad(set_to_none=True)
    outputs = call(**batch, fused_lm_head=True)
    told = batch["labels"][:, 1:] != -100
    weights = torch.randn(2, *told.shape, generator=torch.Generator().manual_seed(1))
    loss = (weights[0] * outputs.log_probs + weights[1] * outputs.entropy)[told].sum()
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return Computed(outputs.log_probs.detach()[told], outputs.entropy.detach()[told], gradients)


def _without_padding(
    model: PreTrainedModel,
    of: Support,
    batch: Batch,
    *,
    share_prompts: bool = False,
) -> tuple[Computed, tuple[int, int]]:
    """What `PaddingFreeModel` makes of a batch, and the rows and columns of tokens that the model has seen for it."""
    seen: list[tuple[int, int]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _module, _inputs, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    attention = PackedAttention(model)
    with ExitStack() as until_backward:

        @contextmanager
        def attend_within(segments: Sequence[Segment]) -> Iterator[None]:
            until_backward.enter_context(attention.switched())  # checkpointing runs the layers again in the backward
            with attention.within(segments):
                yield

        shared = batch["input_ids"] if share_prompts else None
        lengths = sequence_lengths(batch["attention_mask"], prompt_width=PROMPT_WIDTH, input_ids=shared)
        assert lengths is not None
        unpadded = PaddingFreeModel(
            model, of, prompt_width=PROMPT_WIDTH, lengths=iter(lengths), attend_within=attend_within
        )
        computed = _compute(unpadded, model, batch)
    hook.remove()
    return computed, seen[0]


def _apart(value: Tensor, expected: Tensor, scale: float) -> float:
    assert value.isfinite().all()
    return ((value - expected).abs().max() / scale).item()


def _assert_same(computed: Computed, expected: Computed, gradients: float = GRADIENTS) -> None:
    for field in ("log_probs", "entropy"):
        reference = getattr(expected, field)
        assert within(_apart(getattr(computed, field), reference, reference.abs().max().item()), OUTPUTS), field
    assert computed.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    apart = {
        name: _apart(computed.gradients[name], gradient, gradient.abs().max().item() + FLOOR * largest)
        for name, gradient in expected.gradients.items()
    }
    assert not {name: ratio for name, ratio in apart.items() if not within(ratio, gradients)}


def _told(name: str) -> str:
    sets = {"packed": PACKED, "cut": CUT, "cut right": CUT_RIGHT, "whole": WHOLE}
    return next(kind for kind, of_kind in sets.items() if name in of_kind)


def _kind(of: Support) -> str:
    if of.width_limit < PROMPT_WIDTH + COMPLETION_WIDTH:
        return "whole"
    if of.why_not_packed is None:
        return "packed"
    return "cut" if of.is_shift_invariant else "cut right"


def _shape(kind: str, batch: Batch) -> tuple[int, int]:
    """Of the tokens that go through the model."""
    mask = batch["attention_mask"]
    used = mask.any(0).nonzero().squeeze(-1).tolist()
    return {
        "packed": (1, int(mask.sum())),
        "cut": (len(mask), used[-1] + 1 - used[0]),
        "cut right": (len(mask), used[-1] + 1),
        "whole": (len(mask), mask.size(1)),
    }[kind]


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
def test_the_table_is_of_all_families() -> None:
    told = [*PACKED, *CUT, *CUT_RIGHT, *WHOLE]
    assert len(told) == len(set(told))
    assert set(families.names()) == set(told)


@pytest.mark.parametrize("name", _by_speed(families.names()))
def test_a_batch_without_its_padding(name: str) -> None:
    """Several sequences and one alone, only cut even if they could be packed, and with shared prompts."""
    model, batch = _build(name), _batch()
    of, expected = find_support(model), _compute(model, model, batch)
    computed, shape = _without_padding(model, of, batch)
    _assert_same(computed, expected, GRADIENTS_OF.get(name, GRADIENTS))
    assert shape == _shape(_kind(of), batch)
    if IS_TOLD:
        assert _kind(of) == _told(name)
    alone = {field: values[:1] for field, values in batch.items()}
    _assert_same(_without_padding(model, of, alone)[0], _compute(model, model, alone))
    if of.why_not_packed is None:
        computed, shape = _without_padding(model, replace(of, why_not_packed="told so"), batch)
        _assert_same(computed, expected)
        assert shape[0] == len(PROMPTS)
        _assert_packed(model, expected, batch)
        if model.supports_gradient_checkpointing:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            _assert_packed(model, expected, batch)


KERNELS = {"flash_attention_2": kernels.flash_attention, "varlen": kernels.torch_varlen}
SLOW = [pytest.param(attention, marks=pytest.mark.slow) for attention in ("eager", "varlen")]


@pytest.mark.parametrize("attention", ["flash_attention_2", *SLOW])
@pytest.mark.parametrize("name", _by_speed(PACKED_NAMES))
def test_packed_by_other_attention(name: str, attention: str) -> None:
    """Against the padded batch: through FlashAttention where that packs, else by the model's default on a CPU."""
    model, batch = _build(name, **({"attn_implementation": "eager"} if attention == "eager" else {})), _batch()
    if not IS_TOLD and (why_not := find_support(model).why_not_packed) is not None:
        pytest.skip(why_not)
    is_flash = attention == "flash_attention_2"
    if is_flash and (not model._supports_flash_attn or getattr(model.config, "prefix_lm", False)):
        pytest.skip(f"{name} does not take FlashAttention")
    if attention == "varlen" and own_implementation(model) != "sdpa":
        pytest.skip(f"{name} does not take sdpa")
    expected = None if is_flash else _compute(model, model, batch)
    watched = mock.patch.object(PackedAttention, "_attend", autospec=True, side_effect=PackedAttention._attend)
    with contextlib.ExitStack() as kernel:
        calls = kernel.enter_context(KERNELS[attention]()) if attention in KERNELS else None
        if is_flash:  # some families give it other windows than the masks of "sdpa" have
            kernels.use(model, attention)
        expected = expected or _compute(model, model, batch)
        attended = kernel.enter_context(watched)
        before = 0 if calls is None else calls.count
        _assert_packed(model, expected, batch)
    if calls is not None:
        assert calls.count - before == attended.call_count > 0


def _assert_packed(model: PreTrainedModel, expected: Computed, batch: Batch) -> None:
    computed, (rows, tokens) = _without_padding(model, find_support(model), batch, share_prompts=True)
    _assert_same(computed, expected)
    assert rows == 1
    assert tokens == batch["attention_mask"].sum() - (PROMPTS[0] - 1)  # each completion has the prompt's last token
