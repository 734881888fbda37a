"""Changes of what TRL computes in a rollout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trl

from trl_steady.host.names import completions_of, overridden

__all__ = ["building_reference", "continued", "forget_logs", "noting_prompts", "scoring_reference"]


@contextmanager
def building_reference(args: Any) -> Iterator[None]:
    """Let TRL's constructor make a reference although the loss has no KL."""
    with overridden(args, {} if args.beta else {"beta": 1.0}):
        yield


@contextmanager
def scoring_reference(trainer: Any) -> Iterator[None]:
    """Let TRL's rollout score the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    beyond = trainer.args.gradient_accumulation_steps + 1
    with overridden(trainer, {"num_iterations": beyond, "beta": trainer.beta or 1.0}):
        yield


@contextmanager
def noting_prompts(trainer: Any, note: Callable[[list[list[int]]], None]) -> Iterator[None]:
    """Tell `note` the token ids of the prompts of each rollout, as the policy has read them."""
    own = trainer._generate

    def generate(*arguments: Any, **keywords: Any) -> Any:
        generated = own(*arguments, **keywords)
        note(generated[0])
        return generated

    with overridden(trainer, {"_generate": generate}):
        yield


def continued(trainer: Any, prompt_ids: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """Return one continuation of each text, by whatever generates rollouts. It is not part of a rollout.

    Args:
        trainer: The trainer.
        prompt_ids: Token ids of each text. The number must be the same on all processes.
        chunk: Number of texts that transformers' generation continues together. vLLM gets all at once.
    """
    rest = (None, {}) if isinstance(trainer, trl.RLOOTrainer) else (None, {}, 1)  # images, their fields, answers each
    chunk = len(prompt_ids) if trainer.use_vllm else chunk
    found: list[list[int]] = []
    # RLOO's trainer has the server answer every `num_generations`-th text
    with overridden(trainer, {"_rollout": None, "num_generations": 1, "num_generations_eval": 1}):
        for start in range(0, len(prompt_ids), max(chunk, 1)):
            texts = [list(ids) for ids in prompt_ids[start : start + chunk]]
            found += completions_of(trainer._generate_single_turn(texts, *rest))
    return found


def forget_logs(trainer: Any) -> None:
    """Forget the metrics and the table of completions since the last log."""
    trainer.metrics.forget()
    for metrics in trainer._metrics.values():
        metrics.clear()
    for column in trainer._logs.values():
        for own in column.values() if isinstance(column, dict) else [column]:
            own.clear()
