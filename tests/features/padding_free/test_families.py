"""Every causal-LM family of transformers says the same of a batch with its padding as without it."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.features.padding_free import passes
from tests.features.padding_free.tools import BATCHES
from tests.oracles import kernels
from tests.tools import families
from tests.tools.cases import cases
from tests.tools.families import IS_TOLD
from tests.tools.headroom import within
from trl_steady.features.padding_free.attention import PackedAttention, own_implementation
from trl_steady.features.padding_free.support import Support, find_support


def _set(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# What holds of each family, with the config that `families` gives it.

PACKED = _set(
    "afmoe apertus apertus1p5_text arcee aria_text axk1 beam bitnet codegen cohere cohere2 cohere2_moe cwm dbrx",
    "deepseek_v2 deepseek_v3 diffllama dory dots1 emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo",
    "flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite",
    "gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text",
    "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama",
    "longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral",
    "modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe",
    "qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu",
)
"""Sequences are laid end to end."""

CUT = _set(
    "axk2 bailing_hybrid bamba cohere_compass_text deepseek_v32 dots3_note dots3_note_text falcon falcon_h1",
    "glm_moe_dsa gpt_neox_japanese hy_v4 lara_mini lfm2 lfm2_moe lfm3 minimax olmo_hybrid qwen3_5 qwen3_5_moe",
    "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text stablelm zamba2 zaya",
)
"""Columns that are padding in every row are cut off at both ends."""

CUT_RIGHT = _set(
    "bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert ctrl",
    "data2vec-text electra ernie falcon_mamba gpt-sw3 gpt2 gpt_bigcode gpt_neo granitemoehybrid",
    "inkling2_loop_text inkling2_text inkling_text jamba kimi_linear mamba mamba2 marian mbart megatron-bert mpt",
    "mvp nemotron_h openai-gpt opt pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert",
    "roformer rwkv trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba blt deepseek_v4",
    "minimax_m3_vl_text recurrent_gemma",
)
"""Only at the right: positions are absolute, blocks of tokens start at the first column, or padding enters states."""

WHOLE = _set("cpmant doge")
"""Nothing: padding is read out of the tokens and taken to be at the left, or rows are mixed."""

SHIFTED = [name for name in families.names() if name in PACKED | CUT]
PACKED_NAMES = [name for name in families.names() if name in PACKED or not IS_TOLD]
# In the fast run, one family for each trait: plain, windows, a cap on attention, sinks, a mixture, values narrower
# than keys, norms of queries, queries scaled by channel; then those that are cut, cut at the right, or whole, for
# each reason
FAST = _set(
    "llama mistral dory gemma2 gpt_oss qwen3_moe deepseek_v3 gemma3_text qwen3_next falcon deepseek_v32 gpt2 bloom",
    "mamba deepseek_v4 minimax_m3_vl_text recurrent_gemma blt cpmant doge qwen3_5",
)


def _build(name: str, **options: Any) -> PreTrainedModel:
    """With an older transformers, skip all but models that work with padding, where no code of ours runs."""
    try:
        model = families.build(name, **options)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if not IS_TOLD:
            passes.compute(model, model, passes.make_batch())
    except Exception as error:
        if IS_TOLD:
            raise
        pytest.skip(f"transformers {transformers.__version__} has another {name}: {error!r}")
    return model


def _told(name: str) -> str:
    sets = {"packed": PACKED, "cut": CUT, "cut right": CUT_RIGHT, "whole": WHOLE}
    return next(kind for kind, of_kind in sets.items() if name in of_kind)


def _kind(of: Support) -> str:
    if of.width_limit < passes.PROMPT_WIDTH + passes.COMPLETION_WIDTH:
        return "whole"
    if of.why_not_packed is None:
        return "packed"
    return "cut" if of.is_shift_invariant else "cut right"


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of newer transformers")
def test_the_table_is_of_all_families() -> None:
    told = [*PACKED, *CUT, *CUT_RIGHT, *WHOLE]
    assert len(told) == len(set(told))
    assert set(families.names()) == set(told)


@pytest.mark.parametrize("name", cases(families.names(), FAST.intersection(families.names())))
def test_a_batch_without_its_padding(name: str) -> None:
    """Several sequences and one alone, only cut even if they could be packed, and with shared prompts."""
    model, batch = _build(name), passes.make_batch()
    of, expected = find_support(model), passes.compute(model, model, batch)
    computed, shape = passes.without_padding(model, of, batch)
    passes.assert_same(computed, expected, passes.GRADIENTS_OF.get(name, passes.GRADIENTS))
    assert shape == passes.expected_shape(_kind(of), batch)
    if IS_TOLD:
        assert _kind(of) == _told(name)
    alone = {field: values[:1] for field, values in batch.items()}
    passes.assert_same(passes.without_padding(model, of, alone)[0], passes.compute(model, model, alone))
    if of.why_not_packed is None:
        computed, shape = passes.without_padding(model, replace(of, why_not_packed="told so"), batch)
        passes.assert_same(computed, expected)
        assert shape[0] == len(passes.PROMPTS)
        _assert_packed(model, expected, batch)
        if model.supports_gradient_checkpointing:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            _assert_packed(model, expected, batch)


@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_batches_of_any_shape_without_their_padding(name: str, shape: str, share: bool) -> None:
    """Full attention, windows, and windows with sinks."""
    given = BATCHES[shape]
    model, batch = _build(name), {"input_ids": given.ids, "attention_mask": given.mask, "labels": given.labels}
    width = given.prompt_columns
    computed, (rows, _) = passes.without_padding(
        model, find_support(model), batch, share_prompts=share, prompt_width=width
    )
    assert rows == 1
    if (given.labels != -100).any():
        passes.assert_same(computed, passes.compute(model, model, batch))
    else:
        assert not computed.log_probs.numel()


# Columns in front of a sequence. Some scales of queries first change after 16,384.
SHIFT = 2**16
# Rounding after that shift: the mean over all log-probs, relative to the largest. float32 rounds angles of 65,536
# radians by up to 4e-3. This moves log-probs by 2e-5 at most. The families below move theirs by 1e-3 or more.
ANGLES = 1.5e-4
ABSOLUTE = _set("beam dory hunyuan_v1_dense hunyuan_v1_moe ministral3")
TABLES = _set("codegen gptj")
"""The model has a table of angles, for as many positions as its config says."""


@pytest.mark.parametrize("name", cases(SHIFTED, FAST.intersection(SHIFTED)))
def test_columns_are_cut_only_if_positions_far_away_change_nothing(name: str) -> None:
    """With the weights of `families`, which differ by channel. Those of a new model would hide a scale of channels."""
    own = families.config(name, n_positions=2 * SHIFT) if name in TABLES else None
    model = _build(name, own=own)
    ids = passes.make_batch()["input_ids"].clamp(min=2)
    positions = torch.arange(ids.size(1)).expand_as(ids)
    with torch.no_grad():
        near, far = (
            model(input_ids=ids, position_ids=positions + shift, use_cache=False).logits.log_softmax(-1)
            for shift in (0, SHIFT)
        )
    apart = ((far - near).abs().mean() / near.abs().max()).item()
    if find_support(model).is_shift_invariant:
        assert within(apart, ANGLES)
    elif name in ABSOLUTE:
        assert not within(apart, ANGLES)


KERNELS = {"flash_attention_2": kernels.flash_attention, "varlen": kernels.torch_varlen}


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, attention) for name in PACKED_NAMES if name in FAST for attention in (*KERNELS, "eager")),
        *cases(((name, "flash_attention_2") for name in PACKED_NAMES if name not in FAST), fast=0),
    ],
)
def test_packed_by_other_attention(name: str, attention: str) -> None:
    """Against the padded batch: through FlashAttention where that packs, else by the model's default on a CPU."""
    model, batch = (
        _build(name, **({"attn_implementation": "eager"} if attention == "eager" else {})),
        passes.make_batch(),
    )
    if not IS_TOLD and (why_not := find_support(model).why_not_packed) is not None:
        pytest.skip(why_not)
    is_flash = attention == "flash_attention_2"
    if is_flash and (not model._supports_flash_attn or getattr(model.config, "prefix_lm", False)):
        pytest.skip(f"{name} does not take FlashAttention")
    if attention == "varlen" and own_implementation(model) != "sdpa":
        pytest.skip(f"{name} does not take sdpa")
    expected = None if is_flash else passes.compute(model, model, batch)
    watched = mock.patch.object(PackedAttention, "_attend", autospec=True, side_effect=PackedAttention._attend)
    with contextlib.ExitStack() as kernel:
        calls = kernel.enter_context(KERNELS[attention]()) if attention in KERNELS else None
        if is_flash:  # some families give it other windows than the masks of "sdpa" have
            kernels.use(model, attention)
        expected = expected or passes.compute(model, model, batch)
        attended = kernel.enter_context(watched)
        before = 0 if calls is None else calls.count
        _assert_packed(model, expected, batch)
    if calls is not None:
        assert calls.count - before == attended.call_count > 0


def _assert_packed(model: PreTrainedModel, expected: passes.Computed, batch: passes.Batch) -> None:
    computed, (rows, tokens) = passes.without_padding(model, find_support(model), batch, share_prompts=True)
    passes.assert_same(computed, expected)
    assert rows == 1
    assert tokens == batch["attention_mask"].sum() - (
        passes.PROMPTS[0] - 1
    )  # each completion has the prompt's last token
