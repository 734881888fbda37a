"""The table of the conformance suite: each feature and each loss, with options that switch it on.

A feature is a file or folder of `trl_steady/features`. It passes the suite by having a row here. tests/distributed
runs rows that its `CONFORMANCE` names on two processes.
"""

import math
from typing import Any

from datasets import Dataset

from tests.features.group_rewards.tools import by_rank
from tests.features.reward_model.tools import is_right
from tests.tools import tiny
from tests.tools.nonfinite import poison_gradients
from tests.trainers.tools import by_prompt, by_steps
from trl_steady import GroupReward, RewardAdapter, RewardModelRefreshCallback
from trl_steady.losses import LOSSES

MIXTURE: dict[str, Any] = {"model": "moe", "lora": True, "router_aux_loss_coef": 0.0}
MOVING: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
SOLVED = tiny.dataset(32).map(lambda row: {"solution": f"{row['prompt']} (it is so) {row['prompt']}"})
TAUGHT: dict[str, Any] = {"teacher": "gpt2", "teacher_mode": "add"}
BY_ROW = tiny.dataset(32).add_column("strength", [0.0, 2.0, 0.5, 1.0] * 8)
PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1}


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Judge completions in evaluations."""
    return [float(len(ids)) for ids in completion_ids]


def retrain(trainer: Any) -> None:
    """Let the trainer retrain its reward model before the reference moves."""
    trainer.add_callback(RewardModelRefreshCallback(trainer, label_fn=is_right, learning_rate=1e-2, epochs=1))


def shorten(trainer: Any) -> None:
    """Let the trainer prefer short completions."""
    trainer.advantages = lambda rollout: rollout.advantages - 0.05 * rollout.is_sampled.sum(1)


def spoil(trainer: Any) -> None:
    """Let two steps of the trainer have an infinite gradient: one before a checkpoint, and one after it."""
    poison_gradients(trainer, (1, 4), value=math.inf)


# feature -> name of a case -> arguments of `tiny.trainer`, the model, and what is done with the trainer then
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "policy_loss": {
        **{loss_type: {"loss_type": loss_type} for loss_type in LOSSES},
        "kl": {"loss_type": "gspo", "kl_estimator": "k2"},
        "penalty": {"sampler_penalty": 0.5},
        "beta_column": {"beta_column": "strength", "build": {"train_dataset": BY_ROW}},
        "masks": {"loss_type": "gspo_token", "off_policy_mask_threshold": 0.05, "off_policy_mask_level": "token"},
        "RLOO": {"method": "RLOO", "token_budget": 40, "share_prompts": True},
    },
    "padding_free": {
        "token_budget": {"token_budget": 40},
        "share_prompts": {"share_prompts": True, "loss_type": "dapo"},
    },
    "nonfinite_steps": {"skipped": {"then": spoil}},
    "skip_zero_weight": {
        "skip_zero_weight": {"skip_zero_weight": True, "beta": 0.0, "build": {"reward_funcs": by_prompt}}
    },
    "skip_old_pass": {"skip_old_pass": {"skip_old_pass": True, "num_iterations": 1, "steps_per_generation": 1}},
    "router_replay": {
        "R2": {**MIXTURE, "router_replay": "R2", "router_replay_reference": True},
        "R3": {**MIXTURE, "router_replay": "R3"},
    },
    "sampling_mask": {"keep_sampling_mask": {"keep_sampling_mask": True, "top_p": 0.8}},
    "dynamic_sampling": {
        name: {"dynamic_sampling": True, "dynamic_sampling_filter": name, "build": {"reward_funcs": by_prompt}}
        for name in ("zero_std", "reward_variance")
    },
    "step_rewards": {
        "process": {"loss_type": "gspo_token", "build": {"reward_funcs": by_steps}},
        "return_to_go": {"step_advantage": "return_to_go", "build": {"reward_funcs": by_steps}},
    },
    "group_rewards": {"ranked": {"build": {"reward_funcs": GroupReward(by_rank)}}},
    "advantages": {
        "MaxRL": {"scale_rewards": "mean"},
        "advantage_baseline": {"advantage_baseline": "token"},
        "own": {"then": shorten},
    },
    "evaluations": {
        "greedy": {
            **{"eval_metrics": [length], "eval_generation": {"greedy": True}, "num_generations_eval": 1},
            **{"eval_strategy": "steps", "eval_steps": 1, "build": {"eval_dataset": tiny.dataset(4)}},
        }
    },
    "reference": {
        "full": MOVING,
        "LoRA": {**MOVING, "lora": True, "ref_model_sync_reset_optimizer": True},
        "RLOO": {**MOVING, "method": "RLOO", "lora": True, "keep_sampling_mask": True, "top_p": 0.9},
        "by KL": {**MOVING, "ref_model_sync_kl": 1e-3},
    },
    "adapters": {"adapter_dtype": {"model": "nf4", "lora": True, "adapter_dtype": "float32"}},
    "critic": {"full": PPO, "LoRA": {**PPO, "lora": True}},
    "pretraining_loss": {
        "ptx_coef": {**PPO, "ptx_coef": 1.0, "build": {"ptx_dataset": Dataset.from_dict({"text": ["a b", "c d"]})}}
    },
    "reward_model": {
        "retrained": {"lora": True, **MOVING, "build": {"reward_funcs": RewardAdapter}, "then": retrain},
    },
    "teacher": {
        "add": TAUGHT,
        "weight": {**TAUGHT, "teacher_mode": "weight", "build": {"reward_funcs": by_prompt}},
        "moving": {**MOVING, **TAUGHT, "teacher": "reference"},
        "privileged": {
            **{"teacher": "reference", "beta": 0.0, "lora": True, "teacher_coef": 1.0},
            **{"teacher_prompt": "solution", "build": {"train_dataset": SOLVED}},
        },
        "PPO": {**PPO, **TAUGHT},
    },
    "training_report": {"training_report": {"training_report": True}},
}
WITH_AN_ENGINE = {"generate_ahead", "engine_check", "request_seeds"}
"""Features that do nothing without an engine. Their folders test them with a server's stand-in."""
EVERYWHERE = {"active_features"}
"""On in each run."""


def names() -> list[tuple[str, str]]:
    """Return all rows."""
    return [(feature, case) for feature, of_feature in CASES.items() for case in of_feature]


def options(feature: str, case: str) -> dict[str, Any]:
    """Return the arguments of `tiny.trainer` for a row, with the model's name as `model`."""
    own = CASES[feature][case]
    build = {key: value() if value is RewardAdapter else value for key, value in own.get("build", {}).items()}
    return {"model": "dense", "beta": 0.04, **own, "build": {"train_dataset": tiny.dataset(8), **build}}
