"""Names that TRL reads beside those that `trl_bridge/names.toml` lists. The tests compare both with TRL."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trl_steady.trl_bridge.log_probs import OTHER_INPUTS
from trl_steady.trl_bridge.names import needed


@dataclass(frozen=True)
class Contract:
    """Names that `_compute_loss` reads, and the parameters of methods of transformers that trl-steady overrides."""

    reads: frozenset[str]
    """`self.NAME` and `inputs["NAME"]`."""
    arguments: frozenset[str]
    """`self.args.NAME`."""
    parameters: Mapping[str, tuple[str, ...]]


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


def named_in(owner: str, function: str) -> frozenset[str]:
    """Return what trl-steady needs to be named in a function of TRL."""
    return frozenset().union(*(each.names for each in needed() if (each.owner, each.name) == (owner, function)))


CONTRACT = Contract(
    reads=named_in("GRPOTrainer", "_compute_loss")
    | _names(
        # TRL's own code reads them
        "accelerator args model use_vllm vllm_importance_sampling_correction _metrics epsilon_high epsilon_low",
        "_entropy_bonus_enabled _entropy_window_stats _last_world_entropy entropy_coef get_high_entropy_mask",
        "get_gamma_weights router_aux_loss_coef top_entropy_quantile use_adaptive_entropy",
        # our terms are normalised like TRL's loss
        "current_gradient_accumulation_steps max_completion_length num_items_in_batch",
        # it decides if a micro-batch is scored with the load-balancing loss
        "aux_loss_enabled",
        # the scoring method gets them by name
        *OTHER_INPUTS,
    ),
    arguments=_names(
        "delta entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target steps_per_generation",
        "sapo_temperature_neg sapo_temperature_pos use_bias_correction_kl",
        "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    ),
    parameters={
        name: tuple(signature.split(", "))
        for name, signature in {
            "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
            "training_step": "self, model, inputs, num_items_in_batch",
            "_get_grad_norm": "self, model, grad_norm",
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
        }.items()
    },
)

RLOO_CONTRACT = replace(
    CONTRACT,
    reads=named_in("RLOOTrainer", "_compute_loss")
    | _names(
        "_metrics accelerator aux_loss_enabled epsilon_high epsilon_low model router_aux_loss_coef", *OTHER_INPUTS
    ),
    arguments=frozenset[str](),
)
"""The same for TRL's RLOO, whose loss runs on TRL's own inputs."""

DEFAULTS = {
    ("GRPOTrainer", "_get_per_token_logps_and_entropies"): {*OTHER_INPUTS},
    ("RLOOTrainer", "_get_per_token_logps_and_entropies"): {*OTHER_INPUTS},
    ("GRPOTrainer", "_generate_single_turn"): {"has_tool_images"},
    ("trainer.utils._ChunkedLogProbFunction", "forward"): {"outputs"},
    ("trainer.grpo_trainer.VLLMGeneration", "generate"): {"profiler"},
    ("generation.vllm_client.VLLMClient", "generate"): {
        *("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs"),
        *("structured_outputs_regex", "generation_kwargs"),
    },
    ("cli.accelerate_launcher", "launch_training_script"): {"launch_command_fn", "launch_parser_fn"},
}
"""Functions of TRL -> parameters with defaults after those that trl-steady knows, and hands on."""

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
