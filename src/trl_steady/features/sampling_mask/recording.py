"""Record which tokens transformers' `generate` samples from, by the scores after all logits processors."""

# pyright: reportUnknownMemberType=false, reportIncompatibleMethodOverride=false
# torch's annotations are partial; transformers has no public hook after its last logits processor

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.trl_bridge.private import patched


class SetRecording(LogitsProcessor):
    """Logits processor that changes nothing, and records the kept tokens of one call of `generate`."""

    def __init__(self) -> None:
        self._sets: list[CandidateSets] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step: the scores (B, V) of the next token of each sequence, -inf for tokens not kept."""
        # Keep sets on the CPU, like vLLM's. `of_mask` syncs with the GPU anyway, and the KV cache needs the memory.
        self._sets.append(CandidateSets.of_mask(scores > -torch.inf).to(torch.device("cpu")))
        return scores

    def of(self, completions: Sequence[Sequence[int]]) -> CandidateSets:
        """Return the sets of all tokens of each completion, one completion after the other."""
        # sets are ordered by step and sequence; what follows a completion is padding
        parts = [torch.arange(len(each)) * len(completions) + row for row, each in enumerate(completions)]
        return CandidateSets.joined(self._sets).take(torch.cat(parts))

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Generator[None]:
        """Record the call of `model.generate` inside this context. Refuse all but plain sampling."""
        build: Callable[..., LogitsProcessorList] = getattr(model, "_get_logits_processor")  # noqa: B009

        def build_and_record(generation_config: GenerationConfig, **keywords: object) -> LogitsProcessorList:
            if generation_config.get_generation_mode() != GenerationMode.SAMPLE:
                raise ValueError(
                    "keep_sampling_mask=True needs plain sampling. Leave do_sample=False, beam search and assisted "
                    "decoding out of generation_kwargs and of the model's generation_config."
                )
            return LogitsProcessorList([*build(generation_config, **keywords), self])

        with patched(model, {"_get_logits_processor": build_and_record}):
            yield
