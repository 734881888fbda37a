"""The passes and logs of TRL's rollout method, and a rollout outside training.

This file knows TRL's private state of a rollout.
"""

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import trl
from torch import Tensor

from trl_steady.core.feature import Trainer
from trl_steady.core.types import LogProbs
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer


def with_reference_log_probs(trainer: Trainer) -> AbstractContextManager[None]:
    """Let TRL's rollout compute the log-probs of the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    many_updates = trainer.args.gradient_accumulation_steps + 1
    return patched(trainer, {"num_iterations": many_updates, "beta": trainer.beta or 1.0})


def without_old_log_probs(trainer: Trainer) -> AbstractContextManager[None]:
    """Skip the pass of the old policy in TRL's rollout. RLOO's `old_logps` are 0, and GRPO's engine has no weights."""
    if isinstance(trainer, trl.RLOOTrainer):  # it always runs the pass
        return patched(trainer, ZERO_LOG_PROBS)
    # GRPO runs it in a rollout that feeds one update only for its engine correction
    return patched(trainer, {"vllm_importance_sampling_correction": False})


def without_scale(trainer: Trainer) -> AbstractContextManager[None]:
    """Let TRL's rollout subtract the mean of a group, and divide by nothing."""
    return patched(trainer, {"scale_rewards": "none"})  # TRL raises for other values than its own


def _zero_log_probs(_: object, input_ids: Tensor, __: object, width: int, *___: object, **____: object) -> LogProbs:
    return torch.zeros(len(input_ids), width, device=input_ids.device), None, None


ZERO_LOG_PROBS = {"_get_per_token_logps_and_entropies": _zero_log_probs}
"""TRL's method for log-probs, replaced by one that runs no model."""


def generate_outside_training(trainer: Trainer, inputs: list[dict[str, Any]]) -> None:
    """Run a rollout on examples of this process, which no optimizer step uses. Every process must call this function.

    The coefficient of PPO's KL and the stream of prompts stay where they are.
    """
    with patched(trainer.args, {"kl_target": None, "dynamic_sampling": False, "beta_column": None}):
        as_trl_trainer(trainer)._generate_and_score_completions(inputs)


def forget_logs(trainer: Trainer) -> None:
    """Forget the metrics and the table of completions since the last log."""
    trainer.metrics.forget()
    for metrics in as_trl_trainer(trainer)._metrics.values():
        metrics.clear()
    for column in as_trl_trainer(trainer)._logs.values():
        column.clear()


def log_advantages(trainer: Trainer, advantages: Tensor, mask: Tensor) -> None:
    """Log advantages (B,), or each completion's mean of (B, T), in TRL's table, in place of TRL's advantages.

    Every process must call this function after a rollout.
    """
    if advantages.dim() == 2:
        advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    means = cast(Tensor, trainer.accelerator.gather(advantages)).tolist()
    column = as_trl_trainer(trainer)._logs["advantages"]
    for _ in range(min(len(means), len(column))):  # the table keeps the last completions only
        column.pop()
    column.extend(means)
