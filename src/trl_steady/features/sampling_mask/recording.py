"""Record which tokens transformers' `generate` samples from, by the scores after all logits processors."""

# pyright: reportIncompatibleMethodOverride=false
# transformers annotates tensors by their old types

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.configuration_utils import GenerationMode

from trl_steady.features.sampling_mask.candidates import CandidateSets


class CandidateRecorder(LogitsProcessor):
    """Logits processor that changes nothing, and records the candidates of one call of `generate`."""

    def __init__(self) -> None:
        self._steps: list[CandidateSets] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step: the scores (B, V) of the next token of each sequence, -inf for tokens that are excluded."""
        # Keep sets on the CPU, like vLLM's. `from_mask` syncs with the GPU anyway, and the KV cache needs the memory.
        self._steps.append(CandidateSets.from_mask(scores > -torch.inf).to(torch.device("cpu")))
        return scores

    def candidates(self, completions: Sequence[Sequence[int]]) -> CandidateSets:
        """Return the candidates of all tokens of each completion, one completion after the other."""
        # sets are ordered by step and sequence; tokens after a completion are padding
        parts: list[Tensor] = []
        for row, completion in enumerate(completions):
            steps = torch.arange(len(completion))
            parts.append(steps * len(completions) + row)
        self._steps = [CandidateSets.cat(self._steps)]  # the parts would take the same memory again
        return self._steps[0].take(torch.cat(parts))


def refuse_other_modes(config: GenerationConfig) -> None:
    """Raise a ValueError for all but plain sampling, where scores are not what the next token is sampled from."""
    if config.get_generation_mode() != GenerationMode.SAMPLE:
        raise ValueError(
            "keep_sampling_mask=True needs plain sampling. Leave do_sample=False, beam search and assisted "
            "decoding out of generation_kwargs and of the model's generation_config."
        )
