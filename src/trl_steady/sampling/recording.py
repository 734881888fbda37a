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


class Recording:
    """The tokens that one call of `generate` has kept, of all its `B` sequences, token after token."""

    def __init__(self) -> None:
        self._steps: list[KeptTokens] = []

    def add(self, scores: Tensor) -> None:
        """Add the next token of each sequence, from (B, V) scores with -inf for what was not kept."""
        self._steps.append(KeptTokens.of_mask(scores > -torch.inf))

    def of(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """The sets of all tokens of each completion, one completion after the other.

        Raises:
            ValueError: another number of sequences, or more tokens than there were scores for.
        """
        places = _places(completions)
        sequences = [len(step) for step in self._steps]
        if set(sequences) != {len(completions)} or max(map(len, completions)) > len(sequences):
            raise ValueError("transformers has not drawn one token after the other for each sequence.")
        return KeptTokens.joined(self._steps).take(places)

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Record what `model.generate` does meanwhile."""
        with _watched(model, lambda _scores, _temperature: None, self.add):
            yield


class KeptMass:
    """The share of the probability that lay on the tokens that one call of `generate` has kept."""

    def __init__(self) -> None:
        self._whole = torch.empty(0)  # (B, V)
        self._steps: list[Tensor] = []

    def before(self, scores: Tensor, temperature: float) -> None:
        """(B, V) scores, of which nothing has been taken out yet."""
        self._whole = scores / temperature

    def after(self, scores: Tensor) -> None:
        """(B, V) scores, -inf for what was not kept."""
        self._steps.append(self._whole.softmax(-1).where(scores > -torch.inf, 0).sum(-1))

    def of(self, completions: Sequence[Sequence[int]]) -> Tensor:
        """Of all tokens of each completion, one completion after the other."""
        return torch.cat(self._steps).cpu()[_places(completions)]

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Measure what `model.generate` does meanwhile."""
        with _watched(model, self.before, self.after):
            yield


def _places(completions: Sequence[Sequence[int]]) -> Tensor:
    """Where the tokens are among those of all sequences, token after token; what follows a completion is padding."""
    parts = [torch.arange(len(each)) * len(completions) + row for row, each in enumerate(completions)]
    return torch.cat([torch.arange(0), *parts])


class _Watch(LogitsProcessor):
    """Shows the scores, and leaves them as they are."""

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        self._show = show

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self._show(scores)
        return scores


@contextmanager
def _watched(
    model: PreTrainedModel, before: Callable[[Tensor, float], None], after: Callable[[Tensor], None]
) -> Generator[None]:
    """Show the scores that `model.generate` has for a token before all that is done to them, and after."""
    build: Any = model._get_logits_processor

    def build_and_watch(generation_config: Any, *arguments: Any, **keywords: Any) -> LogitsProcessorList:
        processors = build(generation_config, *arguments, **keywords)
        first = _Watch(lambda scores: before(scores, generation_config.temperature or 1.0))
        return LogitsProcessorList([first, *processors, _Watch(after)])

    attributes, name = vars(model), "_get_logits_processor"
    others = attributes.get(name)  # somebody else who watches
    attributes[name] = build_and_watch
    try:
        yield
    finally:
        del attributes[name]
        if others is not None:
            attributes[name] = others
