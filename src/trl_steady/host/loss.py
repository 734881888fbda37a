"""Loss of TRL's micro-batches: score a micro-batch once, rewrite it, and let TRL compute the loss."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trl_steady.functional import reduction
from trl_steady.host.contract import CONTRACT, FORWARDED
from trl_steady.host.inputs import checked_rollout, refuse_data, refuse_rows, refuse_small
from trl_steady.host.names import overridden
from trl_steady.host.reached import Reached
from trl_steady.host.rewards import RewardedTrainer

__all__ = ["HostTrainer", "MicroBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """One scored training micro-batch of `B` sequences with `T` completion tokens.

    The fields rename TRL's inputs: `old_per_token_logps` -> `old_logps`, `sampling_per_token_logps` ->
    `sampler_logps`, `ref_per_token_logps` -> `ref_logps`, `importance_sampling_ratio` -> `sampler_weights`.
    """

    mask: Tensor
    """(B, T) bool, True = loss token (completion mask and tool mask)."""
    logps: Tensor
    """(B, T) log-probs under the policy, with gradient."""
    entropies: Tensor
    """(B, T), over the full vocabulary."""
    aux_loss: Tensor | None
    """Scalar load-balancing loss of a mixture of experts."""
    advantages: Tensor
    """(B,), (B, 1) or (B, T)."""
    old_logps: Tensor
    """(B, T) log-probs under the policy at rollout; `logps` detached if TRL computed none for on-policy updates."""
    sampler_logps: Tensor | None = None
    """(B, T) log-probs from the inference engine."""
    ref_logps: Tensor | None = None
    """(B, T) log-probs under the reference, if `beta` is not 0."""
    sampler_weights: Tensor | None = None
    """(B, 1) or (B, T) weights, old policy / sampler, of TRL's engine correction."""

    def without_garbage(self) -> "MicroBatch":
        """Return a copy with 0 for all per-token values that are not in the loss, including NaN.

        TRL multiplies by the mask, which would keep a NaN.
        """
        clean = {
            name: value.where(self.mask, 0)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "mask" and value.shape == self.mask.shape
        }
        return replace(self, **clean)


# Keys of `inputs` that TRL's _compute_loss reads -> fields of MicroBatch that replace them.
_REWRITTEN_INPUTS = {
    "advantages": "advantages",
    "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps",
    "importance_sampling_ratio": "sampler_weights",
}


NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class HostTrainer(RewardedTrainer):
    """Base of trl-steady's trainers: score a micro-batch once, rewrite it, and let TRL compute its loss on it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.reached = Reached(self)
        super().__init__(*arguments, **keywords)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the loss of one micro-batch as TRL does, through `_compute_loss`."""
        self.reached.note("compute_loss")
        return super().compute_loss(model, inputs, *arguments, **keywords)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        return self.micro_batch_loss(model, inputs)

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of one micro-batch of TRL's `inputs`: TRL's own, unless a subclass overrides this method."""
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.log_probs(model, *arguments, **keywords)

    def log_probs(
        self,
        model: Callable[..., Any],
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs (B, T) and, on request, entropies (B, T) and the load-balancing loss, as TRL computes them.

        Args:
            model: The policy, the reference, or a wrapper of one of them.
            input_ids: (B, L), prompts before completions.
            attention_mask: (B, L).
            logits_to_keep: T, the number of completion columns.
            *arguments: TRL's other arguments.
            **keywords: TRL's other arguments.
        """
        if torch.is_grad_enabled():  # the training pass, not the pass of the old policy or the reference
            self.reached.note("log_probs")
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *arguments, **keywords
        )

    def score(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> MicroBatch:
        """Run one forward of the policy on a micro-batch with TRL's own method."""
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        per_sample = {
            name: inputs[name] for name, how in CONTRACT.inputs.items() if how == FORWARDED and name in inputs
        }
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **per_sample,
        )
        assert entropies is not None
        mask = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
        old_logps = inputs.get("old_per_token_logps")
        return MicroBatch(
            mask=mask.bool(),
            logps=logps,
            entropies=entropies,
            aux_loss=aux_loss,
            advantages=inputs["advantages"],
            old_logps=logps.detach() if old_logps is None else old_logps,
            sampler_logps=inputs.get("sampling_per_token_logps"),
            ref_logps=inputs.get("ref_per_token_logps"),
            sampler_weights=inputs.get("importance_sampling_ratio"),
        )

    def host_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        batch: MicroBatch,
        *,
        loss_type: str,
        importance_sampling_level: str,
        with_kl: bool,
        keep: Tensor | None,
    ) -> Tensor:
        """Run TRL's unchanged `_compute_loss` on a rewritten micro-batch, without a second forward.

        Args:
            model: The model that TRL passed.
            inputs: The inputs that TRL passed. Keys that `batch` does not replace stay unchanged.
            batch: Values that replace those of `inputs`.
            loss_type: One of TRL's own.
            importance_sampling_level: `"token"` or `"sequence"`.
            with_kl: True if TRL adds (and logs) its own KL term when `beta` is not 0.
            keep: (B, 1) or (B, T), 1 = keep, 0 = leave out of the policy term; None keeps all.

        Returns:
            Scalar. In training it is already divided by the gradient accumulation steps, as in TRL.
        """
        rewritten = dict(inputs)
        for name, ours in _REWRITTEN_INPUTS.items():
            value = getattr(batch, ours)
            if value is not None:
                rewritten[name] = value
        scores = (batch.logps, batch.entropies, batch.aux_loss)
        overrides: dict[str, Any] = {
            "loss_type": loss_type,
            "importance_sampling_level": importance_sampling_level,
            "beta": self.beta if with_kl else 0.0,
            # set on the instance: a subclass's scoring method must not be applied to its own result
            "_get_per_token_logps_and_entropies": lambda *_args, **_kwargs: scores,
            # TRL multiplies its policy term by this mask for any threshold
            "off_policy_mask_threshold": None if keep is None else 0.0,
            "get_off_policy_mask": lambda **_kwargs: keep,
        }
        with overridden(self, overrides):
            return super()._compute_loss(model, rewritten)

    def loss_weights(self, mask: Tensor, inputs: Mapping[str, Any], *, loss_type: str, dtype: torch.dtype) -> Tensor:
        """Return the weights (B, T) of the loss tokens in TRL's loss of a micro-batch.

        Args:
            mask: (B, T) bool, True = loss token.
            inputs: The inputs that TRL passed.
            loss_type: One of TRL's own.
            dtype: The dtype of the weights.
        """
        window = self.current_gradient_accumulation_steps if self.model.training else 1.0
        if loss_type in ("grpo", "sapo"):
            return reduction.sequence_mean_weights(mask, dtype=dtype) / window
        if loss_type == "luspo":
            return reduction.sequence_sum_weights(mask, dtype=dtype) / window
        if loss_type == "bnpo":
            return reduction.token_weights(mask, mask.sum(), dtype=dtype) / window
        if loss_type == "dr_grpo":
            assert self.max_completion_length is not None  # TRL's loss needs it too
            return reduction.token_weights(mask, len(mask) * self.max_completion_length, dtype=dtype) / window
        # dapo, cispo, vespo: a mean over the tokens of the generation batch, of which a window is one part
        tokens = inputs["num_items_in_batch"].clamp(min=1.0).to(dtype) / self.accelerator.num_processes
        args: Any = self.args
        part = window / args.steps_per_generation if self.model.training else 1.0
        return mask.to(dtype) / (tokens * part)

    def get_train_dataloader(self) -> Any:
        """Return TRL's dataloader, after a check that the dataset fits the reward functions and fills a rollout."""
        refuse_data(self)
        refuse_small(self)
        return super().get_train_dataloader()

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Tensor:
        self.reached.note("_calculate_rewards")
        return super()._calculate_rewards(*arguments, **keywords)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.environment_factories is None:  # environments may add prompts
            refuse_rows(inputs, of_any_kind=self.rollout_func is not None)
        function = self.rollout_func
        with overridden(self, {} if function is None else {"rollout_func": checked_rollout(function)}):
            return self.rollout(inputs)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any
    ) -> tuple[list[list[int]], Any]:
        return self.generate(prompt_ids, *arguments, **keywords)

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> tuple[list[list[int]], Any]:
        """Generate tokens for each prompt as TRL does, and return them with the engine's log-probs, if there are any.

        Each turn of an agent is one call, whose prompt contains all earlier turns.
        """
        self.reached.note("generate")
        return super()._generate_single_turn(prompt_ids, *arguments, **keywords)

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """Make completions of a batch of prompts, with rewards and log-probs, as TRL does."""
        self.reached.note("rollout")
        return super()._generate_and_score_completions(inputs)

    def push_to_engine(self, weights: Callable[[NamedWeights], Iterator[tuple[str, Tensor]]]) -> None:
        """Send `weights(own)` to vLLM in place of `own()`, the named weights that TRL would merge and send."""
        own = self.vllm_generation._iter_named_params
        vars(self.vllm_generation)["_iter_named_params"] = functools.partial(weights, own)
