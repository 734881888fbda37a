"""What transformers' `generate` samples from: the scores that are left when all is done to them."""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# pyright: reportIncompatibleMethodOverride=false
# torch's annotations are partial; transformers has no public place after the last of its processors

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from trl_steady.sampling.kept import KeptTokens

__all__ = ["KeptMass", "Recording"]


class _Steps:
    """One call of `generate`, which should draw one token after the other for each of its `B` sequences."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._last: list[Tensor] = []

    def step(self, input_ids: Tensor) -> None:
        """Take in what is there, (B, n), when the next token of each sequence is drawn."""
        self._lengths.append(input_ids.size(1))
        self._last.append(input_ids[:, -1].clone())  # a view would keep the tokens of every step

    def places(self, completions: Sequence[Sequence[int]]) -> Tensor | None:
        """Where the tokens of all completions are among those of all sequences, token after token.

        None if they were not drawn so: by a beam search, by guesses that a model has confirmed, and the like.
        """
        first, steps = self._lengths[0] if self._lengths else 0, len(self._lengths)
        if self._lengths != list(range(first, first + steps)) or max(map(len, completions), default=0) > steps:
            return None
        if any(len(last) != len(completions) for last in self._last):
            return None
        drawn = torch.stack([*self._last[1:], self._last[0]]).cpu() if steps else torch.empty(0, 0)
        for row, each in enumerate(completions):
            known = min(len(each), steps - 1)  # nothing comes after the last
            if drawn[:known, row].tolist() != list(each[:known]):
                return None
        # what follows a completion is padding
        parts = [torch.arange(len(each)) * len(completions) + row for row, each in enumerate(completions)]
        return torch.cat([torch.arange(0), *parts])


class Recording:
    """The tokens that one call of `generate` has kept, of all its sequences, token after token."""

    def __init__(self) -> None:
        self._steps, self._sets = _Steps(), [KeptTokens.of([])]

    def add(self, input_ids: Tensor, scores: Tensor) -> None:
        """Add the next token of each sequence (B, n), from (B, V) scores with -inf for what was not kept."""
        self._steps.step(input_ids)
        # Keep sets on the CPU, like vLLM's. `of_mask` syncs with the GPU anyway, and the KV cache needs the memory.
        self._sets.append(KeptTokens.of_mask(scores > -torch.inf).to(torch.device("cpu")))

    def of(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """The sets of all tokens of each completion, one completion after the other.

        Raises:
            ValueError: the tokens were not drawn one after the other.
        """
        places = self._steps.places(completions)
        if places is None:
            raise ValueError("transformers has not drawn one token after the other for each sequence.")
        return KeptTokens.joined(self._sets).take(places)

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Record what `model.generate` does meanwhile."""
        with _watched(model, lambda _ids, _scores: None, self.add):
            yield


class KeptMass:
    """How far what one call of `generate` has sampled from is from a policy.

    Args:
        temperature: The policy's.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature, self._steps = temperature, _Steps()
        self._policy: Tensor | None = None  # (B, V) log-probs, while the scores of a step are processed
        self._masses: list[Tensor] = []
        self._gaps: list[Tensor] = []

    def before(self, input_ids: Tensor, scores: Tensor) -> None:
        """Take in (B, V) scores to which nothing has been done yet."""
        self._policy = (scores / self._temperature).log_softmax(-1)

    def after(self, input_ids: Tensor, scores: Tensor) -> None:
        """Take in the (B, V) scores that are sampled from, -inf for what was not kept."""
        self._steps.step(input_ids)
        policy, self._policy = self._policy, None
        assert policy is not None
        sampler, is_kept = scores.log_softmax(-1), scores > -torch.inf
        self._masses.append(policy.exp().where(is_kept, 0).sum(-1))
        self._gaps.append((sampler.exp() * (sampler - policy)).where(is_kept, 0).sum(-1))

    def of(self, completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor] | None:
        """Of all tokens of each completion: the policy's probability of what was kept, and how many nats the sampler's
        log-probs are above the policy's on average.

        None if the tokens were not drawn one after the other.
        """
        places = self._steps.places(completions)
        if places is None:
            return None
        masses, gaps = (torch.cat(of).cpu() if of else torch.empty(0) for of in (self._masses, self._gaps))
        return masses[places], gaps[places]

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Measure what `model.generate` does meanwhile."""
        with _watched(model, self.before, self.after):
            yield


_Look = Callable[[Tensor, Tensor], None]


class _Watch(LogitsProcessor):
    """Shows the tokens so far and the scores, and leaves them as they are."""

    def __init__(self, look: _Look) -> None:
        self._look = look

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self._look(input_ids, scores)
        return scores


@contextmanager
def _watched(model: PreTrainedModel, before: _Look, after: _Look) -> Generator[None]:
    """Show what `model.generate` has for a token before all that is done to the scores, and after."""
    build: Any = model._get_logits_processor

    def build_and_watch(*arguments: Any, **keywords: Any) -> LogitsProcessorList:
        processors = build(*arguments, **keywords)
        return LogitsProcessorList([_Watch(before), *processors, _Watch(after)])

    attributes, name = vars(model), "_get_logits_processor"
    others = attributes.get(name)  # somebody else who watches
    attributes[name] = build_and_watch
    try:
        yield
    finally:
        del attributes[name]
        if others is not None:
            attributes[name] = others
