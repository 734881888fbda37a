"""Passes without padding, and micro-batches that are measured in tokens, as a part."""

import contextlib
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from trl_steady.host import Steady, models
from trl_steady.host.loss import backward_of, divided_by
from trl_steady.host.names import rollout_number
from trl_steady.host.part import Part, Rollout, ScoringPass, Trainer
from trl_steady.padding.attention import attending_in, own_implementation, switched
from trl_steady.padding.budget import Length, partition
from trl_steady.padding.families import Traits, traits
from trl_steady.padding.packing import Segment, lengths_of, without_waiting
from trl_steady.padding.proxy import UnpaddedModel

# Adapters that do the same to a token wherever it is in a row
_PER_TOKEN = {"ADALORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "OFT", "RANDLORA"}
_PER_TOKEN |= {"VBLORA", "VERA"}


@dataclass
class _Plan:
    """How the sequences of a pass go through a model."""

    mask: Tensor  # of the padded batch
    key: tuple[Any, ...]  # on what the plan depends beside the batch
    lengths: Sequence[Length]  # as they are in the batch
    order: Sequence[int]  # in which the rows come
    batches: Sequence[Tensor] = ()  # rows that go through the model together; none for TRL's own batches


class PaddingPart(Part):
    """Computes no padding in the passes of policy and reference, and regroups micro-batches with `token_budget`.

    The loss is always that of the whole step. With a budget, TRL's metrics become means over the new micro-batches.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._traits: weakref.WeakKeyDictionary[torch.nn.Module, Traits] = weakref.WeakKeyDictionary()
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._plan: _Plan | None = None

    # construction

    def built(self) -> None:
        """Refuse models and settings with which sequences cannot be packed or regrouped."""
        args = self.trainer.args
        if not args.trim_padding:
            return
        model_traits = self.traits_of(self.trainer.model)
        why_not = self.why_padded or model_traits.why_not_packed
        if args.share_prompts and self.trainer.aux_loss_enabled:
            why_not = "router_aux_loss_coef is not 0.0, and TRL's load-balancing loss counts a prompt with each answer"
        reasons = {
            "share_prompts=True": args.share_prompts and why_not,
            f"token_budget={args.token_budget}": args.token_budget is not None and self._why_not_regrouped(),
        }
        for option, reason in reasons.items():
            if reason:
                raise ValueError(f"{option} does not work here: {reason}. Change that, or leave the option unset.")
        if why_not:
            does_nothing = self.why_padded or model_traits.width_limit == 0
            what = "does nothing" if does_nothing else "only cuts columns that are padding in every row"
            warnings.warn(
                f"trim_padding=True {what}: {why_not}. Change that, or set trim_padding=False to keep the padding.",
                stacklevel=2,
            )

    def _why_not_regrouped(self) -> str | None:
        trainer = self.trainer
        config = models.bare(trainer, trainer.model).config
        if self.why_padded:
            return self.why_padded
        if config.get_text_config() is not config:
            return "the model takes other inputs than text"
        if trainer.aux_loss_enabled:
            return "router_aux_loss_coef is not 0.0, and the load-balancing loss is a mean over TRL's micro-batches"
        if trainer.is_deepspeed_enabled or trainer.args.steps_in_backward:
            return (
                "it runs backward several times in a step, and DeepSpeed, lomo, adalomo and *_layerwise step each time"
            )
        if type(trainer).compute_loss is not Steady.compute_loss:
            return (
                f"{type(trainer).__name__}.compute_loss would see only the last micro-batch of an optimizer step; "
                "override micro_batch_loss instead"
            )
        return None

    @property
    def why_padded(self) -> str | None:
        """Reason why no pass can leave out padding, for any model; None if passes can."""
        args, model = self.trainer.args, self.trainer.model
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

    def traits_of(self, model: torch.nn.Module) -> Traits:
        """Return the traits of the transformers model in `model`: which padding it can do without."""
        bare = models.bare(self.trainer, model)
        if bare not in self._traits or self._traits[bare].implementation != own_implementation(bare):
            self._traits[bare] = traits(bare)
        return self._traits[bare]

    # scoring

    @contextlib.contextmanager
    def scoring(self, scoring: ScoringPass, model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Leave out the padding of a pass."""
        if not self._acts:
            yield model
            return
        plan = self._plan_of(scoring)
        yield UnpaddedModel(
            model,
            self.traits_of(scoring.model),
            prompt_width=scoring.prompt_width,
            share_prompts=self.trainer.args.share_prompts,
            lengths=None if plan is None else iter([plan.lengths[row] for row in plan.order]),
            attending=functools.partial(_attending, scoring, models.bare(self.trainer, scoring.model)),
        )

    def batches(self, scoring: ScoringPass) -> Sequence[Tensor]:
        """Return batches of `token_budget`, or of sequences of similar length, if no gradient is needed."""
        plan = self._plan_of(scoring) if self._acts else None
        return () if plan is None else plan.batches

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> Iterator[None]:
        """Forget the plan of the rollout before."""
        self._plan = None
        yield

    def columns(self, rollout: Rollout) -> dict[str, Any]:
        """Add the lengths of the sequences, so that no micro-batch waits for its device to know them."""
        if not self._acts:
            return {}
        if self._plan is not None:
            lengths = self._plan.lengths
        else:
            lengths = self._read(rollout.input_ids, rollout.attention_mask, rollout.samples["prompt_ids"].size(1))
        return {} if lengths is None else {"lengths": list(map(tuple, lengths))}  # which a checkpoint can hold

    @property
    def _acts(self) -> bool:
        return self.trainer.args.trim_padding and not self.why_padded

    def _plan_of(self, scoring: ScoringPass) -> _Plan | None:
        """Return the plan of a pass, which those of a rollout share; None if there is padding between tokens."""
        model_traits, mask = self.traits_of(scoring.model), scoring.attention_mask
        is_alone = torch.is_grad_enabled() or scoring.with_aux_loss or not scoring.is_text
        key = model_traits, is_alone, scoring.batch_size
        if self._plan is not None and self._plan.key == key:
            # a critic's mask is built again from the samples; with another width it has more tokens than the rollout
            is_of_critic = scoring.role == "value" and scoring.rollout is not None
            if self._plan.mask is mask or (is_of_critic and self._plan.mask.shape == mask.shape):
                return self._plan
        known = scoring.samples.get("lengths") if scoring.role in ("policy", "value") else None
        if known is not None and len(known) == len(mask):
            lengths = [Length(*numbers) for numbers in known]
        else:
            lengths = self._read(scoring.input_ids, mask, scoring.prompt_width)
        if lengths is None:
            return None
        plan = _Plan(mask, key, lengths, range(len(lengths)))
        if not is_alone and (self.trainer.args.token_budget is not None or model_traits.why_not_packed is not None):
            size = scoring.batch_size or len(lengths)
            plan.order, counts = self._batches(model_traits, lengths, mask.size(1), scoring.prompt_width, size)
            plan.batches = without_waiting(torch.tensor(plan.order), mask.device).split(counts)
        if scoring.rollout is not None and scoring.role != "other":
            columns = scoring.rollout.samples.get("completion_ids", mask)  # while TRL makes the rollout there are none
            if scoring.role != "value" or columns.size(1) == scoring.width:
                self._plan = plan
        return plan

    def _read(self, input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> list[Length] | None:
        shared = input_ids if self.trainer.args.share_prompts else None
        return lengths_of(attention_mask, prompt_width=prompt_width, input_ids=shared)

    def _batches(
        self, model_traits: Traits, lengths: Sequence[Length], width: int, prompt_width: int, batch_size: int
    ) -> tuple[list[int], list[int]]:
        """Return the order in which sequences go through a model, and how many go at a time.

        The numbers are the same on all processes. The longest sequences come first, so memory runs out early or not at
        all. With `share_prompts`, the sequences of a prompt stay together with their longest.
        """
        # the columns of padding that are not cut off count too
        is_whole, is_packed = width > model_traits.width_limit, model_traits.why_not_packed is None
        if is_whole or not (is_packed or model_traits.is_shift_invariant):
            lengths = [length._replace(prompt=prompt_width) for length in lengths]
        if is_whole:
            lengths = [length._replace(completion=width - prompt_width) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row].prompt - lengths[row].completion)
        groups = [length.group if length.group >= 0 else -1 - row for row, length in enumerate(lengths)]
        first: dict[int, int] = {}  # group -> position of its longest sequence
        for position, row in enumerate(order):
            first.setdefault(groups[row], position)
        order.sort(key=lambda row: first[groups[row]])
        budget = self.trainer.args.token_budget
        if budget is None:
            return order, [min(batch_size, len(order) - start) for start in range(0, len(order), batch_size)]
        accelerator, everywhere = self.trainer.accelerator, [[lengths[row] for row in order]]
        if accelerator.num_processes > 1:
            table = without_waiting(torch.tensor(everywhere), accelerator.device)
            gathered = cast(Tensor, accelerator.gather(table)).tolist()
            everywhere = [[Length(*numbers) for numbers in each] for each in gathered]
        return order, partition(everywhere, budget, padded=is_whole or not is_packed)

    # loss

    def stepping(self) -> None:
        """Forget micro-batches of an optimizer step that raised."""
        self._waiting.clear()

    def computing(
        self, model: torch.nn.Module, compute: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any]
    ) -> Tensor:
        """Compute TRL's loss. With a budget, collect the micro-batches of an optimizer step and regroup them.

        Earlier calls return 0, and the last call of the step runs all micro-batches.
        """
        trainer = self.trainer
        if trainer.args.token_budget is None or not trainer.model.training:
            return compute(inputs)
        self._waiting.append((rollout_number(trainer), inputs))
        if not trainer.accelerator.sync_gradients:
            return torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
        waiting, self._waiting = self._waiting, []
        *others, (last, share_of_last) = self._regrouped(model, waiting)
        total = torch.zeros((), device=trainer.accelerator.device)
        for group, share in others:
            total += backward_of(trainer, model, functools.partial(compute, group), share)
        with divided_by(trainer, share_of_last) as scaled:
            return total + scaled(compute(last))

    def _regrouped(
        self, model: torch.nn.Module, waiting: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the micro-batches of the budget, each with its size as a share of TRL's micro-batch.

        The share is 1 if the loss is a sum over tokens, which no grouping changes.
        """
        for _, rollout in itertools.groupby(waiting, key=lambda waits: waits[0]):  # each rollout has its own width
            parts = [inputs for _, inputs in rollout]
            whole = {name: _together([part[name] for part in parts]) for name in parts[0]}
            prompt_width = whole["prompt_ids"].size(1)
            width = prompt_width + whole["completion_ids"].size(1)
            lengths = [Length(*numbers) for numbers in whole["lengths"]]
            order, counts = self._batches(self.traits_of(model), lengths, width, prompt_width, len(lengths))
            indices = without_waiting(torch.tensor(order), whole["prompt_ids"].device)
            ordered, size = iter(order), len(parts[0]["completion_ids"])
            for taken in indices.split(counts):
                rows = [*itertools.islice(ordered, len(taken))]
                group = {name: _taken(values, rows, taken) for name, values in whole.items()}
                yield group, 1.0 if self.trainer.loss_is_token_sum else len(rows) / size


@contextlib.contextmanager
def _attending(scoring: ScoringPass, bare: PreTrainedModel, segments: Sequence[Segment]) -> Iterator[None]:
    with scoring.lasting(switched(bare)), attending_in(segments):
        yield


def _together(values: Sequence[Any]) -> Any:
    """Join one input of the micro-batches of a rollout. An input that has no rows is the same in all."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    return list(itertools.chain(*values)) if isinstance(first, list) else first


def _taken(values: Any, rows: Sequence[int], indices: Tensor) -> Any:
    if isinstance(values, Tensor) and values.dim():
        return values[indices]
    return [values[row] for row in rows] if isinstance(values, list) else values
