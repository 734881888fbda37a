"""The kept sampling mask as a part: which pass uses which kept sets, and the column of the samples."""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.core.engine import EngineOutput
from trl_steady.core.feature import Active
from trl_steady.core.token_record import TokenRecord
from trl_steady.core.types import ForwardPass, Rollout, Turn
from trl_steady.features.legacy import Part
from trl_steady.features.sampling_mask.candidates import MAX_KEPT, CandidateSets
from trl_steady.features.sampling_mask.model import KeptModel
from trl_steady.features.sampling_mask.recording import SetRecording
from trl_steady.functional.turns import Traced
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.vllm import SteadyGeneration

_COLUMN = "kept_tokens"
_OPTION = "keep_sampling_mask=True"


def _compact(value: object) -> tuple[np.ndarray, np.ndarray]:
    """Return kept tokens as arrays of ids and counts, a tenth of the memory of nested lists."""
    rows = cast(Sequence[Sequence[int]], getattr(value, "token_ids", value))
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=int(counts.sum())), counts


KEPT_TOKENS = EngineOutput(
    option=_OPTION,
    what="kept tokens",
    flag="return_sampling_mask",
    field="sampling_mask",
    remedy="Start a server with --return-sampling-mask --enable-scale-out (the second from vLLM 0.30 on), or set "
    "keep_sampling_mask=False. This needs vLLM 0.28 or later.",
    compact=_compact,
    needs_tokens_endpoint=True,
)


class SamplingPart(Part):
    """Takes log-probs among the tokens kept by top-p and the like, with `keep_sampling_mask`.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). The column `kept_tokens` has a pair
    of ids and offsets for each completion.
    """

    window_options = (("keep_sampling_mask", None),)
    _has_warned = False

    def captures(self, args: Any) -> list[EngineOutput]:
        """Return that vLLM must return kept tokens."""
        return [KEPT_TOKENS] if args.use_vllm and args.keep_sampling_mask else []

    def built(self) -> None:
        """Refuse what rules out kept tokens. Without the option, warn if sampling leaves tokens out."""
        trainer, args, model = self.trainer, self.trainer.args, self.trainer.model
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

    def describe(self) -> Iterable[Active]:
        """Return that log-probs are among kept tokens."""
        if self.trainer.args.keep_sampling_mask:
            yield Active("kept sampling mask", ("keep_sampling_mask",))

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> "Generator[None]":
        """Begin a record."""
        if self.trainer.args.keep_sampling_mask:
            rollout.records[_COLUMN] = _KeptRecord()
        yield

    @contextlib.contextmanager
    def generating(self, turn: Turn) -> "Generator[None]":
        """Record the kept tokens of a generation."""
        record = None if turn.rollout is None else turn.rollout.records.get(_COLUMN)
        if record is None:
            yield
            return
        bare = models.bare(self.trainer, self.trainer.model)
        if self.trainer.use_vllm:
            yield
            kept = taken_sets(self.trainer.vllm_generation, turn.completion_ids)
            kept = kept.without_large(bare.config.get_text_config().vocab_size)
        else:
            recording = SetRecording()
            with recording.listening(bare):
                yield
            kept = recording.of(turn.completion_ids)
        tokens = [*itertools.chain(*turn.completion_ids)]
        if len(kept) != len(tokens) or not kept.has(torch.tensor(tokens)).all():
            raise ValueError(
                f"{_OPTION}: a token of the rollout is not in the set that it was sampled from, so sets and tokens do "
                "not match. Set keep_sampling_mask=False, and report this bug."
            )
        record.add_sets(turn, kept)

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return `kept_tokens`."""
        if _COLUMN not in rollout.records:
            return {}
        width = rollout.samples["completion_ids"].size(1)
        kept = self._of_rollout(rollout, rollout.input_ids, rollout.attention_mask, width)
        counts = kept.counts[rollout.is_sampled.flatten()]
        has_set = counts > 0
        self.trainer.metrics.pooled(
            means={
                "sampling_mask/kept_tokens": (counts, has_set),
                "sampling_mask/singletons": (counts == 1, has_set),
                "sampling_mask/fallback": (~has_set, torch.ones_like(has_set)),
            },
        )
        self.trainer.metrics.over_processes({"max": "sampling_mask/kept_tokens_max"}, counts, has_set)
        without = int((~has_set).sum())
        may_warn = not self._has_warned and self.trainer.accelerator.is_main_process
        if without and self.trainer.args.truncations and may_warn:
            self._has_warned = True
            self.warn(
                f"{without} of {len(counts)} tokens were sampled among more than {MAX_KEPT} tokens or among all. "
                "Their log-probs are of the whole vocabulary. Set top_k to bound the number of kept tokens."
            )
        return {_COLUMN: kept.of_samples(width)}

    def _of_rollout(self, rollout: Rollout, ids: Tensor, mask: Tensor, width: int) -> CandidateSets:
        """Return the sets of the tokens of (B, width) completions, from what generation recorded."""
        record = rollout.records[_COLUMN]
        if record.values is None:
            numbers = record.aligned(ids, mask)
            sets = CandidateSets.joined(record.sets).to(ids.device)
            record.values = sets.take(numbers[:, -width:].flatten())
        return record.values

    @contextlib.contextmanager
    def scoring(self, scoring: ForwardPass, model: Callable[..., Any]) -> "Generator[Callable[..., Any]]":
        """Score policy and reference among the kept tokens of the rollout or micro-batch."""
        kept = None if scoring.role in ("value", "other") else self._of_pass(scoring)
        if kept is None:
            yield model
            return
        ids = scoring.input_ids
        index = torch.full_like(ids, -1)
        numbers = torch.arange(len(ids) * scoring.width, device=index.device)
        index[:, -scoring.width :] = numbers.view(-1, scoring.width)
        kept_model = KeptModel(model, kept, index, with_entropy=scoring.with_entropy)
        yield kept_model
        if scoring.rollout is None:
            self.trainer.metrics.pooled(sums={"sampling_mask/kept_mass": kept_model.kept_mass})

    def _of_pass(self, scoring: ForwardPass) -> CandidateSets | None:
        ids, width = scoring.input_ids, scoring.width
        if scoring.rollout is not None and _COLUMN in scoring.rollout.records:
            return self._of_rollout(scoring.rollout, ids, scoring.attention_mask, width)
        column = scoring.samples.get(_COLUMN)
        if column is None:
            return None
        kept = CandidateSets.joined([CandidateSets(*of_completion) for of_completion in column])
        if len(kept) != len(ids) * width:
            raise ValueError(
                f"a micro-batch of {len(ids)} completions of {width} tokens has kept tokens of {len(kept)} positions. "
                "Cut its kept_tokens like its completion_ids."
            )
        return kept


class _KeptRecord(TokenRecord):
    """A record whose value for a token is the number of its set."""

    def __init__(self) -> None:
        super().__init__(_OPTION, "Set keep_sampling_mask=False.")
        self.sets: list[CandidateSets] = []

    def add_sets(self, turn: Turn, kept: CandidateSets) -> None:
        """Add the sets of all completion tokens of a turn, one completion after the other."""
        numbers = torch.arange(len(kept), dtype=torch.int32) + sum(map(len, self.sets))
        parts = torch.split(numbers, [len(completion) for completion in turn.completion_ids])
        self.sets.append(kept)
        pairs = zip(turn.prompt_ids, parts, strict=True)
        self.add(turn, [torch.nn.functional.pad(part, (len(prompt), 0), value=-1) for prompt, part in pairs])

    def take(self, sequences: Sequence[list[int]]) -> list[tuple[Traced, CandidateSets]]:
        """Remove the sets of B sequences of tokens, and return those of each, with the numbers of its tokens."""
        traced: list[Traced] = super().take(sequences)
        sets, self.sets = CandidateSets.joined(self.sets), []
        return [(each, sets.take(each.values[each.values >= 0])) for each in traced]

    def give(self, items: Sequence[tuple[Traced, CandidateSets]]) -> None:
        """Record items of `take` again, with new numbers."""
        self.sets = [sets for _, sets in items]
        counts = [len(sets) for sets in self.sets]
        numbers = torch.split(torch.arange(sum(counts), dtype=torch.int32), counts)
        pairs = zip([traced for traced, _ in items], numbers, strict=True)
        super().give([Traced(ids, old.masked_scatter(old >= 0, new)) for (ids, old), new in pairs])


def taken_sets(engine: SteadyGeneration, completions: list[list[int]]) -> CandidateSets:
    """Return the kept tokens at each token of the completions of the engine's last call, joined. It forgets them."""
    parts: list[CandidateSets] = []
    for (ids, counts), completion in zip(engine.take(KEPT_TOKENS), completions, strict=True):
        sizes = counts[: len(completion)]  # a stop token that is not in the completion has a row too
        parts.append(CandidateSets.of_counts(torch.from_numpy(ids[: sizes.sum()]), torch.from_numpy(sizes)))
    kept = CandidateSets.joined(parts)
    if (kept.ids < 0).any() or ((kept.rows * 2**32 + kept.ids).sort().values.diff() == 0).any():
        raise ValueError(
            f"{_OPTION}: vLLM returned a set of kept tokens with a token twice, or with a negative token id."
        )
    return kept
