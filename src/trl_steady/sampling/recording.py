"""Record which tokens transformers' `generate` samples from, by the scores after all logits processors."""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# pyright: reportIncompatibleMethodOverride=false
# torch's annotations are partial; transformers has no public hook after its last logits processor

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from trl_steady.sampling.kept import KeptTokens

__all__ = ["KeptMass", "SetRecording"]


class _Steps:
    """Steps of one call of `generate`, which should draw one token after the other for each of `B` sequences."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._last: list[Tensor] = []

    def step(self, input_ids: Tensor) -> None:
        """Record the tokens (B, n) that exist when the next token of each sequence is drawn."""
        self._lengths.append(input_ids.size(1))
        self._last.append(input_ids[:, -1].clone())  # a view would keep the tokens of every step

    def indices(self, completions: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the indices of all completion tokens among the drawn tokens, which are ordered by step and sequence.

        Return None if tokens were not drawn one after the other, for example with beam search or assisted decoding.
        """
        steps = len(self._lengths)
        if any(after != before + 1 for before, after in itertools.pairwise(self._lengths)):
            return None
        if max(map(len, completions), default=0) > steps or any(len(last) != len(completions) for last in self._last):
            return None
        # each step shows the token that the step before has drawn; no step shows the last one
        drawn = cast(list[list[int]], torch.stack(self._last).cpu()[1:].T.tolist() if steps else [])
        if any(own[: len(each)] != list(each[: len(own)]) for own, each in zip(drawn, completions, strict=False)):
            return None
        # what follows a completion is padding
        parts = [torch.arange(len(each)) * len(completions) + row for row, each in enumerate(completions)]
        return torch.cat([torch.arange(0), *parts])


class SetRecording:
    """Kept tokens of one call of `generate`, for all its sequences, step by step."""

    def __init__(self) -> None:
        self._steps, self._sets = _Steps(), [KeptTokens.of([])]

    def add(self, input_ids: Tensor, scores: Tensor) -> None:
        """Add a step: the tokens so far (B, n), and the scores (B, V) of the next ones, -inf for tokens not kept."""
        self._steps.step(input_ids)
        # Keep sets on the CPU, like vLLM's. `of_mask` syncs with the GPU anyway, and the KV cache needs the memory.
        self._sets.append(KeptTokens.of_mask(scores > -torch.inf).to(torch.device("cpu")))

    def of(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """Return the sets of all tokens of each completion, one completion after the other.

        Raises:
            ValueError: the tokens were not drawn one after the other.
        """
        indices = self._steps.indices(completions)
        if indices is None:
            raise ValueError("transformers did not draw one token after the other for each sequence.")
        return KeptTokens.joined(self._sets).take(indices)

    def listening(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Record the call of `model.generate` inside this context."""
        return _watched(model, lambda _ids, _scores: None, self.add)


class KeptMass:
    """Difference between a policy and the distribution that one call of `generate` sampled from.

    Args:
        temperature: Temperature of the policy.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature, self._steps = temperature, _Steps()
        self._policy: Tensor | None = None  # (B, V) log-probs, while the scores of a step are processed
        self._masses: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def before(self, input_ids: Tensor, scores: Tensor) -> None:
        """Record the scores (B, V) of a step before all logits processors."""
        self._policy = (scores / self._temperature).log_softmax(-1)

    def after(self, input_ids: Tensor, scores: Tensor) -> None:
        """Record the scores (B, V) that a step samples from, -inf for tokens not kept."""
        self._steps.step(input_ids)
        policy, self._policy = self._policy, None
        assert policy is not None
        sampler, is_kept = scores.log_softmax(-1), scores > -torch.inf
        self._masses.append(policy.exp().where(is_kept, 0).sum(-1))
        self._gaps.append((sampler.exp() * (sampler - policy)).where(is_kept, 0).sum(-1))

    def of(self, completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor] | None:
        """Return the kept mass and the gap of each token, one completion after the other.

        The kept mass is the policy's probability of the kept tokens. The gap is how many nats the sampler's log-probs
        are above the policy's on average. Return None if the tokens were not drawn one after the other.
        """
        indices = self._steps.indices(completions)
        if indices is None:
            return None
        masses, gaps = (torch.cat(of).cpu() if of else torch.empty(0) for of in (self._masses, self._gaps))
        return masses[indices], gaps[indices]

    def listening(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Measure the call of `model.generate` inside this context."""
        return _watched(model, self.before, self.after)


_Look = Callable[[Tensor, Tensor], None]


class _Passing(LogitsProcessor):
    """Logits processor that passes tokens and scores to a function, and does not change them."""

    def __init__(self, look: _Look) -> None:
        self._look = look

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self._look(input_ids, scores)
        return scores


@contextmanager
def _watched(model: PreTrainedModel, before: _Look, after: _Look) -> Generator[None]:
    """Call `before` and `after` with the tokens and scores of `model.generate` around all logits processors."""
    attributes, name = vars(model), "_get_logits_processor"
    outer = attributes.get(name)  # set by an outer context
    build: Any = model._get_logits_processor

    def build_and_watch(*arguments: Any, **keywords: Any) -> LogitsProcessorList:
        processors = build(*arguments, **keywords)
        return LogitsProcessorList([_Passing(before), *processors, _Passing(after)])

    attributes[name] = build_and_watch
    try:
        yield
    finally:
        del attributes[name]
        if outer is not None:
            attributes[name] = outer
