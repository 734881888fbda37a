"""Record which tokens transformers' `generate` samples from, by the scores after all logits processors."""

# pyright: reportUnknownMemberType=false, reportIncompatibleMethodOverride=false
# torch's annotations are partial; transformers has no public hook after its last logits processor

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from trl_steady.host.names import overridden
from trl_steady.sampling.kept import KeptTokens


class SetRecording:
    """Kept tokens of one call of `generate`, which draws one token after the other for each of `B` sequences."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._last: list[Tensor] = []
        self._sets = [KeptTokens.of([])]

    def add(self, input_ids: Tensor, scores: Tensor) -> None:
        """Add a step: the tokens so far (B, n), and the scores (B, V) of the next ones, -inf for tokens not kept."""
        self._lengths.append(input_ids.size(1))
        self._last.append(input_ids[:, -1].clone())  # a view would keep the tokens of every step
        # Keep sets on the CPU, like vLLM's. `of_mask` syncs with the GPU anyway, and the KV cache needs the memory.
        self._sets.append(KeptTokens.of_mask(scores > -torch.inf).to(torch.device("cpu")))

    def of(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """Return the sets of all tokens of each completion, one completion after the other.

        Raises:
            ValueError: The tokens were not drawn one after the other, as with beam search or assisted decoding.
        """
        if not self._has_drawn(completions):
            raise ValueError(
                "keep_sampling_mask=True needs one token after the other for each sequence. Leave beam search and "
                "assisted decoding out of generation_kwargs and of the model's generation_config."
            )
        # sets are ordered by step and sequence; what follows a completion is padding
        parts = [torch.arange(len(each)) * len(completions) + row for row, each in enumerate(completions)]
        return KeptTokens.joined(self._sets).take(torch.cat([torch.arange(0), *parts]))

    def _has_drawn(self, completions: Sequence[Sequence[int]]) -> bool:
        steps = len(self._lengths)
        if any(after != before + 1 for before, after in itertools.pairwise(self._lengths)):
            return False
        if max(map(len, completions), default=0) > steps or any(len(last) != len(completions) for last in self._last):
            return False
        # each step shows the token that the step before has drawn; no step shows the last one
        drawn = cast(list[list[int]], torch.stack(self._last).cpu()[1:].T.tolist() if steps else [])
        return all(row[: len(each)] == list(each[: len(row)]) for row, each in zip(drawn, completions, strict=False))

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Record the call of `model.generate` inside this context."""
        build: Callable[..., LogitsProcessorList] = getattr(model, "_get_logits_processor")  # noqa: B009

        def build_and_record(*arguments: object, **keywords: object) -> LogitsProcessorList:
            return LogitsProcessorList([*build(*arguments, **keywords), _Passing(self.add)])

        with overridden(model, {"_get_logits_processor": build_and_record}):
            yield


class _Passing(LogitsProcessor):
    """Logits processor that passes tokens and scores to a function, and does not change them."""

    def __init__(self, look: Callable[[Tensor, Tensor], None]) -> None:
        self._look = look

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self._look(input_ids, scores)
        return scores
