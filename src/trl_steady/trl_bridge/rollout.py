"""Changes of what TRL computes in a rollout: its reward functions, its table of completions, its generation.

This file knows TRL's private state of a rollout.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import trl
from accelerate.utils import send_to_device
from torch import Tensor
from trl.trainer.utils import is_async_callable

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.private import as_trl_trainer, completions_in, patched
from trl_steady.trl_bridge.validation import naming_columns


@contextmanager
def building_reference(trainer: Trainer, args: Any) -> Iterator[None]:
    """Let TRL's constructor make a reference although the loss has no KL."""
    with patched(args, {} if args.beta else {"beta": 1.0}):
        yield
    trainer.beta = args.beta


@contextmanager
def scoring_reference(trainer: Trainer) -> Iterator[None]:
    """Let TRL's rollout score the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    beyond = trainer.args.gradient_accumulation_steps + 1
    with patched(trainer, {"num_iterations": beyond, "beta": trainer.beta or 1.0}):
        yield


@contextmanager
def skipping_old_pass(trainer: Trainer) -> Iterator[None]:
    """Keep TRL's rollout from scoring the old policy. RLOO's `old_logps` are 0, and GRPO's engine has no weights."""

    def unscored(_: object, input_ids: Tensor, __: object, width: int, *___: object, **____: object) -> Any:
        return torch.zeros(len(input_ids), width, device=input_ids.device), None, None

    scoring = {"_get_per_token_logps_and_entropies": unscored}
    is_rloo = isinstance(trainer, trl.RLOOTrainer)
    with patched(trainer, scoring if is_rloo else {"vllm_importance_sampling_correction": False}):
        yield


@contextmanager
def noting_prompts(trainer: Trainer, note: Callable[[list[list[int]]], None]) -> Iterator[None]:
    """Tell `note` the token ids of the prompts of each rollout, as the policy has read them."""
    generate = as_trl_trainer(trainer)._generate

    def noting(*arguments: object, **keywords: object) -> tuple[Any, ...]:
        generated = generate(*arguments, **keywords)
        note(generated[0])
        return generated

    with patched(trainer, {"_generate": noting}):
        yield


def continued(trainer: Trainer, prompt_ids: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """Return one continuation of each text, by whatever generates rollouts. It is not part of a rollout.

    The number of texts must be the same on all processes. transformers continues `chunk` of them at once, vLLM all.
    """
    rest = (None, {}) if isinstance(trainer, trl.RLOOTrainer) else (None, {}, 1)  # images, their fields, answers each
    chunk = len(prompt_ids) if trainer.use_vllm else chunk
    found: list[list[int]] = []
    # RLOO's trainer has the server answer every `num_generations`-th text
    with patched(trainer, {"rollout_in_progress": None, "num_generations": 1, "num_generations_eval": 1}):
        for start in range(0, len(prompt_ids), max(chunk, 1)):
            texts = [list(ids) for ids in prompt_ids[start : start + chunk]]
            found += completions_in(as_trl_trainer(trainer)._generate_single_turn(texts, *rest))
    return found


def forget_logs(trainer: Trainer) -> None:
    """Forget the metrics and the table of completions since the last log."""
    trainer.metrics.forget()
    for values in (*as_trl_trainer(trainer)._metrics.values(), *as_trl_trainer(trainer)._logs.values()):
        values.clear()


def reading(functions: Sequence[Any], reads: Sequence[Callable[[int, Any], Any]]) -> list[Any]:
    """Return reward functions whose results go through all `reads`, which get the function's number and its result."""

    def read_by_all(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, torch.nn.Module):  # TRL reads the logits of a reward model itself
            return function

        def read(returned: object) -> Any:
            return functools.reduce(lambda result, each: each(index, result), reads, returned)

        async def reading_later(*arguments: object, **keywords: object) -> Any:
            with naming_columns(keywords):
                return read(await function(*arguments, **keywords))

        def reading_now(*arguments: object, **keywords: object) -> Any:
            with naming_columns(keywords):
                return read(function(*arguments, **keywords))

        return reading_later if is_async_callable(function) else reading_now

    return [read_by_all(index, function) for index, function in enumerate(functions)]


def relog_advantages(trainer: Trainer, advantages: Sequence[float]) -> None:
    """Replace the advantages of the last rollout, over all processes, in TRL's table of completions."""
    column = as_trl_trainer(trainer)._logs["advantages"]
    for _ in range(min(len(advantages), len(column))):
        column.pop()
    column.extend(advantages)


def collated(trainer: Trainer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the training set as TRL's data loader hands them to a rollout."""
    collate = as_trl_trainer(trainer)._get_collator_with_removed_columns(
        as_trl_trainer(trainer).data_collator, description="training"
    )
    return cast(Any, send_to_device(collate(rows), trainer.accelerator.device))
