"""The runs of `train.py` by name: options of a trainer, and the features that a run shows."""

from typing import Any

from datasets import Dataset

from tests.conformance.cases import CASES
from tests.tools import tiny
from trl_steady import StepRewards

GLOBAL_BATCH = 8


def partly_in_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Steps in the first half of the global batch, all of it on the first of two processes; two of no verdict."""
    rewards: list[Any] = []
    for ids in completion_ids:
        place = (ids[0] - 45) // 13 % GLOBAL_BATCH
        half = max(1, len(ids) // 2)
        ends = sorted({half, len(ids)})
        steps = StepRewards.at_tokens([place / 3, 1.0 - place][: len(ends)], ends)
        rewards.append(None if place in (3, 6) else steps if place < GLOBAL_BATCH // 2 else float(place))
    return rewards


def half_at_the_mean(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards with which the second half of a group has no advantage. One process may have all of that half."""
    places = [(ids[0] - 45) * 77 % 200 % GLOBAL_BATCH for ids in completion_ids]  # 77 * 13 is 1, modulo 200
    return [1.0 if place >= GLOBAL_BATCH // 2 else 2.0 * (place % 2) for place in places]


MOVING: dict[str, Any] = {
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "ref_model_sync_steps": 2,
    "num_iterations": 3,  # a window is 3 steps
    "max_steps": 11,
}
WINDOW_OF_FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "max_steps": 4}
FIXED: dict[str, dict[str, Any]] = {
    "gspo": {"shows": ["gspo", "trim_padding"], "loss_type": "gspo", "training_report": True},
    "gspo_token": {"shows": ["gspo_token", "KL corrections"], "loss_type": "gspo_token", "kl_estimator": "k2"},
    "gmpo": {"shows": ["gmpo"], "loss_type": "gmpo"},
    "engine": {
        "shows": ["dppo", "sampler_penalty", "KL corrections", "masks"],
        "loss_type": "dppo",
        "sampler_penalty": 0.01,
        "kl_ratio_denominator": "sampler",
        "geometric_mask_range": (0.5, 2.0),
        "off_policy_mask_threshold": 0.2,
        "token_veto_threshold": 0.005,
    },
    "tokens, prompts": {
        "shows": ["token_budget", "share_prompts"],
        "loss_type": "dapo",
        "off_policy_mask_threshold": float("inf"),  # for the metrics of the ratio
        "token_budget": 24,
        "share_prompts": True,
        **WINDOW_OF_FOUR,
    },
    "weights": {
        "shows": ["skip_zero_weight"],
        "skip_zero_weight": True,
        "beta": 0.0,
        "build": {"reward_funcs": half_at_the_mean},
    },
    "taught": {  # one process has all that is scored, and scores as many sequences as the other
        "shows": ["teacher"],
        "teacher": "gpt2",
        "beta": 0.0,
        "build": {"reward_funcs": half_at_the_mean},
    },
    "weights, tokens": {
        "shows": ["skip_zero_weight", "token_budget"],
        "loss_type": "dr_grpo",
        "skip_zero_weight": True,
        "beta": 0.0,
        "token_budget": 24,
        "build": {"reward_funcs": half_at_the_mean},
        **WINDOW_OF_FOUR,
    },
    "kept": {
        "shows": ["keep_sampling_mask"],
        "loss_type": "dapo",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "build": {"rollout_func": None},
    },
    "steps": {"shows": ["step rewards"], "loss_type": "gspo_token", "build": {"reward_funcs": partly_in_steps}},
    "full": {"shows": ["moving reference, full"], **MOVING, "learning_rate": 0.02},
    "lora": {
        "shows": ["moving reference, LoRA", "ref_model_sync_reset_optimizer"],
        **MOVING,
        "lora": True,
        "ref_model_sync_reset_optimizer": True,
        "momentum": 0.5,
    },
    "kl": {
        "shows": ["moving reference, LoRA", "ref_model_sync_kl"],
        **MOVING,
        "lora": True,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 7,
        "ref_model_sync_kl": 0.1,
        "max_steps": 16,
    },
    "nf4": {
        "shows": ["quantised base", "adapter_dtype", "moving reference, quantised base"],
        "model": "wide",
        "base": "nf4",
        **MOVING,
        "lora": True,
        "adapter_dtype": "float32",
    },
}
"""Runs whose rollouts are those of any number of processes, and which features each one shows."""

CONFORMANCE: dict[str, dict[str, Any]] = {
    f"{feature}, {case}": {"shows": [], **options}
    for feature in ("policy_loss", "skip_old_pass", "step_rewards", "advantages", "teacher")
    for case, options in CASES[feature].items()
    # BNPO divides by the tokens of a micro-batch, and M2PO chooses among them
    if case not in ("bnpo", "m2po", "RLOO", "process", "PPO", *FIXED)
}
"""The rows of the conformance suite that are not among the runs above."""

R2: dict[str, Any] = {
    "shows": ["router_replay R2"],
    "model": "moe",
    "loss_type": "dapo",
    "router_replay": "R2",
    "router_replay_reference": True,
    "log_level": "debug",  # of one process, while the other's loggers stay at their level
    "router_aux_loss_coef": 0.0,  # a mean over each process' tokens
    "num_iterations": 4,
    "max_steps": 8,
}
ROUTED: dict[str, dict[str, Any]] = {
    "R2": R2,
    "R3": {**R2, "shows": ["router_replay R3"], "router_replay": "R3", "build": {"rollout_func": None}},
    "budget": {**R2, "token_budget": 24, **WINDOW_OF_FOUR},
}
"""The same, on a mixture of experts."""

SERVED: dict[str, dict[str, Any]] = {
    "served routes": {
        "shows": ["router_replay R3", "keep_sampling_mask", "KL corrections"],
        "loss_type": "dapo",
        "router_replay": "R3",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "kl_ratio_denominator": "sampler",
        "max_steps": 7,
        "model": "mixture",
        "use_vllm": True,
        "vllm_mode": "server",
        "router_aux_loss_coef": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "top_k": 20,  # without which the server has no sets
        "build": {"rollout_func": None},
    },
}
"""The same, with the rollouts of one vLLM server, as tests/tools/engines.py plays it."""

OLD_PASS: dict[str, dict[str, Any]] = {
    run: {**SERVED["served routes"], "num_iterations": 1, "skip_old_pass": skips}
    for run, skips in {"skipped": True, "scored": False}.items()
}
"""The same on-policy, without and with the old policy's pass."""

RLOO: dict[str, dict[str, Any]] = {
    "rloo": {
        "model": "dense",
        **MOVING,
        "lora": True,
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "share_prompts": True,
    },
    "rloo tokens": {"token_budget": 24, "beta": 0.0, **WINDOW_OF_FOUR},
}
"""The same with RLOO."""
for _run in RLOO.values():
    _run |= {"shows": [], "method": "RLOO", "normalize_advantages": True}


def turn_round(trainer: Any) -> None:
    """Let the trainer earn the opposite of its rewards, as a subclass may do."""
    rewards = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *columns: -rewards(*columns)


TEXTS = Dataset.from_dict({"text": [f"{i}+{i}={2 * i}" * (1 + i % 3) for i in range(11)]})
PPO: dict[str, dict[str, Any]] = {
    "ppo full": {
        "shows": ["PPO, full", "ptx_coef"],
        "value_head": True,  # of a model for sequence classification, drawn by each process for itself
        "then": turn_round,
        "value_warmup_steps": 1,
        "whiten_rewards": True,
        "missing_eos_penalty": 0.5,
        "bootstrap_truncated": True,
        "ptx_coef": 0.2,
        "build": {"ptx_dataset": TEXTS},
    },
    "ppo lora": {
        "shows": ["PPO, LoRA", "moving reference, LoRA", "ptx_coef", "step rewards"],
        "lora": True,
        "max_steps": 6,
        "kl_target": 0.5,
        "kl_horizon": 32,
        "value_warmup_steps": 1,
        "gradient_checkpointing": True,
        "ptx_coef": 0.2,
        **{name: value for name, value in MOVING.items() if name.startswith(("sync", "ref"))},
        "build": {"ptx_dataset": TEXTS, "reward_funcs": partly_in_steps},
    },
    "ppo tokens": {
        "shows": ["PPO, LoRA", "token_budget", "share_prompts"],
        "lora": True,
        "token_budget": 24,
        "share_prompts": True,
        **WINDOW_OF_FOUR,
        "num_iterations": 1,
        "max_steps": 2,
    },
    "ppo nf4": {
        "shows": ["PPO, quantised base", "adapter_dtype"],
        "model": "wide",
        "base": "nf4",
        "lora": True,
        "adapter_dtype": "float32",
        "max_steps": 3,
    },
}
"""The same with PPO, whose critic is compared too."""
for _run in PPO.values():
    _run |= {"method": "PPO", "num_generations": 1, "beta": 0.0, "kl_coef": 0.1, "value_learning_rate": 0.05}
    _run["build"] = {"train_dataset": tiny.dataset(64), **_run.get("build", {})}
