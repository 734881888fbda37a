"""Table of everything that TRL's `_compute_loss` reads, and how trl-steady treats it; a test compares it with TRL."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["CONTRACT", "FORWARDED", "RLOO_CONTRACT", "Contract"]


@dataclass(frozen=True)
class Contract:
    """Names in TRL that trl-steady depends on, by kind: name -> how trl-steady's losses honour or refuse it."""

    attributes: Mapping[str, str]
    """`self.NAME`"""
    arguments: Mapping[str, str]
    """`self.args.NAME`"""
    inputs: Mapping[str, str]
    """`inputs["NAME"]`"""
    parameters: Mapping[str, tuple[str, ...]]
    """Methods of the trainer that trl-steady wraps -> their parameters"""
    buffering: Mapping[str, str]
    """Attributes that `_prepare_inputs` reads -> how a checkpoint inside a generation window treats them"""
    engine: Mapping[str, tuple[str, ...]]
    """Methods of TRL's vLLM engine that trl-steady wraps -> their parameters"""
    head: Mapping[str, tuple[str, ...]]
    """Functions of TRL's fused LM head that trl-steady calls or replaces -> their parameters"""
    command: Mapping[str, tuple[str, ...]]
    """Functions of TRL's command line that trl-steady calls or replaces -> their parameters"""
    scoring: Mapping[str, str]
    """Inputs and outputs of the model in TRL's scoring method -> how padding-free passes treat them"""


_BY_TRL = "honoured: TRL's own code runs"
_IN_RATIOS = "honoured: TRL's own code runs; translated to ratios for TRL's metrics under gmpo"
_CUT = "cut to the columns with tokens"
_LAID = "cut to the columns with tokens; packed if the model allows it"
_PASSED_ON = "passed on; the row is not packed"
FORWARDED = "honoured: forwarded to TRL's scoring method by name"
_OUR_KL = "honoured: our KL is normalised like TRL's loss"
_NOT_READ = "refused if set with a loss of ours, which does not read it; otherwise honoured: TRL's own code runs"

CONTRACT = Contract(
    attributes={
        "_get_per_token_logps_and_entropies": "wrapped: scores once, then hands the scores to TRL",
        "_entropy_bonus_enabled": _BY_TRL,
        "_entropy_window_stats": _BY_TRL,
        "_last_world_entropy": _BY_TRL,
        "_metrics": "honoured: TRL logs into it, and so do we",
        "accelerator": _BY_TRL,
        "args": "honoured: see the arguments",
        "aux_loss_enabled": "honoured: decides whether we score with the aux loss",
        "beta": "honoured: 0 for TRL while our KL replaces TRL's",
        "current_gradient_accumulation_steps": _OUR_KL,
        "entropy_coef": _BY_TRL,
        "epsilon_high": _IN_RATIOS,
        "epsilon_low": _IN_RATIOS,
        "get_gamma_weights": _BY_TRL,
        "get_high_entropy_mask": "honoured: TRL's own code runs; gmpo calls it and hands TRL the result",
        "get_off_policy_mask": "wrapped: one decision per sequence, also with (B, T) advantages; adds the other masks",
        "importance_sampling_level": "honoured: 'sequence' for gspo; 'token' for TRL's code under gspo_token and gmpo",
        "loss_type": "honoured: 'grpo' for TRL's code under our losses; decides how our terms are reduced",
        "max_completion_length": _OUR_KL,
        "model": _BY_TRL,
        "off_policy_mask_threshold": "honoured: TRL multiplies by our mask if one is active",
        "router_aux_loss_coef": _BY_TRL,
        "top_entropy_quantile": _BY_TRL,
        "use_adaptive_entropy": _BY_TRL,
        "use_vllm": _BY_TRL,
        "vllm_importance_sampling_correction": _BY_TRL,
    },
    arguments={
        "delta": _BY_TRL,
        "entropy_coef_delta": _BY_TRL,
        "entropy_coef_max": _BY_TRL,
        "entropy_coef_min": _BY_TRL,
        "entropy_target": _BY_TRL,
        "sapo_temperature_neg": _NOT_READ,
        "sapo_temperature_pos": _NOT_READ,
        "steps_per_generation": _OUR_KL,
        "use_bias_correction_kl": "honoured: our KL uses the token's ratio if TRL would use the sequence's",
        "vespo_k_neg": _NOT_READ,
        "vespo_k_pos": _NOT_READ,
        "vespo_lambda_neg": _NOT_READ,
        "vespo_lambda_pos": _NOT_READ,
    },
    inputs={
        "advantages": "rewritten: gspo_token takes (B, T), set to 0 where the mask is 0; gspo and gmpo refuse (B, T)",
        "completion_ids": _BY_TRL,
        "completion_mask": _BY_TRL,
        "image_grid_thw": FORWARDED,
        "image_position_ids": FORWARDED,
        "image_sizes": FORWARDED,
        "importance_sampling_ratio": "rewritten for our losses: set to 0 where the mask is 0",
        "mm_token_type_ids": FORWARDED,
        "num_images": FORWARDED,
        "num_items_in_batch": _OUR_KL,
        "num_tiles": FORWARDED,
        "old_per_token_logps": "rewritten: old log-probs of gspo_token's surrogate",
        "pixel_attention_mask": FORWARDED,
        "pixel_values": FORWARDED,
        "prompt_ids": _BY_TRL,
        "prompt_mask": _BY_TRL,
        "ref_per_token_logps": "rewritten: shifted like gspo_token's surrogate",
        "sampling_per_token_logps": "honoured: read by our masks, KL and metrics",
        "spatial_shapes": FORWARDED,
        "token_type_ids": FORWARDED,
        "tool_mask": _BY_TRL,
    },
    parameters={
        "_compute_loss": ("self", "model", "inputs"),
        "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        "training_step": ("self", "model", "inputs", "num_items_in_batch"),
        "_get_per_token_logps_and_entropies": (
            "self",
            "model",
            "input_ids",
            "attention_mask",
            "logits_to_keep",
            "batch_size",
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
            "image_grid_thw",
            "num_images",
            "pixel_attention_mask",
            "spatial_shapes",
            "num_tiles",
            "image_sizes",
            "token_type_ids",
            "mm_token_type_ids",
            "image_position_ids",
        ),
        "get_off_policy_mask": (
            "advantages",
            "per_token_logps",
            "sampling_per_token_logps",
            "mask",
            "off_policy_threshold",
        ),
        "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
        "_generate_and_score_completions": ("self", "inputs"),
        "_generate_single_turn": (
            "self",
            "prompt_ids",
            "images",
            "multimodal_fields",
            "num_generations",
            "has_tool_images",
        ),
        "_get_output_dir": ("self", "trial"),
        "_get_train_sampler": ("self", "dataset"),
        "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
        "_load_optimizer_and_scheduler": ("self", "checkpoint"),
        "_push_from_checkpoint": ("self", "checkpoint_folder"),
        "_save": ("self", "output_dir", "state_dict"),
        "_save_checkpoint": ("self", "model", "trial"),
        "log": ("self", "logs", "start_time"),
        "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
        "get_train_dataloader": ("self",),
    },
    buffering={
        "_buffered_inputs": "saved, one file per process",
        "_generate_and_score_completions": "wrapped: parameters stay trainable; step rewards become advantages",
        "_step": "saved",
        "args": "must be the same on resume",
        "model": "tells training from evaluation",
        "num_iterations": "must be the same on resume",
    },
    engine={
        "VLLMGeneration._init_vllm": ("self",),
        "VLLMGeneration.generate": ("self", "prompts", "images", "num_generations", "profiler"),
        "VLLMClient._post": ("self", "url", "kwargs"),
        "VLLMClient.generate": (
            "self",
            "prompts",
            "features",
            "n",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_tokens",
            "logprobs",
            "structured_outputs_regex",
            "generation_kwargs",
        ),
    },
    head={
        "_ChunkedLogProbFunction.forward": (
            "ctx",
            "hidden",
            "weight",
            "bias",
            "targets",
            "temperature",
            "chunk_size",
            "final_logit_softcapping",
            "logit_scale",
            "outputs",
        ),
        "maybe_gather_lm_head_ctx": ("params",),
    },
    command={
        "trl.cli.main.main": ("argv",),
        "trl.cli.accelerate_config.resolve_accelerate_config_argument": ("launch_args",),
        "trl.cli.accelerate_launcher.launch_training_script": (
            "script_name",
            "launch_args",
            "training_script_args",
            "launch_command_fn",
            "launch_parser_fn",
        ),
        "trl.scripts.grpo.make_parser": ("subparsers", "prog"),
        "trl.scripts.rloo.make_parser": ("subparsers", "prog"),
    },
    scoring={
        "attention_mask": _LAID,
        "aux_loss": "the model's own",
        "entropy": "scattered back to the padded batch, 0 where there is no label",
        "fused_lm_head": "passed on",
        "image_grid_thw": _PASSED_ON,
        "image_position_ids": _PASSED_ON,
        "image_sizes": _PASSED_ON,
        "input_ids": _LAID,
        "labels": _LAID,
        "log_probs": "scattered back to the padded batch, 0 where there is no label",
        "mm_token_type_ids": _CUT,
        "output_router_logits": "passed on",
        "pixel_attention_mask": _PASSED_ON,
        "pixel_values": _PASSED_ON,
        "spatial_shapes": _PASSED_ON,
        "token_type_ids": _CUT,
    },
)

_ELSE = ("get_off_policy_mask", "_generate_single_turn")  # missing in RLOO, or with other parameters
RLOO_CONTRACT = replace(
    CONTRACT,
    attributes={
        "_get_per_token_logps_and_entropies": "wrapped: the parts score",
        **dict.fromkeys(("_metrics", "accelerator", "aux_loss_enabled", "epsilon_high", "epsilon_low"), _BY_TRL),
        **dict.fromkeys(("model", "router_aux_loss_coef"), _BY_TRL),
    },
    arguments={},
    inputs={
        **{name: FORWARDED for name, how in CONTRACT.inputs.items() if how == FORWARDED},
        **dict.fromkeys(("advantages", "old_logps"), _BY_TRL),
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), _BY_TRL),
    },
    parameters={
        **{name: known for name, known in CONTRACT.parameters.items() if name not in _ELSE},
        "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields"),
    },
)
"""The same for TRL's RLOO, whose loss runs on TRL's own inputs."""
