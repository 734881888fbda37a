"""The names in TRL that trl-steady depends on. The tests compare them with the installed TRL."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trl_steady.trl_bridge.log_probs import OTHER_INPUTS


@dataclass(frozen=True)
class Contract:
    """The names that TRL's methods read, and the parameters of the methods that trl-steady overrides."""

    attributes: frozenset[str]
    """`self.NAME` in `_compute_loss`."""
    arguments: frozenset[str]
    """`self.args.NAME` in `_compute_loss`."""
    inputs: frozenset[str]
    """`inputs["NAME"]` in `_compute_loss`."""
    parameters: Mapping[str, tuple[str, ...]]
    """Methods of the trainer that trl-steady overrides -> their parameters."""


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


def _parameters(signatures: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(signature.split(", ")) for name, signature in signatures.items()}


CONTRACT = Contract(
    attributes=_names(
        # TRL's own code reads them
        "accelerator args model use_vllm vllm_importance_sampling_correction",
        "_entropy_bonus_enabled _entropy_window_stats _last_world_entropy entropy_coef",
        "get_gamma_weights router_aux_loss_coef top_entropy_quantile use_adaptive_entropy",
        # our terms are normalised like TRL's loss
        "current_gradient_accumulation_steps max_completion_length",
        # gmpo's are translated to ratios for TRL's metrics
        "epsilon_high epsilon_low",
        # `loss.attributes` replaces them while TRL's loss runs
        "_get_per_token_logps_and_entropies beta get_off_policy_mask importance_sampling_level loss_type",
        "off_policy_mask_threshold",
        # gmpo calls it, and gives TRL the result
        "get_high_entropy_mask",
        # it decides if a micro-batch is scored with the load-balancing loss
        "aux_loss_enabled",
        # TRL logs into it, and so do we
        "_metrics",
    ),
    arguments=_names(
        "delta entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target steps_per_generation",
        "sapo_temperature_neg sapo_temperature_pos use_bias_correction_kl",
        "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    ),
    inputs=_names(
        "prompt_ids prompt_mask completion_ids completion_mask tool_mask num_items_in_batch",
        # `loss.rewritten` replaces them, or `MicroBatch` reads them
        "advantages importance_sampling_ratio old_per_token_logps ref_per_token_logps sampling_per_token_logps",
        # the scoring method gets them by name
        *OTHER_INPUTS,
    ),
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
            "_generate": "self, prompts",
            "_generate_and_score_completions": "self, inputs",
            "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
            "_get_output_dir": "self, trial",
            "_get_train_sampler": "self, dataset",
            "_load_from_checkpoint": "self, resume_from_checkpoint, model",
            "_load_optimizer_and_scheduler": "self, checkpoint",
            "_push_from_checkpoint": "self, checkpoint_folder",
            "_save": "self, output_dir, state_dict",
            "_save_checkpoint": "self, model, trial",
            "create_optimizer": "self, model",
            "get_batch_samples": "self, epoch_iterator, num_batches, device",
            "get_train_dataloader": "self",
            "log": "self, logs, start_time",
        }
    ),
)

RLOO_CONTRACT = replace(
    CONTRACT,
    attributes=_names(
        "_get_per_token_logps_and_entropies _metrics accelerator aux_loss_enabled epsilon_high epsilon_low model",
        "router_aux_loss_coef",
    ),
    arguments=frozenset[str](),
    inputs=_names("advantages old_logps prompt_ids prompt_mask completion_ids completion_mask", *OTHER_INPUTS),
    parameters={
        **{name: known for name, known in CONTRACT.parameters.items() if name != "get_off_policy_mask"},
        **_parameters({"_generate_single_turn": "self, prompt_ids, images, multimodal_fields"}),
    },
)
"""The same for TRL's RLOO, whose loss runs on TRL's own inputs."""

BUFFERING = _names("_buffered_inputs _generate_and_score_completions _step args model num_iterations")
"""Attributes that `_prepare_inputs` reads. Checkpoints inside a window keep `_buffered_inputs` and `_step`."""

FUNCTIONS = _parameters(
    {
        "trl.generation.vllm_generation.VLLMGeneration._init_vllm": "self",
        "trl.generation.vllm_generation.VLLMGeneration._iter_named_params": "self",
        "trl.generation.vllm_generation.VLLMGeneration.generate": "self, prompts, images, num_generations, profiler",
        "trl.generation.vllm_client.VLLMClient._post": "self, url, kwargs",
        "trl.generation.vllm_client.VLLMClient.generate": (
            "self, prompts, features, n, repetition_penalty, temperature, top_p, top_k, min_p, max_tokens, "
            "logprobs, structured_outputs_regex, generation_kwargs"
        ),
        "trl.trainer.utils._ChunkedLogProbFunction.forward": (
            "ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, "
            "outputs"
        ),
        "trl.trainer.utils.maybe_gather_lm_head_ctx": "params",
        "trl.cli.main.main": "argv",
        "trl.cli.accelerate_config.resolve_accelerate_config_argument": "launch_args",
        "trl.cli.accelerate_launcher.launch_training_script": (
            "script_name, launch_args, training_script_args, launch_command_fn, launch_parser_fn"
        ),
        "trl.scripts.grpo.make_parser": "subparsers, prog",
        "trl.scripts.rloo.make_parser": "subparsers, prog",
    }
)
"""Functions of TRL's engine, fused LM head and command line that trl-steady calls or replaces -> their parameters."""

SCORING = _names(
    # cut to the columns with tokens, and packed if the model allows it
    "attention_mask input_ids labels mm_token_type_ids token_type_ids",
    # passed on; a row with images is not packed
    "image_grid_thw image_position_ids image_sizes pixel_attention_mask pixel_values spatial_shapes",
    "fused_lm_head output_router_logits",
    # outputs: scattered back to the padded batch, and the model's own
    "entropy log_probs aux_loss",
)
"""Inputs and outputs of the model in TRL's scoring method, which padding-free passes handle."""
