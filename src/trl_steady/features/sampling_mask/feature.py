"""The sampling mask: which pass uses which candidates, and the column of the samples."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.config.sampling import TRUNCATIONS
from trl_steady.config.shared import SharedOptions
from trl_steady.core.engine import EngineExtra
from trl_steady.core.feature import Feature
from trl_steady.core.token_record import TokenRecord, Traced, refuse_other_count
from trl_steady.core.types import ForwardPass, LogProbs, ModelCall, Rollout, Turn
from trl_steady.features.sampling_mask.candidates import MAX_CANDIDATES, CandidateSets
from trl_steady.features.sampling_mask.model import SamplingMaskModel
from trl_steady.features.sampling_mask.recording import CandidateRecorder, refuse_other_modes
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.generation import last_logits_processor
from trl_steady.trl_bridge.vllm import SteadyGeneration

_COLUMN = "kept_tokens"
_OPTION = "keep_sampling_mask=True"


def _compact(value: object) -> tuple[np.ndarray, np.ndarray]:
    """Return candidates as arrays of ids and counts, a tenth of the memory of nested lists."""
    sets = cast(Sequence[Sequence[int]], getattr(value, "token_ids", value))
    counts = np.fromiter(map(len, sets), dtype=np.int64, count=len(sets))
    return np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int32, count=int(counts.sum())), counts


SAMPLING_MASK = EngineExtra(
    option=_OPTION,
    label="kept tokens",
    flag="return_sampling_mask",
    field="sampling_mask",
    fix_hint="Start a server with --return-sampling-mask --enable-scale-out (the second from vLLM 0.30 on), or set "
    "keep_sampling_mask=False. This needs vLLM 0.28 or later.",
    compact=_compact,
    needs_tokens_endpoint=True,
)


class SamplingMask(Feature):
    """Takes log-probs among the candidates, the tokens kept by top-p and the like, with `keep_sampling_mask`.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). The column `kept_tokens` has a pair
    of ids and offsets for each completion.
    """

    args: SharedOptions
    _has_warned = False

    def engine_extras(self, args: SharedOptions) -> Iterable[EngineExtra]:
        """Return that vLLM must return its sampling mask."""
        if args.use_vllm and args.keep_sampling_mask:
            return [SAMPLING_MASK]
        return []

    def on_init_end(self) -> None:
        """Refuse what rules out candidates. Without the option, warn if sampling leaves tokens out."""
        trainer = self.trainer
        args = self.args
        model = trainer.model
        if not args.keep_sampling_mask:
            truncations = self._truncations()
            if truncations and trainer.accelerator.is_main_process:
                self.warn(
                    f"sampling leaves tokens out ({', '.join(truncations)}), and log-probs are of the whole "
                    "vocabulary. Updates train another distribution than the sampled one. Set "
                    "keep_sampling_mask=True, or sample from the whole vocabulary."
                )
            return
        if models.compiles(trainer):
            self.refuse(_OPTION, "torch.compile would trace TRL's fused LM head")
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            self.refuse(_OPTION, "prompt learning shifts tokens against labels")
        if trainer.rollout_func is not None:
            self.refuse(_OPTION, "a rollout_func returns no kept tokens")

    def _truncations(self) -> list[str]:
        """Return the settings that exclude tokens from sampling.

        transformers takes what no option sets from the model's generation_config, as `min_p` by default.
        """
        settings = self.args.truncations
        if self.trainer.use_vllm or self.trainer.rollout_func is not None:
            return settings
        of_model = getattr(models.bare(self.trainer, self.trainer.model), "generation_config", None)
        for name, excludes in TRUNCATIONS.items():
            value = getattr(of_model, name, None)
            if value is not None and name not in self.args.sampling and excludes(value):
                settings.append(f"{name}={value!r} of the model's generation_config")
        return settings

    # a rollout

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Begin a record. An evaluation with another sampling needs none."""
        is_other = self.args.eval_generation is not None and not self.trainer.model.training
        if self.args.keep_sampling_mask and not is_other:
            rollout.records[_COLUMN] = _CandidateRecord()

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Record the candidates of a generation."""
        if turn.rollout is None or _COLUMN not in turn.rollout.records:
            return call_next(turn)
        record: _CandidateRecord = turn.rollout.records[_COLUMN]
        bare = models.bare(self.trainer, self.trainer.model)
        if self.trainer.use_vllm:
            generated = call_next(turn)
            refuse_other_count(turn, _OPTION)
            candidates = take_candidates(self.trainer.vllm_generation, turn.completion_ids)
            candidates = candidates.without_large(bare.config.get_text_config().vocab_size)
        else:
            recorder = CandidateRecorder()
            with last_logits_processor(bare, recorder, refuse_other_modes):
                generated = call_next(turn)
            refuse_other_count(turn, _OPTION)
            candidates = recorder.candidates(turn.completion_ids)
        tokens = list(itertools.chain.from_iterable(turn.completion_ids))
        if len(candidates) != len(tokens) or not candidates.has(torch.tensor(tokens)).all():
            raise ValueError(
                f"{_OPTION}: a token of the rollout is not in the set that it was sampled from, so sets and tokens do "
                "not match. Set keep_sampling_mask=False, and report this bug."
            )
        record.add_candidates(turn, candidates)
        return generated

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Add `kept_tokens`."""
        if _COLUMN not in rollout.records:
            return
        width = rollout.samples["completion_ids"].size(1)
        candidates = self._rollout_candidates(rollout, rollout.input_ids, rollout.attention_mask, width)
        rollout.samples[_COLUMN] = candidates.split(width)
        counts = candidates.counts[rollout.is_sampled.flatten()]
        has_set = counts > 0
        self.trainer.metrics.pooled(
            means={
                "sampling_mask/kept_tokens": (counts, has_set),
                "sampling_mask/singletons": (counts == 1, has_set),
                "sampling_mask/fallback": (~has_set, torch.ones_like(has_set)),
            },
            maxima={"sampling_mask/kept_tokens_max": (counts, has_set)},
        )
        without = int((~has_set).sum())
        may_warn = not self._has_warned and self.trainer.accelerator.is_main_process
        if without and may_warn and self._truncations():
            self._has_warned = True
            self.warn(
                f"{without} of {len(counts)} tokens were sampled among more than {MAX_CANDIDATES} tokens or among "
                "all. Their log-probs are of the whole vocabulary. Set top_k to bound the number of kept tokens."
            )

    def _rollout_candidates(self, rollout: Rollout, ids: Tensor, mask: Tensor, width: int) -> CandidateSets:
        """Return the candidates of the tokens of (B, width) completions, from what generation recorded."""
        record = rollout.records[_COLUMN]
        if record.values is None:
            numbers = record.as_padded(ids, mask)
            candidates = CandidateSets.cat(record.candidates)
            record.candidates.clear()
            record.values = candidates.take(numbers[:, -width:].flatten()).to(ids.device)
        return record.values

    # a pass

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Compute log-probs of policy, reference and teacher among the candidates of the rollout or micro-batch."""
        if forward.role in ("value", "other"):
            return call_next(forward)
        candidates = self._forward_candidates(forward)
        if candidates is None:
            return call_next(forward)
        ids = forward.input_ids
        index = torch.full_like(ids, -1)
        numbers = torch.arange(len(ids) * forward.width, device=index.device)
        index[:, -forward.width :] = numbers.view(-1, forward.width)
        wrappers: list[SamplingMaskModel] = []

        def wrap(model: ModelCall) -> ModelCall:
            kept_mass = ids.new_zeros(2).double()
            wrappers.append(SamplingMaskModel(model, candidates, index, forward.with_entropy, kept_mass))
            return wrappers[0]

        forward.wrap_model(wrap, needs_token_indices=True)
        log_probs = call_next(forward)
        if forward.rollout is None:
            self.trainer.metrics.pooled(sums={"sampling_mask/kept_mass": wrappers[0].kept_mass})
        return log_probs

    def _forward_candidates(self, forward: ForwardPass) -> CandidateSets | None:
        ids = forward.input_ids
        width = forward.width
        if forward.rollout is not None and _COLUMN in forward.rollout.records:
            return self._rollout_candidates(forward.rollout, ids, forward.attention_mask, width)
        column = forward.samples.get(_COLUMN)
        if column is None:
            return None
        parts = [CandidateSets(token_ids, offsets) for token_ids, offsets in column]
        candidates = CandidateSets.cat(parts)
        if len(candidates) != len(ids) * width:
            raise ValueError(
                f"a micro-batch of {len(ids)} completions of {width} tokens has kept tokens of {len(candidates)} "
                "positions. Cut its kept_tokens like its completion_ids."
            )
        return candidates


class _CandidateRecord(TokenRecord):
    """A record whose value for a token is the number of its set."""

    def __init__(self) -> None:
        super().__init__(_OPTION, "Set keep_sampling_mask=False.")
        self.candidates: list[CandidateSets] = []

    def add_candidates(self, turn: Turn, candidates: CandidateSets) -> None:
        """Add the candidates of all completion tokens of a turn, one completion after the other."""
        first = sum(map(len, self.candidates))
        numbers = torch.arange(len(candidates), dtype=torch.int32) + first
        self.candidates.append(candidates)
        parts = torch.split(numbers, list(map(len, turn.completion_ids)))
        values: list[Tensor] = []
        for prompt, part in zip(turn.prompt_ids, parts, strict=True):
            values.append(torch.nn.functional.pad(part, (len(prompt), 0), value=-1))
        self.add(turn, values)

    def take(self, sequences: Sequence[list[int]]) -> list[tuple[Traced, CandidateSets]]:
        """Remove the candidates of B sequences of tokens, and return those of each, with the numbers of its tokens."""
        taken: list[tuple[Traced, CandidateSets]] = []
        traced: list[Traced] = super().take(sequences)
        candidates = CandidateSets.cat(self.candidates)
        self.candidates = []
        for sequence in traced:
            numbers = sequence.values[sequence.values >= 0]
            taken.append((sequence, candidates.take(numbers)))
        return taken

    def give(self, items: Sequence[tuple[Traced, CandidateSets]]) -> None:
        """Record items of `take` again, with new numbers."""
        self.candidates = []
        renumbered: list[Traced] = []
        first = 0
        for (ids, old_numbers), candidates in items:
            numbers = torch.arange(first, first + len(candidates), dtype=torch.int32)
            renumbered.append(Traced(ids, old_numbers.masked_scatter(old_numbers >= 0, numbers)))
            self.candidates.append(candidates)
            first += len(candidates)
        super().give(renumbered)


def take_candidates(engine: SteadyGeneration, completions: list[list[int]]) -> CandidateSets:
    """Return the candidates of each token of the completions of the engine's last call, which forgets them."""
    parts: list[CandidateSets] = []
    for (ids, counts), completion in zip(engine.take(SAMPLING_MASK), completions, strict=True):
        sizes = counts[: len(completion)]  # a stop token that is not in the completion has a set too
        sets = CandidateSets.from_counts(torch.from_numpy(ids[: sizes.sum()]), torch.from_numpy(sizes))
        if not _is_valid(sets):
            raise ValueError(
                f"{_OPTION}: vLLM returned a set of kept tokens with a token twice, or with a negative token id."
            )
        parts.append(sets)
    return CandidateSets.cat(parts)


def _is_valid(sets: CandidateSets) -> bool:
    """Return True if no set has a token twice, or a negative token id."""
    pairs = sets.positions * 2**32 + sets.ids  # one number for each position and token
    has_twice = (pairs.sort().values.diff() == 0).any()
    return not (has_twice or (sets.ids < 0).any())
