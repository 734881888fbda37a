"""The runs on two processes that share one engine: the options of each, and the features that it shows."""

import math
from collections.abc import Iterable
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig

from trl_steady import StepRewards

Run = dict[str, Any]

STEPS, SAVED = 10, 6
COMMON: Run = {
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "num_generations": 8,  # a group is on both processes
    "num_iterations": 2,  # a window is 4 steps
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "epsilon": 5e-3,
    "epsilon_high": 8e-3,
    "beta": 0.04,
    "gradient_checkpointing": False,
    # with Adam's usual epsilon, a gradient of rounding errors would get a step of its own
    "adam_epsilon": 1e-2,
    "learning_rate": 2e-2,
    "max_grad_norm": 0.5,
}
MOVING: Run = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 3}
"""The reference moves after 4 and 8 steps, and the checkpoint is between them."""


def in_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Return steps for some completions, a number for others, and no verdict for a few."""
    rewards: list[Any] = []
    for number, ids in enumerate(completion_ids):
        half, total = max(1, len(ids) // 2), sum(ids) % 7
        steps = StepRewards.at_tokens([total / 3, 1.0][: 1 + (half < len(ids))], sorted({half, len(ids)}))
        rewards.append(None if total == 3 else float(total) if number % 3 == 0 else steps)
    return rewards


def in_steps_on_the_first(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Return steps in the first half of the global batch, which is on one of two processes, and numbers elsewhere."""
    state, count = PartialState(), len(completion_ids)
    first, half = state.process_index * count, state.num_processes * count // 2
    return [
        StepRewards.at_tokens([float(ids[0] % 5), 0.5][: len(ids)], sorted({1, len(ids)}))
        if place < half
        else float(sum(ids) % 11)
        for place, ids in enumerate(completion_ids, first)
    ]


def the_same_for_some(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the same reward for all answers of about half of the prompts."""
    is_odd = [int(prompt.lstrip("ab").partition("+")[0]) % 2 for prompt in prompts]
    return [1.0 if odd else float(sum(ids) % 11) for odd, ids in zip(is_odd, completion_ids, strict=True)]


def longer(row: dict[str, Any]) -> str:
    """Return the prompt of a teacher, so that it differs from the policy in the first rollout too."""
    return f"It is so. {row['prompt']}"


def disagreeing(prompts: list[str], trainer: Any) -> Run:
    """Return answers and the log-probs of an engine that is off by up to 1.5 nats per token."""
    first = trainer.accelerator.process_index * len(prompts) + 3 * trainer.state.global_step
    answers = [
        [(13 * (first + i) + 5 * t) % 200 + 45 for t in range(1 + (first + i) % 6)] for i in range(len(prompts))
    ]
    logprobs = [[-5.5 + 1.5 * math.sin(first + i + t) for t in range(len(answer))] for i, answer in enumerate(answers)]
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": logprobs}


RUNS: dict[str, Run] = {
    "gspo": {
        "shows": ["gspo", "moving reference, full", "trim_padding"],
        "loss_type": "gspo",
        **MOVING,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "steps": {
        "shows": [
            "gspo_token",
            "step rewards",
            "moving reference, LoRA",
            "share_prompts",
            "KL corrections",
            "teacher",
        ],
        "loss_type": "gspo_token",
        "kl_estimator": "k2",
        "share_prompts": True,
        **MOVING,
        "lora": True,
        **{"teacher": "reference", "teacher_prompt": longer},  # a pass of its own
        "build": {"reward_funcs": in_steps},
    },
    "engine": {
        "shows": ["KL corrections", "masks", "gspo_token", "step rewards"],
        "loss_type": "gspo_token",
        "kl_ratio_denominator": "sampler",
        "geometric_mask_range": (0.5, 2.0),
        "off_policy_mask_threshold": 0.2,
        "token_veto_threshold": 0.005,
        "vllm_importance_sampling_mode": "token_truncate",
        "saves_shards": True,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "num_iterations": 4,
        "build": {"rollout_func": disagreeing, "reward_funcs": in_steps_on_the_first},
    },
    "weights": {
        "shows": ["skip_zero_weight"],
        "loss_type": "dr_grpo",
        "skip_zero_weight": True,
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "build": {"reward_funcs": the_same_for_some},
    },
    "gmpo": {
        "shows": ["gmpo", "ref_model_sync_kl", "router_replay R3"],
        "model": "moe",
        "loss_type": "gmpo",
        "router_replay": "R3",
        **MOVING,
        "ref_model_sync_steps": 7,
        "ref_model_sync_kl": 1e-4,
        "lora": True,
    },
    "reset": {
        "shows": ["ref_model_sync_reset_optimizer"],
        "loss_type": "gspo",
        **MOVING,
        "lora": True,
        "ref_model_sync_reset_optimizer": True,
        "refused": {"ZeRO-2", "ZeRO-3"},
    },
    "nf4": {
        "shows": ["quantised base", "moving reference, quantised base"],
        "model": "wide",
        "base": "nf4",
        "loss_type": "gspo",
        **MOVING,
        "lora": True,
    },
    "nf4 float32": {
        "shows": ["quantised base", "moving reference, quantised base", "adapter_dtype", "keep_sampling_mask"],
        "model": "wide",
        "base": "nf4",
        "loss_type": "dapo",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        **MOVING,
        "lora": True,
        "adapter_dtype": "float32",
        "refused": {"ZeRO-3"},
    },
    "R2": {
        "shows": ["router_replay R2", "gspo", "moving reference, full", "share_prompts"],
        "stays_whole": True,
        "model": "moe",
        "loss_type": "gspo",
        "router_replay": "R2",
        "router_replay_reference": True,
        "router_aux_loss_coef": 0.0,
        "share_prompts": True,
        "gradient_checkpointing": True,
        **MOVING,
    },
    "tools": {
        "shows": ["keep_sampling_mask", "gspo_token", "step rewards", "moving reference, LoRA"],
        "model": "agent",
        "loss_type": "gspo_token",
        "keep_sampling_mask": True,
        "min_p": 0.05,
        "temperature": 0.9,
        "max_completion_length": 160,
        # TRL lets each process decide alone how often it generates. With one round of calls, all generate twice.
        "max_tool_calling_iterations": 1,
        "gradient_checkpointing": True,
        **MOVING,
        "lora": True,
        # an adapter that changes nothing yet, because the model has learned to call tools
        "build": {"reward_funcs": in_steps, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    },
    "budget": {
        "shows": ["token_budget", "router_replay R2", "share_prompts", "keep_sampling_mask", "moving reference, full"],
        "model": "moe",
        "loss_type": "dapo",
        "router_replay": "R2",
        "token_budget": 24,
        "share_prompts": True,
        "router_aux_loss_coef": 0.0,
        "keep_sampling_mask": True,
        "top_p": 0.9,
        **MOVING,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "refused": {"ZeRO-2", "ZeRO-3"},
    },
    "rloo": {
        "shows": ["RLOO", "router_replay R2", "keep_sampling_mask", "moving reference, full"],
        "method": "RLOO",
        "model": "moe",
        "router_replay": "R2",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "normalize_advantages": True,
        **MOVING,
    },
}
"""Each with the features that it shows, and the engines that refuse it."""

PPO: Run = {
    "method": "PPO",
    "num_generations": 1,
    "beta": 0.0,
    "kl_coef": 0.1,
    "value_learning_rate": 1e-2,
    "lora": True,
    "refused": {"ZeRO-3"},
}
TEXTS = Dataset.from_dict({"text": [f"{i}+{i}={2 * i}" * (1 + i % 3) for i in range(11)]})
RUNS |= {
    "ppo": {
        "shows": ["PPO, LoRA", "moving reference, LoRA", "step rewards", "ptx_coef"],
        **PPO,
        **MOVING,
        "kl_target": 0.5,
        "kl_horizon": 64,
        "bootstrap_truncated": True,
        "ptx_coef": 0.2,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "build": {"reward_funcs": in_steps, "ptx_dataset": TEXTS},
    },
    # the checkpoint is inside the warm-up
    "ppo warm-up": {
        "shows": ["PPO, LoRA", "token_budget", "share_prompts"],
        **PPO,
        "stays_whole": True,
        "saves_shards": True,
        "value_warmup_steps": 7,
        "refused": {"ZeRO-2", "ZeRO-3"},
        "token_budget": 24,
        "share_prompts": True,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "build": {"value_peft_config": LoraConfig(r=2, target_modules="all-linear")},
    },
    "ppo nf4": {
        "shows": ["PPO, quantised base", "adapter_dtype"],
        "model": "wide",
        "base": "nf4",
        **PPO,
        **MOVING,
        "adapter_dtype": "float32",
    },
    "ppo full": {
        "shows": ["PPO, full"],
        **PPO,
        "lora": False,
        "refused": {"FSDP2", "ZeRO-3"},
    },
}


def runs_of(engine: str) -> list[str]:
    """Return the runs that an engine does not refuse."""
    return [name for name, run in RUNS.items() if engine not in refusing(run)]


def refusing(run: Run) -> set[str]:
    """Return the engines that refuse a run."""
    return run.get("refused", set())


def features(names: Iterable[str]) -> set[str]:
    """Return the features that runs show."""
    return {"exact resume", *(feature for name in names for feature in RUNS[name]["shows"])}
