"""The sampling mask: which pass uses which candidates, and the column of the samples."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.engine import EngineOutput
from trl_steady.core.feature import Feature
from trl_steady.core.token_record import TokenRecord, Traced
from trl_steady.core.types import ForwardPass, LogProbs, ModelCall, Rollout, Turn
from trl_steady.features.sampling_mask.candidates import MAX_CANDIDATES, CandidateSets
from trl_steady.features.sampling_mask.model import SamplingMaskModel
from trl_steady.features.sampling_mask.recording import CandidateRecorder, refuse_other_modes
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.rollout import last_logits_processor
from trl_steady.trl_bridge.vllm import SteadyGeneration

_COLUMN = "kept_tokens"
_OPTION = "keep_sampling_mask=True"


def _compact(value: object) -> tuple[np.ndarray, np.ndarray]:
    """Return candidates as arrays of ids and counts, a tenth of the memory of nested lists."""
    sets = cast(Sequence[Sequence[int]], getattr(value, "token_ids", value))
    counts = np.fromiter(map(len, sets), dtype=np.int64, count=len(sets))
    return np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int32, count=int(counts.sum())), counts


SAMPLING_MASK = EngineOutput(
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

    def engine_extras(self, args: SharedOptions) -> Iterable[EngineOutput]:
        """Return that vLLM must return its sampling mask."""
        return [SAMPLING_MASK] if args.use_vllm and args.keep_sampling_mask else []

    def on_init_end(self) -> None:
        """Refuse what rules out candidates. Without the option, warn if sampling leaves tokens out."""
        trainer, args, model = self.trainer, self.args, self.trainer.model
        if not args.keep_sampling_mask:
            if args.truncations and trainer.accelerator.is_main_process:
                self.warn(
                    f"sampling leaves tokens out ({', '.join(args.truncations)}), and log-probs are of the whole "
                    "vocabulary. Updates train another distribution than the sampled one. Set "
                    "keep_sampling_mask=True, or sample from the whole vocabulary."
                )
            return
        learns_prompts = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
        reasons = {
            "torch.compile would trace TRL's fused LM head": models.compiles(trainer),
            "prompt learning shifts tokens against labels": learns_prompts,
            "a rollout_func returns no kept tokens": trainer.rollout_func is not None,
        }
        for reason, is_so in reasons.items():
            self.refuse(_OPTION, reason if is_so else None)

    # a rollout

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Begin a record."""
        if self.args.keep_sampling_mask:
            rollout.records[_COLUMN] = _CandidateRecord()

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Record the candidates of a generation."""
        record = None if turn.rollout is None else turn.rollout.records.get(_COLUMN)
        if record is None:
            return call_next(turn)
        bare = models.bare(self.trainer, self.trainer.model)
        if self.trainer.use_vllm:
            generated = call_next(turn)
            sets = take_sets(self.trainer.vllm_generation, turn.completion_ids)
            sets = sets.without_large(bare.config.get_text_config().vocab_size)
        else:
            recorder = CandidateRecorder()
            with last_logits_processor(bare, recorder, refuse_other_modes):
                generated = call_next(turn)
            sets = recorder.sets(turn.completion_ids)
        tokens = [*itertools.chain(*turn.completion_ids)]
        if len(sets) != len(tokens) or not sets.has(torch.tensor(tokens)).all():
            raise ValueError(
                f"{_OPTION}: a token of the rollout is not in the set that it was sampled from, so sets and tokens do "
                "not match. Set keep_sampling_mask=False, and report this bug."
            )
        record.add_sets(turn, sets)
        return generated

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Add `kept_tokens`."""
        if _COLUMN not in rollout.records:
            return
        width = rollout.samples["completion_ids"].size(1)
        sets = self._rollout_sets(rollout, rollout.input_ids, rollout.attention_mask, width)
        rollout.samples[_COLUMN] = sets.split(width)
        counts = sets.counts[rollout.is_sampled.flatten()]
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
        if without and self.args.truncations and may_warn:
            self._has_warned = True
            self.warn(
                f"{without} of {len(counts)} tokens were sampled among more than {MAX_CANDIDATES} tokens or among "
                "all. Their log-probs are of the whole vocabulary. Set top_k to bound the number of kept tokens."
            )

    def _rollout_sets(self, rollout: Rollout, ids: Tensor, mask: Tensor, width: int) -> CandidateSets:
        """Return the sets of the tokens of (B, width) completions, from what generation recorded."""
        record = rollout.records[_COLUMN]
        if record.values is None:
            numbers = record.aligned(ids, mask)
            sets = CandidateSets.cat(record.sets).to(ids.device)
            record.values = sets.take(numbers[:, -width:].flatten())
        return record.values

    # a pass

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Compute log-probs of policy and reference among the candidates of the rollout or micro-batch."""
        sets = None if forward.role in ("value", "other") else self._forward_sets(forward)
        if sets is None:
            return call_next(forward)
        ids = forward.input_ids
        index = torch.full_like(ids, -1)
        numbers = torch.arange(len(ids) * forward.width, device=index.device)
        index[:, -forward.width :] = numbers.view(-1, forward.width)
        wrappers: list[SamplingMaskModel] = []

        def wrap(model: ModelCall) -> ModelCall:
            wrappers.append(SamplingMaskModel(model, sets, index, forward.with_entropy, ids.new_zeros(2).double()))
            return wrappers[0]

        forward.wrap_model(wrap, needs_token_indices=True)
        log_probs = call_next(forward)
        if forward.rollout is None:
            self.trainer.metrics.pooled(sums={"sampling_mask/kept_mass": wrappers[0].kept_mass})
        return log_probs

    def _forward_sets(self, forward: ForwardPass) -> CandidateSets | None:
        ids, width = forward.input_ids, forward.width
        if forward.rollout is not None and _COLUMN in forward.rollout.records:
            return self._rollout_sets(forward.rollout, ids, forward.attention_mask, width)
        column = forward.samples.get(_COLUMN)
        if column is None:
            return None
        sets = CandidateSets.cat([CandidateSets(*completion) for completion in column])
        if len(sets) != len(ids) * width:
            raise ValueError(
                f"a micro-batch of {len(ids)} completions of {width} tokens has kept tokens of {len(sets)} positions. "
                "Cut its kept_tokens like its completion_ids."
            )
        return sets


class _CandidateRecord(TokenRecord):
    """A record whose value for a token is the number of its set."""

    def __init__(self) -> None:
        super().__init__(_OPTION, "Set keep_sampling_mask=False.")
        self.sets: list[CandidateSets] = []

    def add_sets(self, turn: Turn, sets: CandidateSets) -> None:
        """Add the sets of all completion tokens of a turn, one completion after the other."""
        numbers = torch.arange(len(sets), dtype=torch.int32) + sum(map(len, self.sets))
        parts = torch.split(numbers, [len(completion) for completion in turn.completion_ids])
        self.sets.append(sets)
        pairs = zip(turn.prompt_ids, parts, strict=True)
        self.add(turn, [torch.nn.functional.pad(part, (len(prompt), 0), value=-1) for prompt, part in pairs])

    def take(self, sequences: Sequence[list[int]]) -> list[tuple[Traced, CandidateSets]]:
        """Remove the sets of B sequences of tokens, and return those of each, with the numbers of its tokens."""
        traced: list[Traced] = super().take(sequences)
        sets, self.sets = CandidateSets.cat(self.sets), []
        return [(each, sets.take(each.values[each.values >= 0])) for each in traced]

    def give(self, items: Sequence[tuple[Traced, CandidateSets]]) -> None:
        """Record items of `take` again, with new numbers."""
        self.sets = [sets for _, sets in items]
        counts = [len(sets) for sets in self.sets]
        numbers = torch.split(torch.arange(sum(counts), dtype=torch.int32), counts)
        pairs = zip([traced for traced, _ in items], numbers, strict=True)
        super().give([Traced(ids, old.masked_scatter(old >= 0, new)) for (ids, old), new in pairs])


def take_sets(engine: SteadyGeneration, completions: list[list[int]]) -> CandidateSets:
    """Return the candidates of each token of the completions of the engine's last call, which forgets them."""
    parts: list[CandidateSets] = []
    for (ids, counts), completion in zip(engine.take(SAMPLING_MASK), completions, strict=True):
        sizes = counts[: len(completion)]  # a stop token that is not in the completion has a set too
        parts.append(CandidateSets.from_counts(torch.from_numpy(ids[: sizes.sum()]), torch.from_numpy(sizes)))
    sets = CandidateSets.cat(parts)
    if (sets.ids < 0).any() or ((sets.positions * 2**32 + sets.ids).sort().values.diff() == 0).any():
        raise ValueError(
            f"{_OPTION}: vLLM returned a set of kept tokens with a token twice, or with a negative token id."
        )
    return sets
