"""`trl.GRPOTrainer` with passes that leave out padding."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import DynamoBackend
from peft import PeftModel, PeftType
from torch import Tensor
from transformers import PreTrainedModel

from trl_steady.config import GRPOConfig
from trl_steady.host import HostTrainer, overridden
from trl_steady.padding.attention import attending_in, own_implementation, switched
from trl_steady.padding.budget import Length, partition
from trl_steady.padding.families import Traits, traits
from trl_steady.padding.model import PlacedModel, UnpaddedModel
from trl_steady.padding.packing import Segment

__all__ = ["UnpaddedTrainer"]

_T = TypeVar("_T")

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


class UnpaddedTrainer(HostTrainer):
    """Trainer that computes no padding in the passes of policy and reference.

    TRL still chooses the sequences of each micro-batch, and its losses and metrics are still means over micro-batches.
    """

    args: GRPOConfig
    _until_backward: contextlib.ExitStack | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._traits: weakref.WeakKeyDictionary[torch.nn.Module, Traits] = weakref.WeakKeyDictionary()
        super().__init__(*arguments, **keywords)
        if not self.args.trim_padding:
            return
        its = self.traits_of(self.model)
        why_not = self.why_padded or its.why_not_packed
        if self.args.share_prompts and why_not:
            raise ValueError(f"share_prompts=True needs packed sequences, and {why_not}. Set share_prompts=False.")
        if self.args.share_prompts and self.aux_loss_enabled:
            raise ValueError(
                "share_prompts=True would count a prompt once in the load-balancing loss, but TRL counts it for "
                "each completion. Set router_aux_loss_coef=0.0, or share_prompts=False."
            )
        if why_not:
            does_nothing = self.why_padded or its.width_limit == 0
            what = "does nothing" if does_nothing else "only cuts columns that are padding in every row"
            way_out = "Change that, or set trim_padding=False to keep the padding."
            warnings.warn(f"trim_padding=True {what}: {why_not}. {way_out}", UserWarning, stacklevel=2)

    @property
    def compiles(self) -> bool:
        """True if the model goes through torch.compile."""
        dynamo = self.accelerator.state.dynamo_plugin
        return self.args.torch_compile or (dynamo is not None and dynamo.backend != DynamoBackend.NO)

    @property
    def why_padded(self) -> str | None:
        """Reason why no pass can leave out padding, for any model; None if passes can."""
        if self.compiles:
            return "torch.compile recompiles for each shape of a batch"
        if self.args.neftune_noise_alpha is not None:
            return "neftune_noise_alpha scales its noise by the width of a batch"
        if self.args.n_gpu > 1:
            return "one process drives several GPUs and divides the rows of a batch among them"
        if isinstance(self.model, PeftModel):
            config: Any = self.model.active_peft_config
            if config.peft_type not in _PER_TOKEN or getattr(config, "alora_invocation_tokens", None):
                return f"an adapter of type {type(config).__name__} may depend on the position of a token in its row"
        return None

    def traits_of(self, model: torch.nn.Module) -> Traits:
        """Return the traits of the transformers model in `model`: which padding it can do without."""
        bare = self.bare(model)
        if bare not in self._traits or self._traits[bare].implementation != own_implementation(bare):
            self._traits[bare] = traits(bare)
        return self._traits[bare]

    def bare(self, model: torch.nn.Module) -> PreTrainedModel:
        """Return the transformers model in `model`, without wrappers."""
        inner = self.accelerator.unwrap_model(model)
        return cast(PreTrainedModel, inner.get_base_model() if isinstance(inner, PeftModel) else inner)

    @property
    def reads_more_than_text(self) -> bool:
        """True if batches may come with images or other inputs than text."""
        config = self.bare(self.model).config
        return config.get_text_config() is not config

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
        """Compute TRL's log-probs without the padding, and in batches of `token_budget` if no gradient is needed.

        `stand_in`, if given, is called instead of `model`. It also gets `places`, the index of each token in the
        flattened `input_ids`.
        """
        whole = functools.partial(
            super().log_probs,
            logits_to_keep=logits_to_keep,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **of_samples,
        )
        places = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)

        def scored(called: Any, rows: Any = slice(None), **size: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
            placed = None if stand_in is None else PlacedModel(called, places[rows])
            scores = whole(placed or called, input_ids[rows], attention_mask[rows], **size)
            if placed is not None:
                placed.check()
            return scores

        if not self.args.trim_padding or self.why_padded:
            return scored(stand_in or model, batch_size=batch_size)
        prompt_width = input_ids.size(1) - logits_to_keep
        unpadded = UnpaddedModel(
            stand_in or model,
            self.traits_of(model),
            prompt_width=prompt_width,
            share_prompts=self.args.share_prompts,
            attending=functools.partial(self._attending, self.bare(model)),
        )
        is_text = all(value is None for value in of_samples.values())
        has_padding_left = self.traits_of(model).why_not_packed is not None
        regroups = is_text and (self.args.token_budget is not None or has_padding_left)
        if torch.is_grad_enabled() or compute_aux_loss or not regroups:
            return scored(unpadded, batch_size=batch_size)
        order, counts = self.batches(model, input_ids, attention_mask, prompt_width, batch_size)
        logps, entropies, _ = zip(*(scored(unpadded, rows) for rows in order.split(counts)), strict=True)
        back = order.argsort()
        return torch.cat(logps)[back], torch.cat(entropies)[back] if compute_entropy else None, None

    def batches(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        prompt_width: int,
        batch_size: int | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Return the order (B,) in which sequences go through `model`, and how many go at a time.

        The numbers are the same on all processes. The longest sequences come first, so memory runs out early or not at
        all. With `share_prompts`, the sequences of a prompt stay together with their longest.
        """
        mask, its = attention_mask.bool(), self.traits_of(model)
        prompts, completions = mask[:, :prompt_width].sum(-1), mask[:, prompt_width:].sum(-1)
        is_whole = input_ids.size(1) > its.width_limit
        if is_whole or (its.why_not_packed and not its.is_shift_invariant):
            prompts = torch.full_like(prompts, prompt_width)  # their padding is not cut off
        if is_whole:
            completions = torch.full_like(completions, input_ids.size(1) - prompt_width)
        order = (prompts + completions).argsort(descending=True, stable=True)
        groups = torch.full_like(prompts, -1)
        if self.args.share_prompts:
            shared = input_ids.where(mask, -1)[:, : prompt_width - 1]
            _, groups = shared.unique(dim=0, return_inverse=True)
            ranks: dict[int, int] = {}
            for group in groups[order].tolist():
                ranks.setdefault(group, len(ranks))
            order = order[torch.tensor([ranks[group] for group in groups[order].tolist()]).argsort(stable=True)]
        if self.args.token_budget is None:
            size = batch_size or len(order)
            return order, [min(size, len(order) - start) for start in range(0, len(order), size)]
        lengths = torch.stack([prompts, completions, groups], dim=-1)[order].unsqueeze(0)
        everywhere = cast(Tensor, self.accelerator.gather(lengths)).tolist()
        processes = [[Length(*length) for length in own] for own in everywhere]
        return order, partition(processes, self.args.token_budget, padded=is_whole or its.why_not_packed is not None)

    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Run TRL's training step, and keep the contexts of its forward active until backward ends.

        Layers that gradient checkpointing recomputes then behave as in the forward.
        """
        with self.until_backward_ends():
            return super().training_step(*arguments, **keywords)

    @contextlib.contextmanager
    def until_backward_ends(self) -> Iterator[None]:
        """Keep the contexts of forwards active until this context ends. Backward must end inside it."""
        with contextlib.ExitStack() as stack, overridden(self, {"_until_backward": stack}):
            yield

    def lasting(self, context: contextlib.AbstractContextManager[_T]) -> contextlib.AbstractContextManager[_T]:
        """Return the context for a forward. In training, it stays active until backward has ended."""
        if self._until_backward is None or not torch.is_grad_enabled():
            return context
        return contextlib.nullcontext(self._until_backward.enter_context(context))

    @contextlib.contextmanager
    def _attending(self, bare: PreTrainedModel, segments: Sequence[Segment]) -> Iterator[None]:
        with self.lasting(switched(bare)), attending_in(segments):
            yield
