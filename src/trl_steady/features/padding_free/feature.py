"""Passes without padding, and micro-batches that are measured in tokens."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.devices import copy_async
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.sequences import has_rows, select_sequences
from trl_steady.core.types import ForwardPass, LogProbs, LossPass, Rollout
from trl_steady.features.padding_free.attention import PackedAttention, own_implementation
from trl_steady.features.padding_free.model import PaddingFreeModel
from trl_steady.features.padding_free.packing import (
    Length,
    Segment,
    fits,
    group_numbers,
    partition,
    sequence_lengths,
)
from trl_steady.features.padding_free.support import Support, find_support
from trl_steady.features.skip_zero_weight import skips_before_regrouping, with_gradient
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.loss import run_backward, scaled_to_share
from trl_steady.trl_bridge.overrides import overrides
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin
from trl_steady.trl_bridge.trl_state import rollout_number

_LENGTHS = "lengths"
# Adapters that do the same to a token wherever it is in a row
_PER_TOKEN = {"ADALORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "VERA"}
_OTHER_MASK = "the mask of a micro-batch is not that of its rollout. Remove 'lengths' if you change masks."


class _MicroBatch(NamedTuple):
    """One of TRL's micro-batches, which waits for the last of its optimizer step."""

    rollout: int
    inputs: Mapping[str, Any]
    passed_on: Mapping[str, Any] | None
    """The inputs that a script's `_compute_loss` passed on to `super()`; None without such a method."""


class _Group(NamedTuple):
    """A micro-batch of the budget."""

    inputs: dict[str, Any]
    share: float
    """Its size as a share of TRL's micro-batch; 1 if the loss is a sum over tokens, which no grouping changes."""
    passed_on: dict[str, Any] | None
    """The same sequences as a script passed them on."""


class PaddingFree(Feature):
    """Computes no padding in the passes of policy and reference, and regroups micro-batches with `token_budget`.

    The loss is always that of the whole step. With a budget, TRL's metrics become means over the new micro-batches.
    """

    args: SharedOptions
    _has_warned = False

    def __init__(self, trainer: Trainer, args: Any) -> None:
        super().__init__(trainer, args)
        self._models = weakref.WeakKeyDictionary[torch.nn.Module, tuple[Support, PackedAttention]]()
        self._waiting: list[_MicroBatch] = []

    # construction

    def on_init_end(self) -> None:
        """Refuse models and settings with which sequences cannot be packed or regrouped."""
        args = self.args
        if not args.trim_padding:
            return
        support = self.support(self.trainer.model)
        why_not = self.why_padded or support.why_not_packed
        if args.share_prompts and self.trainer.aux_loss_enabled:
            why_not = "router_aux_loss_coef is not 0.0, and TRL's load-balancing loss counts a prompt with each answer"
        if args.share_prompts:
            self.refuse_if(why_not, f"share_prompts={args.share_prompts}")
        if args.token_budget:
            self.refuse_if(self.why_padded or self._why_not_regrouped(), f"token_budget={args.token_budget}")
        if why_not:
            effect = "only cuts columns that are padding in every row"
            if self.why_padded or support.width_limit == 0:
                effect = "has no effect"
            self.warn(f"trim_padding=True {effect} because {why_not}. Set trim_padding=False to keep the padding.")

    def _why_not_regrouped(self) -> str | None:
        trainer = self.trainer
        config = models.bare(trainer, trainer.model).config
        if config.get_text_config() is not config:
            return "the model takes other inputs than text"
        if trainer.aux_loss_enabled:
            return "router_aux_loss_coef is not 0.0, and the load-balancing loss is a mean over TRL's micro-batches"
        if trainer.is_deepspeed_enabled or self.args.steps_in_backward:
            return "it runs backward several times in a step; DeepSpeed, lomo, adalomo, *_layerwise step each time"
        if type(trainer).compute_loss is not FeatureTrainerMixin.compute_loss:
            return f"{type(trainer).__name__}.compute_loss would see only the last group; override _compute_loss"
        for method in overrides(trainer, "policy loss", without_super=True):
            return f"{method} does not call super(), so no sequence would be regrouped"
        return None

    @property
    def why_padded(self) -> str | None:
        """Reason why no pass can leave out padding, for any model; None if passes can."""
        args, model = self.args, self.trainer.model
        if models.compiles(self.trainer):
            return "torch.compile recompiles for each shape of a batch"
        if args.neftune_noise_alpha is not None:
            return "neftune_noise_alpha scales its noise by the width of a batch"
        if args.n_gpu > 1:
            return "one process drives several GPUs and divides the rows of a batch among them"
        if isinstance(model, PeftModel):
            config = model.active_peft_config
            if config.peft_type not in _PER_TOKEN or getattr(config, "alora_invocation_tokens", None):
                return f"an adapter of type {type(config).__name__} may depend on the position of a token in its row"
        return None

    def support(self, model: torch.nn.Module) -> Support:
        """Return which padding the transformers model in `model` can do without."""
        return self._model(model)[0]

    def _model(self, model: torch.nn.Module) -> tuple[Support, PackedAttention]:
        bare = models.bare(self.trainer, model)
        if bare not in self._models or self._models[bare][0].implementation != own_implementation(bare):
            self._models[bare] = find_support(bare), PackedAttention(bare)
        return self._models[bare]

    # forward passes

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Leave out the padding of a pass, unless there is some between tokens."""
        if not self._is_on:
            return call_next(forward)
        lengths = self._lengths(forward)
        if lengths is None:
            return call_next(forward)
        support, attention = self._model(forward.model)
        budget = self.args.token_budget
        is_alone = torch.is_grad_enabled() or forward.with_aux_loss or not forward.is_text
        if not is_alone and (budget is not None or support.why_not_packed is not None):
            width = forward.input_ids.size(1)
            size = forward.batch_size or len(lengths)
            # batches of `token_budget`, or of sequences of similar length, if no gradient is needed
            batches = self._batches(support, lengths, width, forward.prompt_width, size)
            forward.batches = [copy_async(torch.tensor(rows), forward.input_ids.device) for rows in batches]
            lengths = _take(lengths, itertools.chain.from_iterable(batches))

        @contextlib.contextmanager
        def attend_within(segments: Sequence[Segment]) -> Generator[None]:
            with forward.hold_until_backward(attention.switched()), attention.within(segments):
                yield

        forward.wrap_model(
            lambda model: PaddingFreeModel(
                model, support, prompt_width=forward.prompt_width, lengths=iter(lengths), attend_within=attend_within
            )
        )
        return call_next(forward)

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Add the lengths of the sequences, so that no micro-batch waits for its device to know them."""
        if not self._is_on:
            return
        if _LENGTHS in rollout.records:
            lengths = rollout.records[_LENGTHS][1]
        else:
            lengths = self._measure(rollout.input_ids, rollout.attention_mask, rollout.samples["prompt_ids"].size(1))
        if lengths is not None:
            rollout.samples[_LENGTHS] = list(map(tuple, lengths))  # a checkpoint can hold tuples

    @property
    def _is_on(self) -> bool:
        return self.args.trim_padding and not self.why_padded

    def _lengths(self, forward: ForwardPass) -> list[Length] | None:
        """Return the lengths of the sequences of a pass; None if there is padding between tokens."""
        mask, prompt_width = forward.attention_mask, forward.prompt_width
        known = None
        if forward.role in ("policy", "value", "teacher"):
            known = forward.samples.get(_LENGTHS)
        if known is not None and len(known) == len(mask):
            lengths = list(map(Length._make, known))
            is_fit = fits(lengths, mask, prompt_width=prompt_width)
            if is_fit.device.type in ("cpu", "cuda"):  # on a GPU nobody waits
                torch._assert_async(is_fit, _OTHER_MASK)
            elif not is_fit:
                raise RuntimeError(_OTHER_MASK)
            return lengths
        if forward.rollout is None or forward.role not in ("old", "reference"):
            return self._measure(forward.input_ids, mask, prompt_width)
        records = forward.rollout.records
        if _LENGTHS not in records or records[_LENGTHS][0] is not mask:
            records[_LENGTHS] = mask, self._measure(forward.input_ids, mask, prompt_width)
        return records[_LENGTHS][1]

    def _measure(self, input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> list[Length] | None:
        if not self.args.share_prompts:
            return sequence_lengths(attention_mask, prompt_width=prompt_width)
        return sequence_lengths(attention_mask, prompt_width=prompt_width, input_ids=input_ids)

    def _batches(
        self, support: Support, lengths: Sequence[Length], width: int, prompt_width: int, batch_size: int
    ) -> list[list[int]]:
        """Return the sequences that go through a model together, batch by batch.

        The sizes are the same on all processes. The longest sequences come first, so memory runs out early or not at
        all. With `share_prompts`, the sequences of a prompt stay together with their longest.
        """
        # the columns of padding that are not cut off count too
        is_whole = width > support.width_limit
        is_packed = support.why_not_packed is None
        if is_whole:
            lengths = [Length(prompt_width, width - prompt_width, length.group) for length in lengths]
        elif not is_packed and not support.is_shift_invariant:
            lengths = [length._replace(prompt=prompt_width) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row].prompt - lengths[row].completion)
        groups = group_numbers(lengths)
        first: dict[int, int] = {}  # group -> position of its longest sequence
        for position, row in enumerate(order):
            first.setdefault(groups[row], position)
        order.sort(key=lambda row: first[groups[row]])
        budget = self.args.token_budget
        if budget is None:
            return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        is_padded = is_whole or not is_packed  # on this process: its width decides
        everywhere: list[tuple[bool, list[Length]]] = gather_object([(is_padded, _take(lengths, order))])
        padded = any(is_padded for is_padded, _ in everywhere)
        batches: list[list[int]] = []
        start = 0
        for count in partition([own for _, own in everywhere], budget, padded=padded):
            batches.append(order[start : start + count])
            start += count
        return batches

    # loss

    def on_step_begin(self) -> None:
        """Forget micro-batches of an optimizer step that raised."""
        self._waiting.clear()

    def around_loss(self, loss: LossPass, call_next: Callable[[LossPass], Tensor]) -> Tensor:
        """Compute TRL's loss. With a budget, collect the micro-batches of an optimizer step and regroup them.

        Earlier calls return only what a script adds. The last call of the step runs all micro-batches.
        """
        trainer = self.trainer
        if self.args.token_budget is None or not trainer.model.training:
            return call_next(loss)
        passed_on: Mapping[str, Any] | None = None
        added = torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
        scripts = overrides(trainer, "policy loss")
        if scripts:
            passed_on, added = self._run_script(loss, ", ".join(scripts))
        self._waiting.append(_MicroBatch(rollout_number(trainer), loss.inputs, passed_on))
        if not trainer.accelerator.sync_gradients:
            return added
        waiting = self._waiting
        self._waiting = []
        # all groups at once, because processes exchange lengths; transformers runs the backward pass of the last
        groups = list(self._regrouped(loss.model, waiting))
        last = groups.pop()
        total = torch.zeros((), device=trainer.accelerator.device)
        for group in groups:
            compute = functools.partial(self._group_loss, loss.model, group, call_next, is_last=False)
            total += run_backward(trainer, loss.model, compute, group.share)
        with scaled_to_share(trainer, last.share) as scaled:
            return total + scaled(self._group_loss(loss.model, last, call_next, is_last=True)) + added

    def _run_script(self, loss: LossPass, methods: str) -> tuple[Mapping[str, Any], Tensor]:
        """Run a script's `_compute_loss` on one of TRL's micro-batches.

        Returns:
            The inputs that it passes on to `super()`, and the loss that it adds.
        """
        done = self.trainer.run_script_loss(loss)
        rows = [len(inputs["completion_ids"]) for inputs in done.passed_on]
        why_not: str | None = None
        if rows != [len(loss.inputs["completion_ids"])]:
            why_not = f"{methods} does not pass each sequence of a micro-batch on to super() once"
        elif done.factor != 1.0:
            why_not = f"{methods} multiplies the loss of super() by {done.factor:g}. It may only add to it"
        self.refuse_if(why_not, f"token_budget={self.args.token_budget}")
        return done.passed_on[0], done.total

    def _group_loss(
        self, model: torch.nn.Module, group: _Group, call_next: Callable[[LossPass], Tensor], *, is_last: bool
    ) -> Tensor:
        below_script = contextlib.nullcontext()
        if group.passed_on is not None:
            below_script = self.trainer.below_script_loss(group.passed_on)
        with below_script:
            return call_next(LossPass(model, group.inputs, is_last=is_last))

    def _regrouped(self, model: torch.nn.Module, waiting: Sequence[_MicroBatch]) -> Iterator[_Group]:
        """Yield the micro-batches of the budget."""
        for _, rollout in itertools.groupby(waiting, key=lambda micro_batch: micro_batch.rollout):
            micro_batches = list(rollout)  # of one width
            size = len(micro_batches[0].inputs["completion_ids"])
            joined = _joined([micro_batch.inputs for micro_batch in micro_batches])
            passed_on = [micro_batch.passed_on for micro_batch in micro_batches if micro_batch.passed_on is not None]
            self._warn_of_small_budget(joined, size)
            if skips_before_regrouping(self.trainer):
                joined = with_gradient(self.trainer, joined, least=1)
            prompt_width = joined["prompt_ids"].size(1)
            width = prompt_width + joined["completion_ids"].size(1)
            lengths = list(map(Length._make, joined[_LENGTHS]))
            joined_by_script: dict[str, Any] | None = None
            if passed_on:
                joined_by_script = _joined(passed_on)
            for rows in self._batches(self.support(model), lengths, width, prompt_width, len(lengths)):
                share = len(rows) / size
                if self.trainer.loss_reduction == "rollout_tokens":
                    share = 1.0
                group_by_script: dict[str, Any] | None = None
                if joined_by_script is not None:
                    group_by_script = select_sequences(joined_by_script, rows)
                yield _Group(select_sequences(joined, rows), share, group_by_script)

    def _warn_of_small_budget(self, inputs: Mapping[str, Any], size: int) -> None:
        """Warn once if each sequence of a step is larger than the budget. `size` is that of TRL's micro-batches."""
        budget = self.args.token_budget or 0
        tokens = [prompt + completion for prompt, completion, _ in inputs[_LENGTHS]]
        if self._has_warned or len(tokens) < 2 or min(tokens) <= budget:
            return
        self._has_warned = True
        self.warn(
            f"token_budget={budget} is below the {min(tokens)} tokens of a step's shortest sequence, so each "
            f"is a micro-batch of its own. Set token_budget={size * max(tokens)}, for example."
        )


def _take(lengths: Sequence[Length], rows: Iterable[int]) -> list[Length]:
    return [lengths[row] for row in rows]


def _joined(micro_batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in micro_batches[0]:
        joined[name] = _concatenated([inputs[name] for inputs in micro_batches])
    return joined


def _concatenated(values: Sequence[Any]) -> Any:
    """Join one input of the micro-batches of a rollout. An input that has no rows is the same in all."""
    if not has_rows(values[0]):
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return list(itertools.chain.from_iterable(values))
