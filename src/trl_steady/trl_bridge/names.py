"""TRL's names that trl-steady uses, as data. A TRL that is not tested is compared with them once, at import."""

import inspect
import pkgutil
import re
from collections.abc import Iterator

from trl_steady.trl_bridge.overrides import names_in

# Settings, each by itself or several with "+" -> functions in `trl` that they need; "*" is the class of both trainers.
# "f(a, b)": its parameters, before others with defaults. "f: a b": attributes, functions and strings in its code.
NAMES = """
trl-steady -> trainer.utils.is_async_callable(func); *._generate_and_score_completions(self, inputs): nanstd
    _calculate_rewards _generate _get_per_token_logps_and_entropies num_generations_eval; .__init__: _logs _metrics
    _pending_extra_logs advantages aux_loss_enabled eos_token_ids extra reward_weights; ._calculate_rewards(self,
    inputs, prompts, completions, completion_ids_list): reward_funcs; ._prepare_inputs:
    _generate_and_score_completions; ._get_per_token_logps_and_entropies(self, model, input_ids, attention_mask,
    logits_to_keep, batch_size, compute_entropy, compute_aux_loss); ._compute_loss(self, model, inputs):
    _get_per_token_logps_and_entropies advantages completion_ids completion_mask prompt_ids prompt_mask;
    RLOOTrainer._compute_loss: old_logps
loss_type=gmpo/gspo/gspo_token, kl_estimator=k1/k2, kl_ratio_denominator=sampler, use_vllm, rollout_func,
    importance_sampling_level=sequence+use_bias_correction_kl+beta, off_policy_mask_threshold, geometric_mask_range,
    token_veto_threshold -> GRPOTrainer._compute_loss: beta importance_sampling_level importance_sampling_ratio
    loss_type old_per_token_logps ref_per_token_logps sampling_per_token_logps tool_mask
loss_type=gmpo, off_policy_mask_threshold, geometric_mask_range, token_veto_threshold -> GRPOTrainer._compute_loss:
    get_off_policy_mask off_policy_mask_threshold; .get_off_policy_mask(advantages, per_token_logps,
    sampling_per_token_logps, mask, off_policy_threshold)
trim_padding -> *._get_per_token_logps_and_entropies: attention_mask aux_loss entropy input_ids labels log_probs
skip_zero_weight, token_budget -> GRPOTrainer._compute_loss: current_gradient_accumulation_steps
keep_sampling_mask, PPOTrainer, RewardAdapter -> *._get_per_token_logps_and_entropies: fused_lm_head labels log_probs;
    trainer.utils.maybe_gather_lm_head_ctx(params); .add_fused_lm_head: maybe_gather_lm_head_ctx
    _ChunkedLogProbFunction; trainer.utils._ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets,
    temperature, chunk_size, final_logit_softcapping, logit_scale)
beta, kl_coef -> *._generate_and_score_completions: beta ref
async_generate, sync_ref_model, token_budget, ReferenceRefreshCallback -> *._prepare_inputs: _step
save_strategy+save_only_model=False, resume_from_checkpoint -> *._prepare_inputs: _buffered_inputs _step
dynamic_sampling -> *._generate(self, prompts); ._log_completion_extra: _pending_extra_logs
async_generate, engine_check+use_vllm, keep_sampling_mask, router_replay=R3, RewardModelRefreshCallback ->
    GRPOTrainer._generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations);
    RLOOTrainer._generate_single_turn(self, prompt_ids, images, multimodal_fields); *._generate: _generate_single_turn
use_vllm -> *.__init__: VLLMGeneration _last_loaded_step; trainer.grpo_trainer.VLLMGeneration.__init__: _dist
    _init_vllm accelerator enable_sleep_mode logprobs mode tensor_parallel_size; ._init_vllm(self): LLM llm
    vllm_client; .generate(self, prompts, images, num_generations): generate llm vllm_client;
    ._iter_named_params(self); .sync_weights(self): _iter_named_params _llm_weights_sleeping empty_cache
async_generate, keep_sampling_mask+use_vllm, router_replay=R3+use_vllm ->
    generation.vllm_client.VLLMClient.generate(self, prompts, features, n): _post choices token_ids; ._post(self, url,
    kwargs): session
trl-steady grpo, trl-steady ppo, trl-steady rloo -> cli.main.main(argv); scripts.grpo.make_parser(subparsers, prog);
    cli.accelerate_launcher.launch_training_script(script_name, launch_args, training_script_args);
    cli.commands.training.TrainingCommand.run: launch_training_script make_parser prog
"""


def entries() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield settings, and of a function its owner, name, parameters and what it names; "*" once for each trainer."""
    for paragraph in re.split(r"\n(?! )", NAMES.strip()):
        settings, _, text = " ".join(paragraph.split()).partition(" -> ")
        owner = ""
        for path, *function in re.findall(r"([\w.*]*)\.(\w+)(?:\( ?([^)]*)\))?(?:: ([\w ]+))?", text):
            owner = path or owner
            for kind in ("GRPOTrainer", "RLOOTrainer") if owner == "*" else (owner,):
                yield settings, kind, *function


def moved() -> dict[str, str]:
    """Return the settings that need what the installed TRL lacks -> what it lacks first."""
    found: dict[str, str] = {}
    for settings, owner, name, parameters, named in entries():
        try:
            function = inspect.unwrap(pkgutil.resolve_name(f"trl.{owner}.{name}"))
            given, missing = inspect.signature(function).parameters, {*named.split()} - names_in(function.__code__)
        except (AttributeError, ImportError):
            given, missing = {}, {"such function"}
        known = parameters.split(", ") if parameters else [*given]
        needed = [each for each in given if each in known or given[each].default is inspect.Parameter.empty]
        if missing or needed != known:
            problem = f"trl.{owner}.{name}" + (f": no {min(missing)}" if missing else f"({', '.join(given)})")
            prefix = f"{owner}+" if owner in ("GRPOTrainer", "RLOOTrainer") else ""
            keys = [f"{prefix}{setting}".removesuffix("+trl-steady") for setting in settings.split(", ")]
            found = dict.fromkeys(keys, problem) | found
    return found
