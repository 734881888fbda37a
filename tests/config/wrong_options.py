"""Options that a user gets wrong: invalid values, options that contradict each other, and options without effect."""

from typing import Any

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
    "sampler_penalty": [-1e-3, NAN],
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
    "vllm_engine_kwargs": ["fp8", "{'quantization': 'fp8'}", ["fp8"], True],
    "engine_check": [0.0],
    "skip_nonfinite_steps": [0, 1.5, "3", True],
    "async_generate": ["server", None],
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
    "kl_coef": [-1],
    "kl_target": [0],
    "kl_horizon": [0],
    "kl_estimator": ["k4"],
    "cliprange_value": [0],
    "value_learning_rate": [-1e-5],
    "value_warmup_steps": [-1, 0.5],
    "value_init": [""],
    "whiten_advantages": ["yes"],
    "whiten_rewards": [None],
    "bootstrap_truncated": ["yes"],
    "missing_eos_penalty": [NAN, -1.0],
    "ptx_coef": [-1],
}
"""The same for `PPOConfig`, beside the options above."""

_ON_POLICY = {"steps_per_generation": 1}
Wrong = tuple[dict[str, Any], str]
"""Options, and a regular expression for what is said of them."""

CONTRADICTIONS: list[Wrong] = [
    ({"kl_estimator": "k1", "use_bias_correction_kl": False, "beta": 0.1}, r"adds noise.*'k2' or 'k3'"),
    ({"sync_ref_model": True}, r"sync_ref_model=True with beta=0\.0"),
    ({"adapter_dtype": "float32", "use_transformers_continuous_batching": True}, "adapter_dtype='float32' does not"),
    ({"keep_sampling_mask": True, "use_transformers_continuous_batching": True}, "keep_sampling_mask=True does not"),
    ({"importance_sampling_level": "token"}, r"='token' contradicts loss_type='gspo'.*Leave importance_s"),
    (
        {"scale_rewards": "mean", "multi_objective_aggregation": "normalize_then_sum"},
        r"scale_rewards='mean' contradicts multi_objective_aggregation='normalize_then_sum'",
    ),
    ({"token_budget": 512, "trim_padding": False}, r"token_budget=512 does not work with trim_padding=False"),
    ({"share_prompts": True, "trim_padding": False}, r"share_prompts=True does not work with trim_padding"),
    ({"token_budget": 512, "loss_type": "bnpo"}, r"token_budget=512 does not work with loss_type='bnpo'"),
    ({"token_budget": 512, "entropy_coef": 0.1}, r"does not work with entropy_coef=0\.1"),
    ({"token_budget": 512, "top_entropy_quantile": 0.2}, r"does not work with top_entropy_quantile=0\.2"),
    ({"skip_zero_weight": True, "beta": 0.1}, r"skip_zero_weight=True does not work with beta=0\.1"),
    ({"skip_zero_weight": True, "sampler_penalty": 0.1}, r"=True does not work with sampler_penalty=0\.1"),
    ({"skip_zero_weight": True, "entropy_coef": 0.1}, r"skip_zero_weight=True does not work with entropy_coef=0\.1"),
    ({"skip_zero_weight": True, "use_adaptive_entropy": True}, r"=True does not work with use_adaptive_entropy=True"),
    ({"skip_zero_weight": True, "top_entropy_quantile": 0.2}, r"=True does not work with top_entropy_quantile=0\.2"),
    (
        {"skip_old_pass": True},
        r"skip_old_pass=True does not work with gradient_accumulation_steps=1, which is no multi",
    ),
    (
        {"skip_old_pass": True, **_ON_POLICY, "router_replay": "R2"},
        r"skip_old_pass=True does not .*router_replay='R2'",
    ),
    ({"skip_old_pass": True, **_ON_POLICY, "neftune_noise_alpha": 5}, r"skip_old_pass=True does not .*alpha=5, whose"),
    ({"top_k": None}, r"top_k=None: transformers takes it for 50"),
    ({"use_vllm": True, "vllm_engine_kwargs": '{"seed": 1}'}, r"vllm_engine_kwargs has seed=1, .*Leave it out\.$"),
    (
        {"use_vllm": True, "vllm_engine_kwargs": {"max_num_seqs": 8, "max_model_len": 512}},
        r"vllm_engine_kwargs has max_model_len=512, .*Leave it out, and set vllm_max_model_length\.",
    ),
    (
        {"use_vllm": True, "vllm_engine_kwargs": {"quantization": "fp8"}},
        r"quantization='fp8', and a quantised .*set vllm_adapter_sync=True",
    ),
    ({"async_generate": True}, r"async_generate=True does not work with use_vllm=False.*Set use_vllm=True"),
    ({"async_generate": True, "use_vllm": True}, r"does not work with use_vllm=True, vllm_mode='colocate'"),
]
"""For `GRPOConfig` with loss_type="gspo", off-policy."""

CONTRADICTIONS_PPO: list[Wrong] = [
    ({"loss_type": "gspo"}, r"loss_type='gspo' with .* does not work with PPO.*'gspo_token'"),
    ({"importance_sampling_level": "sequence"}, r"importance_sampling_level='sequence' does not work with PPO"),
    ({"optim": "galore_adamw_layerwise"}, r"optim='galore_adamw_layerwise' takes"),
    ({"fp16": True}, r"fp16=True does not work with PPO"),
    ({"beta_column": "strength", "beta": 0.1}, r"beta_column='strength' scales beta, not kl_coef=0\.05\. Set kl"),
    ({"skip_old_pass": True, **_ON_POLICY}, r"skip_old_pass=True does not work with kl_coef=0\.05: the KL in the rew"),
    ({"dynamic_sampling": True}, r"num_generations=1: the rewards of one answer cannot differ"),
]

IDLE: list[Wrong] = [
    (
        _ON_POLICY,
        r"loss_type='gspo' has no effect because each rollout is used for one update.* Raise steps_per_generation",
    ),
    (
        {**_ON_POLICY, "router_replay": "R2", "loss_type": "grpo"},
        r"router_replay='R2' has no effect because each rollout is used for one update",
    ),
    ({"epsilon_high": 0.28}, r"epsilon_high=0\.28 are for token ratios.*Set epsilon=3e-4 and epsilon_high=4e-4"),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, r"epsilon=0\.2 .* A sequence ratio"),
    ({"kl_estimator": "k2"}, r"kl_estimator='k2' has no effect because beta=0\.0"),
    ({"skip_nonfinite_steps": 5, "fp16": True}, r"skip_nonfinite_steps=5 has no effect because fp16"),
    ({"skip_nonfinite_steps": 5, "optim": "lomo"}, r"skip_nonfinite_steps=5 has no effect because optim='lomo'"),
    ({"kl_ratio_denominator": "sampler"}, r"has no effect because beta=0\.0"),
    ({"beta_column": "strength"}, r"beta_column='strength' has no effect because beta=0\.0"),
    (
        {"kl_ratio_denominator": "sampler", "beta": 0.1, "use_bias_correction_kl": False},
        r"='sampler' has no effect because use_bias_correction_kl=False",
    ),
    ({"off_policy_mask_level": "token"}, r"='token' has no effect because off_policy_mask_threshold=None"),
    (
        {"off_policy_mask_level": "token", "off_policy_mask_threshold": 0.0},
        r"off_policy_mask_level='token' has no effect because loss_type='gspo'",
    ),
    ({"step_advantage": "process"}, r"step_advantage='process' has no effect because the ratio of loss_type='gspo'"),
    ({"loss_type": "gmpo", "epsilon": 0.2}, r"epsilon=0\.2 is for token ratios, .*set epsilon=0\.4"),
    (
        {**_ON_POLICY, "loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        r"off_policy_mask_threshold=0\.1 has no effect because each rollout",
    ),
    (
        {"sync_ref_model": True, "beta": 0.1, "max_steps": 100},
        r"sync_ref_model=True has no effect because .*max_steps=100.*ref_model_sync_steps=512",
    ),
    ({"ref_model_sync_kl": 0.1, "beta": 0.1}, r"ref_model_sync_kl=0\.1 has no effect because sync_ref_model=False"),
    ({"ref_model_sync_reset_optimizer": True}, r"has no effect because sync_ref_model=False"),
    ({"vllm_adapter_sync": True}, r"vllm_adapter_sync=True has no effect because use_vllm=False"),
    (
        {**_ON_POLICY, "loss_type": "dppo"},
        r"loss_type='dppo' has no effect because each rollout .*unless a rollout_func",
    ),
    (
        {**_ON_POLICY, "loss_type": "grpo", "sampler_penalty": 0.1},
        r"sampler_penalty=0\.1 has no effect because each rollout",
    ),
    ({"dppo_divergence": "kl"}, r"dppo_divergence='kl' has no effect because loss_type='gspo'"),
    ({"m2po_budget": 0.1}, r"m2po_budget=0\.1 has no effect because loss_type='gspo'"),
    (
        {**_ON_POLICY, "loss_type": "grpo", "skip_old_pass": True},
        r"skip_old_pass=True has no effect because use_vllm=False",
    ),
    ({"vllm_engine_kwargs": {"seed": 1}}, r"vllm_engine_kwargs={'seed': 1} has no effect because use_vllm=False"),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_engine_kwargs": {"quantization": "fp8"}},
        r"vllm_engine_kwargs={'quantization': 'fp8'} has no effect because vllm_mode='server'",
    ),
    ({"engine_check": 0.5}, r"engine_check=0\.5 has no effect because use_vllm=False and no rollout_func"),
    ({"router_replay_reference": True}, r"router_replay_reference=True has no effect because router_replay=None"),
    ({"router_replay_reference": True, "router_replay": "R2"}, r"has no effect because beta=0\.0"),
    ({"keep_sampling_mask": True}, r"keep_sampling_mask=True has no effect because top_p, top_k and min_p keep"),
]
"""For `GRPOConfig` with loss_type="gspo", off-policy: one warning each."""

IDLE_PPO: list[Wrong] = [
    ({"scale_rewards": "none"}, r"scale_rewards='none' has no effect because the critic"),
    ({"kl_estimator": "k3"}, r"kl_estimator='k3' has no effect because beta=0\.0"),
    ({"kl_target": 6.0, "kl_coef": 0.0}, r"kl_target=6\.0 has no effect because kl_coef=0\.0"),
    ({"kl_horizon": 5}, r"kl_horizon=5 has no effect because kl_target=None"),
    ({"mask_truncated_completions": True, "missing_eos_penalty": 1.0}, r"=1\.0 has no effect because mask_trunc"),
]

SILENT: list[dict[str, Any]] = [
    {"loss_type": "gspo_token"},
    {"loss_type": "grpo"},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},  # clips nothing
    {"loss_type": "gspo_token", "off_policy_mask_threshold": 1e-4, "off_policy_mask_level": "token"},
    {"loss_type": "gspo_token", "step_advantage": "process"},
    {"loss_type": "gmpo", "token_budget": 512},
    {"loss_type": "dppo", "dppo_divergence": "kl", "sampler_penalty": 1e-3},
    {"loss_type": "m2po", "m2po_budget": 0.1, "scale_rewards": "mean"},
    {"loss_type": "dppo", **_ON_POLICY, "use_vllm": True, "sampler_penalty": 1e-3},
    {"loss_type": "gspo", "gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 2},
    {"loss_type": "grpo", **_ON_POLICY},
    {"loss_type": "grpo", **_ON_POLICY, "skip_old_pass": False},
    {"loss_type": "grpo", "kl_estimator": "k1", "beta": 0.1},
    {"router_replay": "R2", "router_replay_reference": True, "beta": 0.1},
    {"keep_sampling_mask": True, "top_p": 0.9},
    {"use_vllm": True, "vllm_engine_kwargs": {"max_num_batched_tokens": 8192, "quantization": None}},
    {"use_vllm": True, "vllm_engine_kwargs": {"quantization": "fp8"}, "vllm_adapter_sync": True},
    {"use_vllm": True, "vllm_mode": "server", "async_generate": True},
]
