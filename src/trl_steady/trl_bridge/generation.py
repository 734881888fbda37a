"""The generation of completions: its prompts, the tokens that end it, and completions outside a rollout.

This file knows how TRL's trainers read prompts and generate, and how transformers' `generate` takes logits processors.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import trl
from accelerate.utils import send_to_device
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import as_trl_trainer, generated_completions


def record_prompts(trainer: Trainer, record: Callable[[list[list[int]]], None]) -> AbstractContextManager[None]:
    """Call `record` with the token ids of the prompts of each rollout, as the policy reads them."""
    generate = as_trl_trainer(trainer)._generate

    def generate_and_record(*arguments: object, **keywords: object) -> tuple[Any, ...]:
        generated = generate(*arguments, **keywords)
        record(generated[0])
        return generated

    return patched(trainer, {"_generate": generate_and_record})  # the one method that returns them


def tokenize_prompts(trainer: Trainer, prompts: list[Any], rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the token ids of texts or conversations, with the chat template and the tools of rollouts.

    `rows` are the rows of the data set that belong to the prompts. With several environments, they name the tools.
    """
    has_several = getattr(trainer, "_multi_environment", False)
    environments = [row.get("environment") if has_several else None for row in rows]
    with patched(trainer, {"_batch_environments": environments}):
        return as_trl_trainer(trainer)._tokenize_prompts(prompts)[0]


def collate_rows(trainer: Trainer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the training set as TRL's data loader hands them to a rollout."""
    collate = as_trl_trainer(trainer)._get_collator_with_removed_columns(
        as_trl_trainer(trainer).data_collator, description="training"
    )
    return cast(Any, send_to_device(collate(rows), trainer.accelerator.device))


def with_own_stops(eos_token_ids: Sequence[int], args: Any) -> list[int]:
    """Return TRL's tokens that end a completion, and those of `generation_kwargs`, after which TRL keeps padding."""
    name = "stop_token_ids" if args.use_vllm else "eos_token_id"
    stops = (args.generation_kwargs or {}).get(name)
    tokens = list(eos_token_ids)
    if stops is not None:
        own: list[int] = torch.as_tensor(stops).flatten().tolist()
        tokens += [token for token in own if token not in eos_token_ids]
    return tokens


def generate_continuations(trainer: Trainer, prompt_ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Generate one completion for each prompt outside a rollout, with the model or engine that generates rollouts.

    The number of prompts must be the same on all processes. transformers takes `batch_size` of them at once, vLLM all.
    """
    other_arguments: list[Any] = [None, {}]  # images and their fields
    if not isinstance(trainer, trl.RLOOTrainer):
        other_arguments.append(1)  # GRPO's number of completions for each prompt
    if trainer.use_vllm:
        batch_size = len(prompt_ids)
    batch_size = max(batch_size, 1)
    completions: list[list[int]] = []
    # RLOO's trainer sends the server every `num_generations`-th prompt
    with patched(trainer, {"rollout_in_progress": None, "num_generations": 1, "num_generations_eval": 1}):
        for start in range(0, len(prompt_ids), batch_size):
            batch = [list(ids) for ids in prompt_ids[start : start + batch_size]]
            generated = as_trl_trainer(trainer)._generate_single_turn(batch, *other_arguments)
            completions += generated_completions(generated)
    return completions


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
