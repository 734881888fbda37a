"""`trl.GRPOTrainer` with log-probs of the distribution that was sampled from."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.checks import beyond_sets
from trl_steady.config import GRPOConfig
from trl_steady.host import overridden
from trl_steady.host.engine import KEPT_TOKENS, Capture, capturing_engine
from trl_steady.host.head import scored_by
from trl_steady.sampling.kept import MAX_KEPT, KeptTokens
from trl_steady.sampling.model import KeptModel
from trl_steady.sampling.recording import KeptMass, Recording
from trl_steady.turns import Traced, aligned, stitched
from trl_steady.unpadded import UnpaddedTrainer

__all__ = ["SampledTrainer"]


@dataclass
class _Rollout:
    """Kept tokens of the rollout in progress."""

    turns: list[list[Traced]] = field(default_factory=list)
    """Generated tokens, turn by turn. The value of a sampled token is the number of its set."""
    sets: list[KeptTokens] = field(default_factory=list)
    kept: KeptTokens | None = None
    """Sets of the B * T tokens of the padded completions, once known."""


class SampledTrainer(UnpaddedTrainer):
    """Trainer that takes log-probs among the tokens kept by top-p and the like, with `keep_sampling_mask`.

    This is "Keep Sampling Mask" of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). Without the option, the trainer
    warns once how far off the log-probs are.
    """

    args: GRPOConfig
    _sampling: _Rollout | None = None
    _measured: list[tuple[Tensor, Tensor] | None] | None = None
    _kept: list[tuple[Tensor, Tensor]] | None = None
    _has_warned_of_bias = False
    _has_warned_of_large_sets = False

    def __init__(self, model: Any, reward_funcs: Any, args: GRPOConfig, *positional: Any, **keywords: Any) -> None:
        with capturing_engine(self.captures(args)):
            super().__init__(model, reward_funcs, args, *positional, **keywords)
        if not args.keep_sampling_mask:
            return
        option = "keep_sampling_mask=True"
        if self.compiles:
            raise ValueError(
                f"{option} patches TRL's fused LM head, which torch.compile would trace. Set torch_compile=False."
            )
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{option} does not work with prompt learning, which shifts tokens against labels. Train LoRA "
                "adapters, or set keep_sampling_mask=False."
            )
        if self.rollout_func is not None:
            raise ValueError(
                f"{option} does not work with a rollout_func, which returns no kept tokens. Leave rollout_func unset, "
                "or set keep_sampling_mask=False and sample without top_p, top_k and min_p."
            )

    def captures(self, args: GRPOConfig) -> list[Capture]:
        """Return what vLLM must return beside tokens."""
        return [KEPT_TOKENS] if args.use_vllm and args.keep_sampling_mask else []

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """Run TRL's rollout, and add `kept_tokens`, a pair of ids and offsets for each completion."""
        if not self.args.keep_sampling_mask:
            return self._rollout_of_all(inputs)
        rollout = _Rollout()
        with overridden(self, {"_sampling": rollout}):
            output = super().rollout(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        width = output["completion_ids"].size(1)
        kept = self._aligned(rollout, ids, mask, width)
        output["kept_tokens"] = kept.of_samples(width)
        is_sampled = _sampled_tokens(output).flatten()
        counts = kept.counts[is_sampled]
        sets, without = (counts > 0).sum(), (counts == 0).sum()
        self.record_pooled(
            counts={"sampling_mask/kept_tokens": counts[counts > 0]},
            sums={
                "sampling_mask/singletons": torch.stack([(counts == 1).sum(), sets]),
                "sampling_mask/fallback": torch.stack([without, sets + without]),
            },
        )
        may_warn = not self._has_warned_of_large_sets and self.accelerator.is_main_process
        if without and self.args.truncations and may_warn:
            self._has_warned_of_large_sets = True
            warnings.warn(
                f"{int(without)} of {len(counts)} tokens were sampled among more than {MAX_KEPT} tokens or among all. "
                "Their log-probs are of the whole vocabulary. Set top_k to bound the number of kept tokens.",
                UserWarning,
                stacklevel=2,
            )
        return output

    def _rollout_of_all(self, inputs: Any) -> dict[str, Any]:
        """Run TRL's rollout, and warn in the first training rollout if sampling leaves tokens out."""
        truncations = self.args.truncations
        if not truncations or self._has_warned_of_bias or not self.model.training:
            return super().rollout(inputs)
        self._has_warned_of_bias = True
        is_ours = not (self.use_vllm or self.rollout_func or self.args.use_transformers_continuous_batching)
        measured: list[tuple[Tensor, Tensor] | None] = []
        with overridden(self, {"_measured": measured if is_ours else None}):
            output = super().rollout(inputs)
        old, sampler = output.get("old_per_token_logps"), output.get("sampling_per_token_logps")
        if old is not None and sampler is not None:
            gaps = (sampler - old)[_sampled_tokens(output)]
            gaps = gaps[~gaps.isnan()]
            measured = [((-gaps).exp(), gaps)]
        if not self.accelerator.is_main_process:
            return output
        turns = [turn for turn in measured if turn is not None]
        masses, gaps = (torch.cat([torch.empty(0), *(turn[i].cpu() for turn in turns)]) for i in (0, 1))
        size = "The difference has not been measured."
        if len(gaps) and len(turns) == len(measured):
            size = (
                f"In this rollout, the kept tokens had {float(masses.mean()):.3g} of the probability mass, and "
                f"log-probs are {float(gaps.mean()):.3g} nats per token below the sampler's."
            )
        warnings.warn(
            f"sampling leaves tokens out ({', '.join(truncations)}), and log-probs are of the whole vocabulary. "
            f"{size} Ratios to the sampler contain the difference, and updates train another distribution than the "
            "sampled one. Set keep_sampling_mask=True, or sample from the whole vocabulary."
            + beyond_sets(self.args.weightings),
            UserWarning,
            stacklevel=2,
        )
        return output

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> tuple[list[list[int]], Any]:
        """Generate as TRL does, and record the kept tokens."""
        rollout = self._sampling
        if self._measured is not None:
            mass = KeptMass(self.temperature)
            with mass.listening(self.bare(self.model)):
                completion_ids, logprobs = super().generate(prompt_ids, *arguments, **keywords)
            self._measured.append(mass.of(completion_ids))
            return completion_ids, logprobs
        if rollout is None:
            return super().generate(prompt_ids, *arguments, **keywords)
        if self.use_vllm:
            completion_ids, logprobs = super().generate(prompt_ids, *arguments, **keywords)
            engine: Any = self.vllm_generation
            vocabulary = self.bare(self.model).config.get_text_config().vocab_size
            kept = engine.take_kept_tokens(completion_ids).without_large(vocabulary)
        else:
            recording = Recording()
            with recording.listening(self.bare(self.model)):
                completion_ids, logprobs = super().generate(prompt_ids, *arguments, **keywords)
            try:
                kept = recording.of(completion_ids)
            except ValueError as error:
                raise ValueError(
                    f"keep_sampling_mask=True: {error} Leave beam search and assisted decoding out of "
                    "generation_kwargs and of the model's generation_config."
                ) from None
        if not kept.has(torch.tensor(list(itertools.chain(*completion_ids)))).all():
            raise ValueError(
                "keep_sampling_mask=True: a token of the rollout is not in the set that it was sampled from, so sets "
                "and tokens do not match. Set keep_sampling_mask=False, and report this bug."
            )
        number, sequences = sum(len(sets) for sets in rollout.sets), []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            own = [*[-1] * len(prompt), *range(number, number + len(completion))]
            sequences.append(Traced([*prompt, *completion], torch.tensor(own, dtype=torch.int32)))
            number += len(completion)
        rollout.turns.append(sequences)
        rollout.sets.append(kept)
        return completion_ids, logprobs

    def _aligned(self, rollout: _Rollout, input_ids: Tensor, attention_mask: Tensor, width: int) -> KeptTokens:
        """Return the sets of the tokens of (B, width) completions, from what generation recorded."""
        if rollout.kept is None:
            if not rollout.turns:
                raise ValueError(
                    f"keep_sampling_mask=True: {type(self).__name__} made a rollout without calling `generate`, which "
                    "records kept tokens. Override `generate` instead, or set keep_sampling_mask=False."
                )
            try:
                numbers = aligned(stitched(rollout.turns), input_ids, attention_mask)
            except ValueError as error:
                raise ValueError(f"keep_sampling_mask=True: {error} Set keep_sampling_mask=False.") from error
            sets = KeptTokens.joined(rollout.sets).to(input_ids.device)
            rollout.kept = sets.take(numbers[:, -width:].flatten())
        return rollout.kept

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Compute TRL's loss among the kept tokens of the micro-batch."""
        with overridden(self, {"_kept": inputs.get("kept_tokens")}):
            return super().compute_loss(model, inputs, *arguments, **keywords)

    def log_probs(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        stand_in: Callable[..., Any] | None = None,
        **of_samples: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute TRL's log-probs of policy and reference among the kept tokens of the rollout or micro-batch."""
        rollout, kept = self._sampling, None
        is_ours = self.args.keep_sampling_mask and (
            model is self.ref_model or self.bare(model) is self.bare(self.model)  # not a teacher of a subclass
        )
        if is_ours and rollout is not None:
            kept = self._aligned(rollout, input_ids, attention_mask, logits_to_keep)
        elif is_ours and self._kept is not None:
            kept = KeptTokens.joined([KeptTokens(*own) for own in self._kept])
            if len(kept) != len(input_ids) * logits_to_keep:
                raise ValueError(
                    f"a micro-batch of {len(input_ids)} completions of {logits_to_keep} tokens has kept tokens of "
                    f"{len(kept)} positions. Cut its kept_tokens like its completion_ids."
                )
        kept_model = None
        if kept is not None:
            index = torch.full_like(input_ids, -1)
            numbers = torch.arange(len(input_ids) * logits_to_keep, device=index.device)
            index[:, -logits_to_keep:] = numbers.view(-1, logits_to_keep)
            stand_in = kept_model = KeptModel(
                stand_in or (lambda *, places, **batch: model(**batch)),
                kept,
                index,
                scored_by,
                with_entropy=compute_entropy,
            )
        scores = super().log_probs(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size,
            compute_entropy,
            compute_aux_loss,
            stand_in,
            **of_samples,
        )
        if kept_model and rollout is None:
            self.record_pooled(sums={"sampling_mask/kept_mass": kept_model.kept_mass})
        return scores


def _sampled_tokens(output: dict[str, Any]) -> Tensor:
    """Return (B, T) bool, True for the completion tokens of a rollout that the model sampled."""
    mask = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask
