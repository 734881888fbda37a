"""`trl.GRPOTrainer` with routing replay for mixtures of experts."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from trl_steady.config import GRPOConfig
from trl_steady.host import overridden
from trl_steady.host.engine import ROUTES, Capture
from trl_steady.reference.tensors import REFERENCE
from trl_steady.routing.model import RecordedModel, ReplayedModel
from trl_steady.routing.replay import Recording, Replay, Routers, RoutingError, continued
from trl_steady.routing.routes import is_route, no_route, shared
from trl_steady.sampled import SampledTrainer
from trl_steady.turns import Traced, aligned, stitched

__all__ = ["RoutedTrainer"]


@dataclass
class _Rollout:
    """Routes of the rollout in progress."""

    turns: list[list[Traced]] = field(default_factory=list)
    """Routes recorded during generation under R3, turn by turn."""
    routes: Tensor | None = None
    """(B, T, L, K) of the padded batch, once known."""


class RoutedTrainer(SampledTrainer):
    """Trainer that replays the experts of the rollout with `router_replay`.

    "R2" is Qwen's vanilla routing replay (arXiv 2512.01374): the updates use the experts of the old policy in this
    trainer. "R3" is rollout routing replay: the old policy's pass and the updates use the experts of the generation.
    """

    args: GRPOConfig
    _rollout: _Rollout | None = None
    _routes: Tensor | None = None

    def __init__(self, model: Any, reward_funcs: Any, args: GRPOConfig, *positional: Any, **keywords: Any) -> None:
        self._routers: weakref.WeakKeyDictionary[torch.nn.Module, Routers] = weakref.WeakKeyDictionary()
        super().__init__(model, reward_funcs, args, *positional, **keywords)
        if args.router_replay is not None:
            self._refuse_replay_that_cannot_work()

    def captures(self, args: GRPOConfig) -> list[Capture]:
        """Return what vLLM must return beside tokens: under R3, also the routes."""
        return super().captures(args) + ([ROUTES] if args.use_vllm and args.router_replay == "R3" else [])

    def _refuse_replay_that_cannot_work(self) -> None:
        option = f"router_replay={self.args.router_replay!r}"
        try:
            Routers(self.bare(self.model))  # only a check: a reference's adapter may still add routers
        except ValueError as error:
            raise ValueError(f"{option}: {error} Leave router_replay unset.") from None
        if self.compiles:
            raise ValueError(f"{option} patches calls that torch.compile would compile away. Set torch_compile=False.")
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{option} does not work with prompt learning, whose virtual tokens have no routes. Train LoRA "
                "adapters, or leave router_replay unset."
            )
        if self.args.router_replay == "R3":
            self._refuse_rollouts_without_routes()

    def _refuse_rollouts_without_routes(self) -> None:
        option = "router_replay='R3'"
        instead = "or set router_replay='R2', which takes the routes of the trainer's own pass"
        if self.rollout_func is not None:
            raise ValueError(
                f"{option} does not work with a rollout_func, which returns no routes. Leave rollout_func unset, "
                f"{instead}."
            )
        if self.use_vllm:
            return
        if self.args.use_transformers_continuous_batching:
            raise ValueError(
                f"{option} does not work with use_transformers_continuous_batching=True, which mixes the tokens of "
                f"several sequences. Set it to False, {instead}."
            )

    def routers_of(self, model: torch.nn.Module) -> Routers:
        """Return the routers of the transformers model in `model`."""
        bare = self.bare(model)
        if bare not in self._routers:
            self._routers[bare] = Routers(bare)
        return self._routers[bare]

    def rollout(self, inputs: Any) -> dict[str, Any]:
        """Run TRL's rollout, and add `routes` (B, T, L, K) for the T columns of prompts and completions together."""
        if self.args.router_replay is None:
            return super().rollout(inputs)
        for model in [model for model, routers in self._routers.items() if not routers.are_of(model)]:
            del self._routers[model]  # an adapter has changed the routers
        rollout = _Rollout()
        with overridden(self, {"_rollout": rollout}):
            output = super().rollout(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1).bool()
        self._align(rollout, ids, mask, output["prompt_ids"].size(1))
        if rollout.routes is None:  # R2 without a pass of the old policy
            return output
        output["routes"] = routes = rollout.routes
        is_needed = mask & (mask.flip(-1).cumsum(-1).flip(-1) > 1)  # no log-prob depends on the last token's route
        missing = is_needed & ~is_route(routes).all(-1)
        bytes_held = routes.numel() * routes.element_size()
        self.record_pooled(
            sums={
                "routing/fallback": torch.stack([missing.sum(), is_needed.sum()]),
                "routing/bytes": torch.tensor([bytes_held, 1]),
            }
        )
        return output

    def generate(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> tuple[list[list[int]], Any]:
        """Generate as TRL does. Under R3, record the routes."""
        if self._rollout is None or self.args.router_replay != "R3":
            return super().generate(prompt_ids, *arguments, **keywords)
        if self.use_vllm:
            completion_ids, logprobs = super().generate(prompt_ids, *arguments, **keywords)
            engine: Any = self.vllm_generation
            routes = engine.take_routes(self.routers_of(self.model).decoder_layers)
        else:
            with self._naming_option():
                with self.routers_of(self.model).recording() as recording, _fed(self.bare(self.model)) as passes:
                    completion_ids, logprobs = super().generate(prompt_ids, *arguments, **keywords)
                routes = self._of_generation(recording, passes, prompt_ids, completion_ids)
        sequences = zip(prompt_ids, completion_ids, routes, strict=True)
        self._rollout.turns.append([Traced([*prompt, *completion], own) for prompt, completion, own in sequences])
        return completion_ids, logprobs

    def _of_generation(
        self,
        recording: Recording,
        passes: list[Tensor],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
    ) -> list[Tensor]:
        """Return the routes (T - 1, L, K) of each sequence from transformers' passes over all of them."""
        padded = recording.routes_of_generation(len(prompt_ids)).cpu()
        fed = continued(passes, len(prompt_ids)).squeeze(-1).tolist()
        multiple = int(self.pad_to_multiple_of or 1)
        width = -(-max(map(len, prompt_ids)) // multiple) * multiple  # prompts are padded on their left
        routes: list[Tensor] = []
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            own = slice(width - len(prompt), width + len(completion) - 1)
            if fed[row][own] != [*prompt, *completion][:-1]:
                raise ValueError(
                    "router_replay='R3': transformers has not fed the model the tokens of each sequence one after "
                    "another. Leave beam search, guidance and assisted decoding out of generation_kwargs and of the "
                    "model's generation_config, or set router_replay='R2'."
                )
            routes.append(padded[row, own])
        return routes

    def _align(self, rollout: _Rollout, input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> None:
        """Under R3, convert the recorded routes to routes of the padded batch."""
        if rollout.routes is None and rollout.turns:
            try:
                routes = aligned(stitched(rollout.turns), input_ids, attention_mask)
            except ValueError as error:
                raise ValueError(
                    f"router_replay='R3': {error} Set router_replay='R2', which needs no routes from the generation."
                ) from error
            rollout.routes = self._of_one_prompt(routes, input_ids, attention_mask, prompt_width)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Compute TRL's loss, and replay the routes of the micro-batch."""
        with overridden(self, {"_routes": inputs.get("routes")}):
            return super().compute_loss(model, inputs, *arguments, **keywords)

    def log_probs(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute TRL's log-probs, and replay the routes of the rollout or of the micro-batch.

        Under R2, the pass of the old policy records the routes.
        """
        score = self._naming_option()(
            functools.partial(
                super().log_probs, model, input_ids, attention_mask, logits_to_keep, *arguments, **keywords
            )
        )
        if self.args.router_replay is None:
            return score()
        is_reference = self._is_reference(model)
        if is_reference and not self.args.router_replay_reference:
            return score()
        if not is_reference and self.bare(model) is not self.bare(self.model):  # for example a teacher of a subclass
            return score()
        rollout = self._rollout
        if rollout is None:
            if self._routes is None:
                return score()
            replayed = self._replayed(model, self._routes)
            scores = score(stand_in=replayed)
            self._log_replays(replayed.replays)
            return scores
        prompt_width = input_ids.size(1) - logits_to_keep
        self._align(rollout, input_ids, attention_mask, prompt_width)
        if rollout.routes is not None:
            return score(stand_in=self._replayed(model, rollout.routes))
        if is_reference:  # R2 without a pass of the old policy
            return score()
        recorded = RecordedModel(model, self.routers_of(model), (input_ids.size(0), input_ids.size(1)))
        scores = score(stand_in=recorded)
        assert recorded.routes is not None
        of_tokens = recorded.routes.where(attention_mask.bool()[..., None, None], no_route(recorded.routes.dtype))
        rollout.routes = self._of_one_prompt(of_tokens, input_ids, attention_mask, prompt_width)
        return scores

    @contextlib.contextmanager
    def _naming_option(self) -> Iterator[None]:
        """Turn an error of the routers into a ValueError that names the option."""
        try:
            yield
        except RoutingError as error:
            raise ValueError(
                f"router_replay={self.args.router_replay!r}: {error} Leave router_replay unset."
            ) from error

    def _replayed(self, model: torch.nn.Module, routes: Tensor) -> ReplayedModel:
        return ReplayedModel(model, self.routers_of(model), routes, self.lasting)

    def _is_reference(self, model: torch.nn.Module) -> bool:
        """Return True for the reference: a separate model, or the policy with another adapter or none."""
        if model is self.ref_model:
            return True
        adapted = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        layer = next(adapted, None)
        return layer is not None and (layer.disable_adapters or REFERENCE in layer.active_adapters)

    def _of_one_prompt(self, routes: Tensor, input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> Tensor:
        """Give sequences that share a prompt the same routes for it."""
        if not self.args.share_prompts:
            return routes
        return shared(routes, input_ids.where(attention_mask.bool(), -1)[:, : prompt_width - 1])

    def _log_replays(self, replays: list[Replay]) -> None:
        changed = torch.stack([replay.changed for replay in replays]).sum(0)
        replayed = torch.stack([replay.replayed for replay in replays]).sum(0)
        sums = {"routing/changed": torch.stack([changed.sum(), replayed.sum()])}
        if self.args.log_level == "debug":  # the same on all processes, unlike the level of their loggers
            for layer, pair in enumerate(torch.stack([changed, replayed], dim=-1)):
                sums[f"routing/changed/{layer}"] = pair
        self.record_pooled(sums=sums)


@contextlib.contextmanager
def _fed(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Record the token ids (B * n, 1) that each pass of a model gets inside this context."""
    passes: list[Tensor] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        passes.append(ids.reshape(-1, 1))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
