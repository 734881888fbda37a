"""Values of options that are refused whatever the other options are."""

from typing import Any

import torch

INF, NAN = float("inf"), float("nan")

INVALID: dict[str, list[Any]] = {
    "loss_type": ["GSPO", None, ["gspo"]],
    "epsilon": [-1e-4, NAN, "small", True],
    "epsilon_high": [-0.1],
    "importance_sampling_level": ["sequences"],
    "kl_estimator": ["K3", None],
    "kl_ratio_denominator": ["mu"],
    "beta_column": ["", 0.5],
    "dppo_divergence": ["js", None],
    "sampler_penalty": [-1e-3, NAN, INF, 1e308],
    "m2po_budget": [-0.1, "none"],
    "scale_rewards": ["std", None],
    "off_policy_mask_level": ["Token"],
    "geometric_mask_range": [(0.99,), (1.01, 0.99), (1.01, 1.02), {"low": 0.9, "high": 1.1}, 0.99],
    "token_veto_threshold": ["1e-4", 0.0, 1.0],
    "step_advantage": ["gae"],
    "advantage_baseline": ["mean"],
    "ref_model_sync_kl": [INF],
    "ref_model_sync_reset_optimizer": [2],
    "trim_padding": ["no", None],
    "token_budget": [0, 10.5, "4096", True],
    "share_prompts": ["false"],
    "skip_zero_weight": ["yes"],
    "skip_old_pass": ["auto", 2],
    "training_report": ["false"],
    "log_line": ["false"],
    "router_replay": ["r3", True],
    "router_replay_reference": ["R3"],
    "keep_sampling_mask": [[0.9]],
    "adapter_dtype": ["float16"],
    "vllm_adapter_sync": ["lora"],
    "vllm_request_seeds": ["yes", 2],
    "vllm_engine_kwargs": ["fp8", "{'quantization': 'fp8'}", ["fp8"], True],
    "engine_check": [0.0],
    "eval_metrics": [0.5, [1.0], {0.5}, torch.nn.Linear(1, 1)],
    "eval_generation": [
        *({"temperature": -1.0}, {"max_tokens": 8}, {"top_p": 1.5}, {"greedy": 1}, {"max_completion_length": 0}),
        *("greedy", [], '{"greedy": "yes"}', True),
    ],
    "skip_nonfinite_steps": [0, 1.5, "3", True],
    "async_generate": ["server", None],
    "teacher": ["", 1],
    "teacher_coef": [-0.1, INF, "half"],
    "teacher_mode": ["kl", None],
    "teacher_prompt": ["", 1, lambda row: row["prompt"]],
    "dynamic_sampling": ["zero_std"],
    "dynamic_sampling_max_rounds": [1, 2.5],
    "dynamic_sampling_filter": ["zero", None, (1, 0), (0, 1, 2), (0.5, 0.5), "01", 0.5, lambda rewards, rows: True],
}
"""Option of `GRPOConfig` -> values that are refused whatever the other options are."""

INVALID_PPO: dict[str, list[Any]] = {
    "num_generations": [0, -1, 2.5, True, "one", None],
    "gamma": [1.1],
    "lam": [-0.1],
    "value_lam": [2],
    "kl_coef": [-1, INF],
    "kl_target": [0],
    "kl_horizon": [0],
    "kl_estimator": ["k4"],
    "cliprange_value": [0],
    "value_learning_rate": [-1e-5, INF],
    "value_warmup_steps": [-1, 0.5],
    "value_init": [""],
    "whiten_advantages": ["yes"],
    "whiten_rewards": [None],
    "bootstrap_truncated": ["yes"],
    "missing_eos_penalty": [NAN, -1.0, INF],
    "ptx_coef": [-1, 1e308],
}
"""The same for `PPOConfig`, beside the options above."""
