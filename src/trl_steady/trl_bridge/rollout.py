"""Changes of what TRL computes in a rollout: its reward functions, its table of completions, its generation.

This file knows TRL's private state of a rollout.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import trl
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from trl.trainer.utils import is_async_callable

from trl_steady.core.feature import Trainer
from trl_steady.core.processes import own_rows
from trl_steady.core.types import LogProbs, Rollout
from trl_steady.functional.advantages import all_equal, total_rewards
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import TRAINER_MODULES, as_trl_trainer, generated_completions


def with_reference_log_probs(trainer: Trainer) -> AbstractContextManager[None]:
    """Let TRL's rollout compute the log-probs of the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    many_updates = trainer.args.gradient_accumulation_steps + 1
    return patched(trainer, {"num_iterations": many_updates, "beta": trainer.beta or 1.0})


def without_old_log_probs(trainer: Trainer) -> AbstractContextManager[None]:
    """Skip the pass of the old policy in TRL's rollout. RLOO's `old_logps` are 0, and GRPO's engine has no weights."""
    # RLOO always runs the pass. GRPO runs it in a rollout that feeds one update only for its engine correction.
    is_rloo = isinstance(trainer, trl.RLOOTrainer)
    return patched(trainer, ZERO_LOG_PROBS if is_rloo else {"vllm_importance_sampling_correction": False})


def without_scale(trainer: Trainer) -> AbstractContextManager[None]:
    """Let TRL's rollout subtract the mean of a group, and divide by nothing."""
    return patched(trainer, {"scale_rewards": "none"})  # TRL raises for other values than its own


def _zero_log_probs(_: object, input_ids: Tensor, __: object, width: int, *___: object, **____: object) -> LogProbs:
    return torch.zeros(len(input_ids), width, device=input_ids.device), None, None


ZERO_LOG_PROBS = {"_get_per_token_logps_and_entropies": _zero_log_probs}
"""TRL's method for log-probs, replaced by one that runs no model."""


def record_prompts(trainer: Trainer, record: Callable[[list[list[int]]], None]) -> AbstractContextManager[None]:
    """Call `record` with the token ids of the prompts of each rollout, as the policy reads them."""
    generate = as_trl_trainer(trainer)._generate

    def generate_and_record(*arguments: object, **keywords: object) -> tuple[Any, ...]:
        generated = generate(*arguments, **keywords)
        record(generated[0])
        return generated

    return patched(trainer, {"_generate": generate_and_record})  # the one method that returns them


def with_own_stops(eos_token_ids: Sequence[int], args: Any) -> list[int]:
    """Return TRL's tokens that end a completion, and those of `generation_kwargs`, after which TRL keeps padding."""
    stops = (args.generation_kwargs or {}).get("stop_token_ids" if args.use_vllm else "eos_token_id")
    own: list[int] = [] if stops is None else torch.as_tensor(stops).flatten().tolist()
    return [*eos_token_ids, *(token for token in own if token not in eos_token_ids)]


def generate_continuations(trainer: Trainer, prompt_ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Generate one completion for each prompt outside a rollout, with the model or engine that generates rollouts.

    The number of prompts must be the same on all processes. transformers takes `batch_size` of them at once, vLLM all.
    """
    # images, their fields, and GRPO's number of completions for each prompt
    other_arguments = (None, {}) if isinstance(trainer, trl.RLOOTrainer) else (None, {}, 1)
    batch_size = max(len(prompt_ids) if trainer.use_vllm else batch_size, 1)
    completions: list[list[int]] = []
    # RLOO's trainer sends the server every `num_generations`-th prompt
    with patched(trainer, {"rollout_in_progress": None, "num_generations": 1, "num_generations_eval": 1}):
        for start in range(0, len(prompt_ids), batch_size):
            batch = [list(ids) for ids in prompt_ids[start : start + batch_size]]
            completions += generated_completions(
                as_trl_trainer(trainer)._generate_single_turn(batch, *other_arguments)
            )
    return completions


def generate_outside_training(trainer: Trainer, inputs: list[dict[str, Any]]) -> None:
    """Run a rollout on examples of this process, which no optimizer step uses. Every process must call this function.

    The coefficient of PPO's KL and the stream of prompts stay where they are.
    """
    with patched(trainer.args, {"kl_target": None, "dynamic_sampling": False, "beta_column": None}):
        as_trl_trainer(trainer)._generate_and_score_completions(inputs)


def forget_logs(trainer: Trainer) -> None:
    """Forget the metrics and the table of completions since the last log."""
    trainer.metrics.forget()
    for values in (*as_trl_trainer(trainer)._metrics.values(), *as_trl_trainer(trainer)._logs.values()):
        values.clear()


def wrap_reward_functions(functions: Sequence[Any], processors: Sequence[Callable[[int, Any], Any]]) -> list[Any]:
    """Return reward functions whose results pass through all `processors`.

    A processor gets the number of the function and its result, and returns the result for the next one. TRL reads the
    logits of a reward model (`torch.nn.Module`) itself, so these are returned as they are.
    """

    def wrap(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def process(returned: object) -> object:
            for processor in processors:
                returned = processor(number, returned)
            return returned

        async def call_async(*arguments: object, **keywords: object) -> Any:
            return process(await function(*arguments, **keywords))

        def call(*arguments: object, **keywords: object) -> Any:
            return process(function(*arguments, **keywords))

        return call_async if is_async_callable(function) else call

    return [
        function if isinstance(function, torch.nn.Module) else wrap(number, function)
        for number, function in enumerate(functions)
    ]


def read_rewards(
    trainer: Trainer, read: Callable[[Tensor, list[Any], list[list[int]]], None]
) -> AbstractContextManager[None]:
    """Call `read` with the rewards that TRL's rollout gets, the completions and their token ids."""
    calculate, pending = as_trl_trainer(trainer)._calculate_rewards, as_trl_trainer(trainer)._pending_extra_logs

    def calculate_and_read(
        inputs: object, prompts: list[Any], completions: list[Any], ids: list[Any], *args: object, **kwargs: object
    ) -> Tensor:
        sampled = [[*own] for own in ids]  # what is trained, also if a reward function changes its arguments
        rewards = calculate(inputs, prompts, completions, ids, *args, **kwargs)
        for column in as_trl_trainer(trainer)._logs["extra"]:  # TRL would show earlier values beside these completions
            pending[column] = pending[column] or [None] * len(prompts)
        if trainer.rollout_in_progress is not None:
            give_rewards(trainer, trainer.rollout_in_progress, rewards, prompts, completions)
        read(rewards, completions, sampled)
        return rewards

    return patched(trainer, {"_calculate_rewards": calculate_and_read})  # around a subclass's, which may change them


def with_exact_zeros(trainer: Trainer, run_rollout: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return TRL's samples, with advantages of exactly 0 in groups of equal rewards, whose mean may round."""
    module = TRAINER_MODULES[isinstance(trainer, trl.RLOOTrainer)]
    deviation, compared = module.nanstd, list[Tensor]()

    def exact(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        compared.append(values)
        found, is_equal = deviation(values, dim, keepdim), all_equal(values, dim, keepdim=keepdim)
        # only normalize_then_sum keeps the dimension. It divides by the result, and infinity leaves exactly 0
        return found.masked_fill(is_equal, torch.inf) if keepdim else found * ~is_equal

    # the one function that sees the rewards that TRL compares, with weights, clips and RLOO's KL
    with patched(module, {"nanstd": exact}):
        samples = run_rollout()
    size = group_size(trainer)
    # (J, G, K) to normalise each function, or all rewards in any shape
    groups = compared[0]
    if groups.dim() != 3:
        groups = groups.reshape(-1, size, 1)
    is_equal = all_equal(groups, 1).all(-1).repeat_interleave(size)
    own = own_rows(trainer.accelerator, len(samples["advantages"]))
    samples["advantages"] = samples["advantages"].masked_fill(is_equal[own], 0.0)
    return samples


def give_rewards(
    trainer: Trainer, rollout: Rollout, rewards: Tensor, prompts: list[Any], completions: list[Any]
) -> None:
    """Give a rollout this process's completions, and of the rewards (N, K) of all processes those it needs."""
    size, own = group_size(trainer), own_rows(trainer.accelerator, len(prompts))
    totals = total_rewards(rewards, trainer.reward_weights)
    groups = totals.view(-1, size)
    group_of_own = torch.arange(own.start, own.stop, device=rewards.device) // size
    rollout.prompts, rollout.completions = prompts, completions
    # copies, because views would keep those of all processes
    rollout.rewards_by_function, rollout.rewards = rewards[own].clone(), totals[own].clone()
    rollout.group_rewards = groups[group_of_own]


def group_size(trainer: Trainer) -> int:
    """Return the number of completions of a prompt, in training or in an evaluation."""
    return trainer.num_generations if trainer.model.training else as_trl_trainer(trainer).num_generations_eval


def log_advantages(trainer: Trainer, advantages: Tensor, mask: Tensor) -> None:
    """Log advantages (B,), or each completion's mean of (B, T), in TRL's table, in place of TRL's advantages.

    Every process must call this function after a rollout.
    """
    own = advantages if advantages.dim() == 1 else (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    means = cast(Tensor, trainer.accelerator.gather(own)).tolist()
    column = as_trl_trainer(trainer)._logs["advantages"]
    for _ in range(min(len(means), len(column))):  # the table keeps the last completions only
        column.pop()
    column.extend(means)


def collate_rows(trainer: Trainer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the training set as TRL's data loader hands them to a rollout."""
    collate = as_trl_trainer(trainer)._get_collator_with_removed_columns(
        as_trl_trainer(trainer).data_collator, description="training"
    )
    return cast(Any, send_to_device(collate(rows), trainer.accelerator.device))


def last_logits_processor(
    model: PreTrainedModel, processor: LogitsProcessor, check: Callable[[GenerationConfig], None]
) -> AbstractContextManager[None]:
    """Let `model.generate` call `processor` after all others, inside this context. `check` may refuse its options."""
    build = cast(Callable[..., LogitsProcessorList], model._get_logits_processor)

    def build_with_last(generation_config: GenerationConfig, **keywords: object) -> LogitsProcessorList:
        check(generation_config)
        return LogitsProcessorList([*build(generation_config, **keywords), processor])

    # transformers puts its own processors after those that `generate` is given
    return patched(model, {"_get_logits_processor": build_with_last})
