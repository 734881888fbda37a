"""A tiny random model of every causal-LM family of transformers, for sweeps over them."""

import itertools
import zlib
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY = 96
WINDOW = 6

IS_TOLD = Version(transformers.__version__) >= Version("5.24")
"""True if the tests' tables must hold. Older versions have fewer families, and pack or replay less of them."""

_NO_BACKBONE = "TRL's fused head takes the model for its own backbone: the prefix of its class names another"
UNBUILT: dict[str, str] = {
    **dict.fromkeys(("fuyu", "git", "got_ocr2", "phi4_multimodal"), "reads images"),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "gemma4_unified"), "reads images; its text half is built"),
    "moss_transcribe_diarize": "reads sound",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "writes sound, in several codebooks at a time"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts from the hidden states of another model"
    ),
    **dict.fromkeys(("llama4", "llama4_text", "mllama"), _NO_BACKBONE),
    "reformer": "hashes its tokens into buckets at random",
}
"""Entries of transformers' mapping that are left out, and why."""

# Taken by every config that has the field.
_SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        # width
        (32, "hidden_size n_embd d_model emb_dim embedding_size embedding_dim"),
        (48, "intermediate_size n_inner ffn_dim dff dim_ff ffn_hidden_size d_inner decoder_ffn_dim encoder_ffn_dim"),
        (48, "feed_forward_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size"),
        (4, "num_attention_heads n_head n_heads decoder_attention_heads attention_heads encoder_attention_heads"),
        (4, "swa_num_attention_heads"),
        (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups"),
        (
            8,
            "head_dim swa_head_dim dim_head global_head_dim kv_channels d_head attention_head_size attention_head_dim",
        ),
        # depth
        (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
        # vocabulary
        (VOCABULARY, "vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
        (0, "pad_token_id bos_token_id cls_token_id image_token_id eod_token_id"),
        (1, "eos_token_id sep_token_id mask_token_id"),
        # how far a token sees
        (WINDOW, "sliding_window sliding_window_size window_size attention_window_size"),
        (64, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
        # experts
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token top_k_experts moe_k moe_topk"),
        (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
        (16, "moe_shared_expert_intermediate_size"),
        (1, "n_group num_expert_group topk_group first_k_dense_replace n_shared_experts num_shared_experts"),
        # low rank, and sparse
        (16, "q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank"),
        (8, "qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim indexer_head_dim"),
        (2, "index_n_heads indexer_n_heads"),
        (26, "index_topk"),
        # recurrent
        (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads"),
        (8, "mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim"),
        (2, "mamba_n_groups n_groups mamba_ngroups linear_num_key_heads linear_num_value_heads"),
        (4, "chunk_size mamba_chunk_size"),
        (True, "use_sliding_window is_decoder"),
        # noise
        (
            0.0,
            "attention_dropout hidden_dropout hidden_dropout_prob dropout resid_dropout attention_probs_dropout_prob",
        ),
        (0.0, "activation_dropout resid_pdrop embd_pdrop attn_pdrop classifier_dropout layerdrop decoder_layerdrop"),
        (0.0, "embedding_dropout residual_dropout embed_dropout mlp_dropout dropout_p router_jitter_noise"),
        (0.0, "input_jitter_noise"),
    )
    for name in names.split()
}

_EXTRAS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        **{
            f"{part}_config": {
                **dict.fromkeys(("hidden_size", "hidden_size_global"), 32),
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "vocab_size": 260,
                "max_position_embeddings": 64,
            }
            for part in ("encoder", "decoder", "global", "patcher")
        },
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
    },
    "codegen": {"rotary_dim": 4},
    **{name: {"logit_scale": 1.0} for name in ("cohere", "cohere2", "cohere2_moe")},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "dots3_note_text": {
        "head_dim": 16,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    },
    "dory": {
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "initializer_range": 1.0,  # scales of channels are relative to it
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        "log_scaling_n_floor": 4,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 13,
    },
    "minicpm3": {"dim_model_base": 32},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp_text": {
        "indexer_kv_heads": 1,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "shape_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "n_mamba_heads": 8,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "router_hidden_size": 16},
}
"""Where those do not do."""
_EXTRAS |= {
    alias: _EXTRAS[name]
    for alias, name in {
        "dots3_note": "dots3_note_text",
        "gemma4_unified_text": "gemma4_text",
        "qwen4_exp": "qwen4_exp_text",
    }.items()
}


def names() -> list[str]:
    """The model types that `build` knows."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNBUILT]


def config(name: str, **changed: Any) -> PretrainedConfig:
    """A tiny one of a model type, or of a text model in another, with each kind of its layers and changed fields."""
    kind = _model_class(name).config_class if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else CONFIG_MAPPING[name]
    known = kind().to_dict()
    fields = {field: size for field, size in _SIZES.items() if field in known}
    if "kv_lora_rank" in known:  # latent attention has no groups of heads
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    kinds = {field: list(dict.fromkeys(known.get(field) or ())) for field in ("layer_types", "mlp_layer_types")}
    if kinds["layer_types"] == ["full_attention"] and "sliding_window" in known:
        kinds["layer_types"].append("sliding_attention")
    depth = max(4, len(kinds["layer_types"])) if len(kinds["layer_types"]) > 1 else 2
    for field, of_layers in kinds.items():
        if len(of_layers) > 1:
            fields["num_hidden_layers"] = depth
            fields[field] = list(itertools.islice(itertools.cycle(of_layers), depth))
    return kind(**fields | _EXTRAS.get(name, {}) | changed)


def build(name: str, *, own: PretrainedConfig | None = None, **options: Any) -> PreTrainedModel:
    """The tiny random model of a model type or config, in float32 and ready to be evaluated; the same each time."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model = _model_class(name)._from_config(own or config(name), dtype=torch.float32, **options)
    _spread(model)
    return model.eval()


def _model_class(name: str) -> type[PreTrainedModel]:
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return getattr(transformers, known[name])


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Weights far enough from 0, and from 1 where they scale, that each of them counts."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # how fast states decay: slowly enough that what enters one is seen long after
            parameter.normal_(-1, 0.3)
        elif parameter.dim() > 1 and parameter.std() < 0.1:
            parameter.normal_(0, 0.2)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
