"""Routes of transformers' generation, which runs the model on a padded batch, pass after pass."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trl_steady.core.types import Turn
from trl_steady.features.router_replay.replay import RouteRecording, Routers

R2_INSTEAD = "set router_replay='R2', which takes the routes of the trainer's own pass"


@dataclass
class GenerationPasses:
    """The passes of one generation over B sequences. Each pass gets n tokens of every sequence."""

    recording: RouteRecording
    input_ids: list[Tensor] = field(default_factory=list[Tensor])
    """(B * n,) tokens of each pass."""

    def routes(self, turn: Turn, *, pad_to_multiple_of: int) -> list[Tensor]:
        """Return the routes (T - 1, M, K) of each sequence.

        Raises:
            ValueError: the model did not get the tokens of each sequence one after another, as in beam search.
        """
        count = len(turn.prompt_ids)
        not_one_by_one = ValueError(
            "router_replay='R3': transformers has not fed the model the tokens of each sequence one after another. "
            "Leave beam search, guidance, assisted decoding and continuous batching out of the options of generation, "
            f"or {R2_INSTEAD}."
        )
        if any(len(ids) % count for ids in self.input_ids):  # as with continuous batching
            raise not_one_by_one
        fed = joined(self.input_ids, count).tolist()
        longest = max(map(len, turn.prompt_ids))
        width = math.ceil(longest / pad_to_multiple_of) * pad_to_multiple_of  # prompts are padded on their left
        slices: list[slice] = []
        for row, (prompt, completion) in enumerate(zip(turn.prompt_ids, turn.completion_ids, strict=True)):
            tokens = slice(width - len(prompt), width + len(completion) - 1)
            if fed[row][tokens] != (list(prompt) + list(completion))[:-1]:
                raise not_one_by_one
            slices.append(tokens)
        passes = self.recording.routes_of_passes(list(map(len, self.input_ids)))
        padded = joined(passes, count).cpu()
        return [padded[row, tokens] for row, tokens in enumerate(slices)]


@contextmanager
def record_passes(model: torch.nn.Module, routers: Routers) -> Generator[GenerationPasses]:
    """Record the tokens and routes of each pass of a model inside this context."""
    with routers.record() as recording:
        passes = GenerationPasses(recording)

        def record_ids(_: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
            passes.input_ids.append(ids.flatten())

        with model.register_forward_pre_hook(record_ids, with_kwargs=True):
            yield passes


def joined(passes: Sequence[Tensor], sequences: int) -> Tensor:
    """Join the values (B * n, *) of passes, each of n more tokens of B sequences, to (B, T, *).

    Without a KV cache, each decoding step runs all earlier tokens again. A token keeps the value of its first run.
    """
    parts: list[Tensor] = []
    known = 0
    for values in passes:
        part = values.unflatten(0, (sequences, -1))
        if parts and part.size(1) == known + 1:
            part = part[:, -1:]
        parts.append(part)
        known += part.size(1)
    return torch.cat(parts, dim=1)
