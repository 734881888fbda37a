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
from accelerate.utils import DistributedType
from peft import PeftModel, PeftType
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from trl_steady.host import Steady, models
from trl_steady.host.names import rollout_number
from trl_steady.host.part import Part, Rollout, ScoringPass
from trl_steady.host.regrouping import backward_of, divided_by
from trl_steady.padding.attention import attending_in, own_implementation, switched
from trl_steady.padding.budget import Length, partition
from trl_steady.padding.families import Traits, traits
from trl_steady.padding.packing import Segment, lengths_of, without_waiting
from trl_steady.padding.proxy import UnpaddedModel

__all__ = ["PaddingPart"]

# Adapters that do the same to a token wherever it is in a row
_PER_TOKEN = {
    PeftType.ADALORA,
    PeftType.BOFT,
    PeftType.FOURIERFT,
    PeftType.HRA,
    PeftType.IA3,
    PeftType.LN_TUNING,
    PeftType.LOHA,
    PeftType.LOKR,
    PeftType.LORA,
    PeftType.OFT,
    PeftType.RANDLORA,
    PeftType.VBLORA,
    PeftType.VERA,
}


@dataclass
class _Plan:
    """How the sequences of a pass go through a model."""

    mask: Tensor
    """The padded batch's."""
    key: tuple[Any, ...]
    """On what the plan depends beside the batch."""
    lengths: Sequence[Length]
    """As they are in the batch."""
    order: Sequence[int] | None = None
    """Rows in their order; None for that of the batch."""
    batches: Sequence[Tensor] = ()
    """Rows that go through the model together; none for TRL's own batches."""

    @property
    def in_order(self) -> Sequence[Length]:
        """Lengths in the order in which the sequences come."""
        return self.lengths if self.order is None else [self.lengths[row] for row in self.order]


class PaddingPart(Part):
    """Computes no padding in the passes of policy and reference, and regroups micro-batches with `token_budget`.

    Without a budget, TRL still chooses the sequences of each micro-batch. The loss is always that of the whole step.
    With a budget, TRL's metrics become means over the new micro-batches.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._traits: weakref.WeakKeyDictionary[torch.nn.Module, Traits] = weakref.WeakKeyDictionary()
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._plan: _Plan | None = None

    # construction

    def built(self) -> None:
        """Refuse models and settings with which sequences cannot be packed or regrouped."""
        trainer, args = self.trainer, self.trainer.args
        if args.trim_padding:
            its = self.traits_of(trainer.model)
            why_not = self.why_padded or its.why_not_packed
            if args.share_prompts and why_not:
                raise ValueError(f"share_prompts=True needs packed sequences, and {why_not}. Set share_prompts=False.")
            if args.share_prompts and trainer.aux_loss_enabled:
                raise ValueError(
                    "share_prompts=True would count a prompt once in the load-balancing loss, but TRL counts it for "
                    "each completion. Set router_aux_loss_coef=0.0, or share_prompts=False."
                )
            if why_not:
                does_nothing = self.why_padded or its.width_limit == 0
                what = "does nothing" if does_nothing else "only cuts columns that are padding in every row"
                way_out = "Change that, or set trim_padding=False to keep the padding."
                warnings.warn(f"trim_padding=True {what}: {why_not}. {way_out}", UserWarning, stacklevel=2)
        if args.token_budget is not None:
            self._refuse_budget(f"token_budget={args.token_budget}")
            trainer.add_callback(_AtStepBegin(self._waiting.clear))  # left over from a step that raised

    def _refuse_budget(self, budget: str) -> None:
        trainer = self.trainer
        if self.why_padded:
            raise ValueError(
                f"{budget} needs passes without padding, and {self.why_padded}. Leave token_budget unset."
            )
        config = models.bare(trainer, trainer.model).config
        if config.get_text_config() is not config:
            raise ValueError(
                f"{budget} can only regroup text, and the model takes other inputs too. Leave token_budget unset."
            )
        if trainer.aux_loss_enabled:
            raise ValueError(
                f"{budget} does not work with a load-balancing loss, which is a mean over the tokens of each of TRL's "
                "micro-batches. Set router_aux_loss_coef=0.0, or leave token_budget unset."
            )
        is_deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_deepspeed or trainer.args.steps_in_backward:
            raise ValueError(
                f"{budget} runs backward more than once in the last micro-batch of an optimizer step. DeepSpeed and "
                "the optimizers lomo, adalomo and *_layerwise would step each time. Train with DDP and another "
                "optimizer, or leave token_budget unset."
            )
        if type(trainer).compute_loss is not Steady.compute_loss:
            raise ValueError(
                f"{budget} runs backward inside compute_loss, so {type(trainer).__name__}.compute_loss would see only "
                "the last micro-batch. Override micro_batch_loss instead, or leave token_budget unset."
            )

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
            config: Any = model.active_peft_config
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
            lengths=None if plan is None else plan.in_order,
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
        its, mask = self.traits_of(scoring.model), scoring.attention_mask
        is_alone = torch.is_grad_enabled() or scoring.with_aux_loss or not scoring.is_text
        key = its, is_alone, scoring.batch_size
        if self._plan is not None and self._plan.key == key:
            # a critic's mask is built again from the samples; with another width it has more tokens than the rollout
            is_of_critic = scoring.role == "value" and scoring.rollout is not None
            if self._plan.mask is mask or (is_of_critic and self._plan.mask.shape == mask.shape):
                return self._plan
        known = scoring.samples.get("lengths") if scoring.role in ("policy", "value") else None
        if known is not None and len(known) == len(mask):
            lengths = [Length(*own) for own in known]
        else:
            lengths = self._read(scoring.input_ids, mask, scoring.prompt_width)
        if lengths is None:
            return None
        plan = _Plan(mask, key, lengths)
        if not is_alone and (self.trainer.args.token_budget is not None or its.why_not_packed is not None):
            size = scoring.batch_size or len(lengths)
            plan.order, counts = self._batches(its, lengths, mask.size(1), scoring.prompt_width, size)
            plan.batches = without_waiting(torch.tensor(plan.order), mask.device).split(counts)
        if scoring.rollout is not None and scoring.role != "other":
            columns = scoring.rollout.samples.get("completion_ids", mask)  # while TRL makes the rollout there are none
            if scoring.role != "value" or columns.size(1) == scoring.width:
                self._plan = plan
        return plan

    def _read(self, input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> list[Length] | None:
        args = self.trainer.args
        shared = input_ids if args.share_prompts else None
        lengths = lengths_of(attention_mask, prompt_width=prompt_width, input_ids=shared)
        if lengths is None and args.token_budget is not None:
            raise ValueError(
                f"token_budget={args.token_budget} needs sequences without padding between their tokens. Leave "
                "token_budget unset."
            )
        return lengths

    def _batches(
        self, its: Traits, lengths: Sequence[Length], width: int, prompt_width: int, batch_size: int
    ) -> tuple[list[int], list[int]]:
        """Return the order in which sequences go through a model, and how many go at a time.

        The numbers are the same on all processes. The longest sequences come first, so memory runs out early or not at
        all. With `share_prompts`, the sequences of a prompt stay together with their longest.
        """
        is_whole = width > its.width_limit
        if is_whole or (its.why_not_packed and not its.is_shift_invariant):  # their padding is not cut off
            lengths = [length._replace(prompt=prompt_width) for length in lengths]
        if is_whole:
            lengths = [length._replace(completion=width - prompt_width) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row].prompt - lengths[row].completion)
        groups = [row.group if row.group >= 0 else -1 - number for number, row in enumerate(lengths)]
        first: dict[int, int] = {}
        for place, row in enumerate(order):
            first.setdefault(groups[row], place)
        order.sort(key=lambda row: first[groups[row]])
        budget = self.trainer.args.token_budget
        if budget is None:
            return order, [min(batch_size, len(order) - start) for start in range(0, len(order), batch_size)]
        accelerator, everywhere = self.trainer.accelerator, [[lengths[row] for row in order]]
        if accelerator.num_processes > 1:
            own = without_waiting(torch.tensor(everywhere), accelerator.device)
            gathered = cast(Tensor, accelerator.gather(own)).tolist()
            everywhere = [[Length(*length) for length in each] for each in gathered]
        return order, partition(everywhere, budget, padded=is_whole or its.why_not_packed is not None)

    # loss

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
        waiting, self._waiting[:] = [*self._waiting], []
        is_sum = trainer.loss_is_token_sum
        *others, last = self._regrouped(model, waiting)
        total = torch.zeros((), device=trainer.accelerator.device)
        for group, share in others:
            total += backward_of(trainer, model, functools.partial(compute, group), 1.0 if is_sum else share)
        group, share = last
        with divided_by(trainer, 1.0 if is_sum else share) as scaled:
            return total + scaled(compute(group))

    def _regrouped(
        self, model: torch.nn.Module, waiting: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the micro-batches of the budget, each with its size as a share of TRL's micro-batch."""
        for _, rollout in itertools.groupby(waiting, key=lambda waits: waits[0]):  # each rollout has its own width
            parts = [inputs for _, inputs in rollout]
            whole = {name: _together([part[name] for part in parts]) for name in parts[0]}
            ids = torch.cat([whole["prompt_ids"], whole["completion_ids"]], dim=1)
            prompt_width = whole["prompt_ids"].size(1)
            if "lengths" in whole:
                lengths = [Length(*own) for own in whole["lengths"]]
            else:  # of a checkpoint that has none
                mask = torch.cat([whole["prompt_mask"], whole["completion_mask"]], dim=1)
                lengths = self._read(ids, mask, prompt_width)
            assert lengths is not None  # with a budget
            its = self.traits_of(model)
            order, counts = self._batches(its, lengths, ids.size(1), prompt_width, len(lengths))
            start = 0
            for count in counts:
                rows = order[start : start + count]
                start += count
                indices = without_waiting(torch.tensor(rows), ids.device)
                group = {name: _taken(values, rows, indices) for name, values in whole.items()}
                yield group, count / len(parts[0]["completion_ids"])


class _AtStepBegin(TrainerCallback):
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run()


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
