"""The kept sampling mask as a part: which pass uses which kept sets, the column of the samples, and the warnings."""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.config.checks import beyond_sets
from trl_steady.host import models
from trl_steady.host.engine import Capture
from trl_steady.host.fused_head import scored_by
from trl_steady.host.part import Part, Rollout, ScoringPass, Turn
from trl_steady.host.record import TokenRecord
from trl_steady.sampling.kept import MAX_KEPT, KeptTokens
from trl_steady.sampling.proxy import KeptModel
from trl_steady.sampling.recording import KeptMass, SetRecording

__all__ = ["KEPT_TOKENS", "SamplingPart", "taken_sets"]

_COLUMN = "kept_tokens"
_OPTION = "keep_sampling_mask=True"


def _compact(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return kept tokens as arrays of ids and counts, a tenth of the memory of nested lists."""
    rows = getattr(value, "token_ids", value)
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=int(counts.sum())), counts


KEPT_TOKENS = Capture(
    option=_OPTION,
    what="kept tokens",
    flag="return_sampling_mask",
    field="sampling_mask",
    is_on="--return-sampling-mask --enable-scale-out (the second from vLLM 0.30 on)",
    lost="This needs vLLM 0.28 or later",
    instead="or set keep_sampling_mask=False",
    compact=_compact,
    refusal="sampling distribution replay",
    needs_tokens_endpoint=True,
)


class SamplingPart(Part):
    """Takes log-probs among the tokens kept by top-p and the like, with `keep_sampling_mask`.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). Without the option, the part warns
    once how far off the log-probs are.

    The column `kept_tokens` has a pair of ids and offsets for each completion.
    """

    window_options = (("keep_sampling_mask", None),)
    _measured: list[tuple[Tensor, Tensor] | None] | None = None  # of the turns of the rollout that warns
    _has_warned_of_bias = False
    _has_warned_of_large_sets = False

    @property
    def _is_on(self) -> bool:
        return self.trainer.args.keep_sampling_mask

    # construction

    def captures(self, args: Any) -> list[Capture]:
        """Return that vLLM must return kept tokens."""
        return [KEPT_TOKENS] if args.use_vllm and args.keep_sampling_mask else []

    def built(self) -> None:
        """Refuse models and ways of generating for which kept tokens are not known, or cannot be used."""
        trainer = self.trainer
        if not self._is_on:
            return
        if models.compiles(trainer):
            raise ValueError(
                f"{_OPTION} patches TRL's fused LM head, which torch.compile would trace. Set torch_compile=False."
            )
        if isinstance(trainer.model, PeftModel) and trainer.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{_OPTION} does not work with prompt learning, which shifts tokens against labels. Train LoRA "
                "adapters, or set keep_sampling_mask=False."
            )
        if trainer.rollout_func is not None:
            raise ValueError(
                f"{_OPTION} does not work with a rollout_func, which returns no kept tokens. Leave rollout_func "
                "unset, or set keep_sampling_mask=False and sample without top_p, top_k and min_p."
            )

    # generation

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> "Generator[None]":
        """Begin a record. Without the option, measure once, in training, what sampling leaves out."""
        trainer = self.trainer
        self._measured = None
        if self._is_on:
            rollout.records[_COLUMN] = _KeptRecord()
        elif trainer.args.truncations and not self._has_warned_of_bias and trainer.model.training:
            self._measured = []
        yield

    @contextlib.contextmanager
    def generating(self, turn: Turn) -> "Generator[None]":
        """Record the kept tokens of a generation, or measure how much they leave out."""
        trainer, measured = self.trainer, self._measured
        is_ours = not (trainer.use_vllm or trainer.args.use_transformers_continuous_batching)
        if turn.rollout is not None and self._is_on:
            with self._recorded(turn, turn.rollout.records[_COLUMN]):
                yield
        elif turn.rollout is not None and measured is not None and is_ours:
            mass = KeptMass(trainer.temperature)
            with mass.listening(models.bare(trainer, trainer.model)):
                yield
            measured.append(mass.of(turn.completion_ids))
        else:
            yield

    @contextlib.contextmanager
    def _recorded(self, turn: Turn, record: "_KeptRecord") -> "Generator[None]":
        bare = models.bare(self.trainer, self.trainer.model)
        if self.trainer.use_vllm:
            yield
            kept = taken_sets(self.trainer.vllm_generation, turn.completion_ids)
            kept = kept.without_large(bare.config.get_text_config().vocab_size)
        else:
            recording = SetRecording()
            with recording.listening(bare):
                yield
            try:
                kept = recording.of(turn.completion_ids)
            except ValueError as error:
                raise ValueError(
                    f"{_OPTION}: {error} Leave beam search and assisted decoding out of generation_kwargs and of the "
                    "model's generation_config."
                ) from None
        if not kept.has(torch.tensor(list(itertools.chain(*turn.completion_ids)))).all():
            raise ValueError(
                f"{_OPTION}: a token of the rollout is not in the set that it was sampled from, so sets and tokens do "
                "not match. Set keep_sampling_mask=False, and report this bug."
            )
        record.add_sets(turn, kept)

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return `kept_tokens`, or warn of the bias without them."""
        if not self._is_on:
            if self._measured is not None:
                self._warn_of_bias(rollout)
            return {}
        width = rollout.samples["completion_ids"].size(1)
        kept = self._of_rollout(rollout, rollout.input_ids, rollout.attention_mask, width)
        counts = kept.counts[rollout.is_sampled.flatten()]
        sets, without = (counts > 0).sum(), (counts == 0).sum()
        self.trainer.metrics.pooled(
            counts={"sampling_mask/kept_tokens": (counts, counts > 0)},
            sums={
                "sampling_mask/singletons": torch.stack([(counts == 1).sum(), sets]),
                "sampling_mask/fallback": torch.stack([without, sets + without]),
            },
        )
        may_warn = not self._has_warned_of_large_sets and self.trainer.accelerator.is_main_process
        if without and self.trainer.args.truncations and may_warn:
            self._has_warned_of_large_sets = True
            warnings.warn(
                f"{int(without)} of {len(counts)} tokens were sampled among more than {MAX_KEPT} tokens or among all. "
                "Their log-probs are of the whole vocabulary. Set top_k to bound the number of kept tokens.",
                UserWarning,
                stacklevel=2,
            )
        return {_COLUMN: kept.of_samples(width)}

    def _of_rollout(self, rollout: Rollout, ids: Tensor, mask: Tensor, width: int) -> KeptTokens:
        """Return the sets of the tokens of (B, width) completions, from what generation recorded."""
        record = rollout.records[_COLUMN]
        if record.values is None:
            if not record.turns:
                raise ValueError(
                    f"{_OPTION}: {type(self.trainer).__name__} made a rollout without calling `generate`, which "
                    "records kept tokens. Override `generate` instead, or set keep_sampling_mask=False."
                )
            numbers = record.aligned(ids, mask)
            sets = KeptTokens.joined(record.sets).to(ids.device)
            record.values = sets.take(numbers[:, -width:].flatten())
        return record.values

    def _warn_of_bias(self, rollout: Rollout) -> None:
        trainer, args = self.trainer, self.trainer.args
        turns, self._measured = self._measured or [], None
        self._has_warned_of_bias = True
        old, sampler = rollout.samples.get("old_per_token_logps"), rollout.samples.get("sampling_per_token_logps")
        if old is not None and sampler is not None:
            gaps = (sampler - old)[rollout.is_sampled]
            gaps = gaps[~gaps.isnan()]
            turns = [((-gaps).exp(), gaps)]
        if not trainer.accelerator.is_main_process:
            return
        known = [turn for turn in turns if turn is not None]
        masses, gaps = (torch.cat([torch.empty(0), *(turn[i].cpu() for turn in known)]) for i in (0, 1))
        size = "The difference has not been measured."
        if len(gaps) and len(known) == len(turns):
            size = (
                f"In this rollout, the kept tokens had {float(masses.mean()):.3g} of the probability mass, and "
                f"log-probs are {float(gaps.mean()):.3g} nats per token below the sampler's."
            )
        warnings.warn(
            f"sampling leaves tokens out ({', '.join(args.truncations)}), and log-probs are of the whole vocabulary. "
            f"{size} Ratios to the sampler contain the difference, and updates train another distribution than the "
            "sampled one. Set keep_sampling_mask=True, or sample from the whole vocabulary."
            + beyond_sets(args.weightings),
            UserWarning,
            stacklevel=2,
        )

    # scoring

    @contextlib.contextmanager
    def scoring(self, scoring: ScoringPass, model: Callable[..., Any]) -> "Generator[Callable[..., Any]]":
        """Score policy and reference among the kept tokens of the rollout or micro-batch."""
        kept = self._of_pass(scoring) if self._is_on and scoring.role not in ("value", "other") else None
        if kept is None:
            yield model
            return
        ids = scoring.input_ids
        index = torch.full_like(ids, -1)
        numbers = torch.arange(len(ids) * scoring.width, device=index.device)
        index[:, -scoring.width :] = numbers.view(-1, scoring.width)
        kept_model = KeptModel(model, kept, index, scored_by, with_entropy=scoring.with_entropy)
        yield kept_model
        if scoring.rollout is None:
            self.trainer.metrics.pooled(sums={"sampling_mask/kept_mass": kept_model.kept_mass})

    def _of_pass(self, scoring: ScoringPass) -> KeptTokens | None:
        ids, width = scoring.input_ids, scoring.width
        if scoring.rollout is not None:
            return self._of_rollout(scoring.rollout, ids, scoring.attention_mask, width)
        column = scoring.samples.get(_COLUMN)
        if column is None:
            return None
        kept = KeptTokens.joined([KeptTokens(*own) for own in column])
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
        self.sets: list[KeptTokens] = []

    def add_sets(self, turn: Turn, kept: KeptTokens) -> None:
        """Add the sets of all completion tokens of a turn, one completion after the other."""
        numbers = torch.arange(len(kept), dtype=torch.int32) + sum(map(len, self.sets))
        parts = torch.split(numbers, [len(completion) for completion in turn.completion_ids])
        prompts = [numbers.new_full((len(prompt),), -1) for prompt in turn.prompt_ids]
        self.sets.append(kept)
        self.add(turn, [torch.cat(pair) for pair in zip(prompts, parts, strict=True)])


def taken_sets(engine: Any, completions: list[list[int]]) -> KeptTokens:
    """Return the kept tokens at each token of the completions of the engine's last call, joined. It forgets them.

    Raises:
        ValueError: The engine has returned none for a completion, or those of too few tokens.
    """
    parts: list[KeptTokens] = []
    for (ids, counts), completion in zip(engine.take(KEPT_TOKENS), completions, strict=True):
        if len(counts) < len(completion):
            raise ValueError(
                f"{_OPTION}: vLLM returned kept tokens for {len(counts)} tokens of a completion of {len(completion)}."
            )
        own = counts[: len(completion)]  # a stop token that is not in the completion has a row too
        parts.append(KeptTokens.of_counts(torch.from_numpy(ids[: own.sum()]), torch.from_numpy(own)))
    kept = KeptTokens.joined(parts)
    kept.check()
    return kept
