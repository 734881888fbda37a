"""Rollouts of given lengths, and how wide the batches are that a model gets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def answers(length: Callable[[int, str], int]) -> Callable[..., dict[str, Any]]:
    """Rollouts whose completions have lengths by place in the batch and prompt."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[(13 * i + 5 * t) % 200 + 45 for t in range(length(i, p))] for i, p in enumerate(prompts)]
        prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    return rollout


UNEQUAL = answers(lambda i, prompt: 1 + (3 * i + 5 * len(prompt)) % 8)  # other totals in each generation


class Widths:
    """How wide the batches were that a model saw, and how many of their tokens were real."""

    def __init__(self, model: torch.nn.Module, shapes: list[tuple[int, ...]] | None = None) -> None:
        self.shapes: list[tuple[int, ...]] = [] if shapes is None else shapes
        model.get_input_embeddings().register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.shapes.append(tuple(inputs[0].shape))
