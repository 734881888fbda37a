"""Table of everything that TRL's `_compute_loss` reads, and how trl-steady treats it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trl_steady.host.loss import FORWARDED as FORWARDED_INPUTS


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
FORWARDED = "honoured: forwarded to TRL's scoring method by name"
_OUR_KL = "honoured: our KL is normalised like TRL's loss"
_NOT_READ = "honoured: TRL's own code runs; a loss of ours does not read it"


def _each(names: str, how: str) -> dict[str, str]:
    return dict.fromkeys(names.split(", "), how)


def _parameters(signatures: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(signature.split(", ")) for name, signature in signatures.items()}


CONTRACT = Contract(
    attributes={
        **_each("accelerator, model, use_vllm, vllm_importance_sampling_correction", _BY_TRL),
        **_each("_entropy_bonus_enabled, _entropy_window_stats, _last_world_entropy, entropy_coef", _BY_TRL),
        **_each("get_gamma_weights, router_aux_loss_coef, top_entropy_quantile, use_adaptive_entropy", _BY_TRL),
        **_each("epsilon_high, epsilon_low", _IN_RATIOS),
        **_each("current_gradient_accumulation_steps, max_completion_length", _OUR_KL),
        "_get_per_token_logps_and_entropies": "wrapped: scores once, then hands the scores to TRL",
        "_metrics": "honoured: TRL logs into it, and so do we",
        "args": "honoured: see the arguments",
        "aux_loss_enabled": "honoured: decides whether we score with the aux loss",
        "beta": "honoured: 0 for TRL while our KL replaces TRL's",
        "get_high_entropy_mask": "honoured: TRL's own code runs; gmpo calls it and hands TRL the result",
        "get_off_policy_mask": "wrapped: one decision per sequence, also with (B, T) advantages; adds the other masks",
        "importance_sampling_level": "honoured: 'sequence' for gspo; 'token' for TRL's code under gspo_token and gmpo",
        "loss_type": "honoured: 'grpo' for TRL's code under our losses; decides how our terms are reduced",
        "off_policy_mask_threshold": "honoured: TRL multiplies by our mask if one is active",
    },
    arguments={
        **_each("delta, entropy_coef_delta, entropy_coef_max, entropy_coef_min, entropy_target", _BY_TRL),
        **_each("sapo_temperature_neg, sapo_temperature_pos", _NOT_READ),
        **_each("vespo_k_neg, vespo_k_pos, vespo_lambda_neg, vespo_lambda_pos", _NOT_READ),
        "steps_per_generation": _OUR_KL,
        "use_bias_correction_kl": "honoured: our KL uses the token's ratio if TRL would use the sequence's",
    },
    inputs={
        **_each("prompt_ids, prompt_mask, completion_ids, completion_mask, tool_mask", _BY_TRL),
        **dict.fromkeys(FORWARDED_INPUTS, FORWARDED),
        "advantages": "rewritten: gspo_token takes (B, T), set to 0 where the mask is 0; gspo and gmpo refuse (B, T)",
        "importance_sampling_ratio": "rewritten for our losses: set to 0 where the mask is 0",
        "num_items_in_batch": _OUR_KL,
        "old_per_token_logps": "rewritten: old log-probs of gspo_token's surrogate",
        "ref_per_token_logps": "rewritten: shifted like gspo_token's surrogate",
        "sampling_per_token_logps": "honoured: read by our masks, KL and metrics",
    },
    parameters=_parameters(
        {
            "_compute_loss": "self, model, inputs",
            "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
            "training_step": "self, model, inputs, num_items_in_batch",
            "_get_per_token_logps_and_entropies": (
                "self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, "
                "compute_aux_loss, pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, "
                "num_tiles, image_sizes, token_type_ids, mm_token_type_ids, image_position_ids"
            ),
            "get_off_policy_mask": "advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold",
            "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
            "_generate_and_score_completions": "self, inputs",
            "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
            "_get_output_dir": "self, trial",
            "_get_train_sampler": "self, dataset",
            "create_optimizer": "self, model",
            "_load_from_checkpoint": "self, resume_from_checkpoint, model",
            "_load_optimizer_and_scheduler": "self, checkpoint",
            "_push_from_checkpoint": "self, checkpoint_folder",
            "_save": "self, output_dir, state_dict",
            "_save_checkpoint": "self, model, trial",
            "log": "self, logs, start_time",
            "get_batch_samples": "self, epoch_iterator, num_batches, device",
            "get_train_dataloader": "self",
        }
    ),
    buffering={
        "_buffered_inputs": "saved, one file per process",
        "_generate_and_score_completions": "wrapped: parameters stay trainable; step rewards become advantages",
        "_step": "saved",
        "args": "must be the same on resume",
        "model": "tells training from evaluation",
        "num_iterations": "must be the same on resume",
    },
    engine=_parameters(
        {
            "VLLMGeneration._init_vllm": "self",
            "VLLMGeneration.generate": "self, prompts, images, num_generations, profiler",
            "VLLMClient._post": "self, url, kwargs",
            "VLLMClient.generate": (
                "self, prompts, features, n, repetition_penalty, temperature, top_p, top_k, min_p, max_tokens, "
                "logprobs, structured_outputs_regex, generation_kwargs"
            ),
        }
    ),
    head=_parameters(
        {
            "_ChunkedLogProbFunction.forward": (
                "ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, "
                "outputs"
            ),
            "maybe_gather_lm_head_ctx": "params",
        }
    ),
    command=_parameters(
        {
            "trl.cli.main.main": "argv",
            "trl.cli.accelerate_config.resolve_accelerate_config_argument": "launch_args",
            "trl.cli.accelerate_launcher.launch_training_script": (
                "script_name, launch_args, training_script_args, launch_command_fn, launch_parser_fn"
            ),
            "trl.scripts.grpo.make_parser": "subparsers, prog",
            "trl.scripts.rloo.make_parser": "subparsers, prog",
        }
    ),
    scoring={
        **_each("attention_mask, input_ids, labels", "cut to the columns with tokens; packed if the model allows it"),
        **_each("mm_token_type_ids, token_type_ids", "cut to the columns with tokens"),
        **_each("image_grid_thw, image_position_ids, image_sizes", "passed on; the row is not packed"),
        **_each("pixel_attention_mask, pixel_values, spatial_shapes", "passed on; the row is not packed"),
        **_each("entropy, log_probs", "scattered back to the padded batch, 0 where there is no label"),
        **_each("fused_lm_head, output_router_logits", "passed on"),
        "aux_loss": "the model's own",
    },
)

RLOO_CONTRACT = replace(
    CONTRACT,
    attributes={
        **_each("_metrics, accelerator, aux_loss_enabled, epsilon_high, epsilon_low", _BY_TRL),
        **_each("model, router_aux_loss_coef", _BY_TRL),
        "_get_per_token_logps_and_entropies": "wrapped: the parts score",
    },
    arguments={},
    inputs={
        **dict.fromkeys(FORWARDED_INPUTS, FORWARDED),
        **_each("advantages, old_logps, prompt_ids, prompt_mask, completion_ids, completion_mask", _BY_TRL),
    },
    parameters={
        **{name: known for name, known in CONTRACT.parameters.items() if name != "get_off_policy_mask"},
        **_parameters({"_generate_single_turn": "self, prompt_ids, images, multimodal_fields"}),
    },
)
"""The same for TRL's RLOO, whose loss runs on TRL's own inputs."""
