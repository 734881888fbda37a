"""Replay the experts that a rollout used: which pass records routes, which pass replays them, and their column."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.engine import EngineExtra
from trl_steady.core.feature import Feature, Trainer
from trl_steady.core.token_record import TokenRecord, nothing, refuse_other_count
from trl_steady.core.types import ForwardPass, LogProbs, ModelCall, Rollout, Turn
from trl_steady.features.router_replay.generation import R2_INSTEAD, record_passes
from trl_steady.features.router_replay.replay import Replay, Routers
from trl_steady.features.router_replay.routes import from_engine, is_route, share_prefix_routes
from trl_steady.trl_bridge import models

_COLUMN = "routes"

ROUTES = EngineExtra(
    option="router_replay='R3'",
    label="routes",
    flag="enable_return_routed_experts",
    field="routed_experts",
    fix_hint=f"Start a server with --enable-return-routed-experts, or {R2_INSTEAD}. A preempted request may lack "
    "them: give the KV cache more memory.",
)


class RouterReplay(Feature):
    """Replays the experts of the rollout with `router_replay`.

    "R2" is Qwen's vanilla routing replay (arXiv 2512.01374): the updates use the experts of the old policy in this
    trainer. "R3" is rollout routing replay: the old policy's pass and the updates use the experts of the generation.

    The column `routes` has (B, L, M, K) experts for the L columns of prompts and completions together, in M layers.
    """

    args: SharedOptions

    def __init__(self, trainer: Trainer, args: Any) -> None:
        super().__init__(trainer, args)
        self._routers: dict[torch.nn.Module, Routers] = {}

    def on_init_end(self) -> None:
        """Refuse a model without routers, and an R3 that would get no routes."""
        trainer = self.trainer
        kind = self.args.router_replay
        if kind is None:
            return
        Routers(models.bare(trainer, trainer.model))  # not kept: a reference's adapter may still add routers
        setting = f"router_replay={kind!r}"
        if models.compiles(trainer):
            self.refuse(setting, "the graph of torch.compile would be that of one batch's routes")
        if kind == "R3" and trainer.rollout_func is not None:
            self.refuse(setting, "a rollout_func returns no routes")

    def engine_extras(self, args: Any) -> Iterable[EngineExtra]:
        """Return that vLLM must return routes, under R3."""
        if args.use_vllm and args.router_replay == "R3":
            return [ROUTES]
        return []

    def routers(self, model: torch.nn.Module) -> Routers:
        """Return the routers of the transformers model in `model`."""
        bare = models.bare(self.trainer, model)
        if bare not in self._routers:
            self._routers[bare] = Routers(bare)
        return self._routers[bare]

    # a rollout

    def on_rollout_begin(self, rollout: Rollout) -> None:
        """Begin a record, under R3. Adapters may have changed the routers since the last rollout."""
        self._routers.clear()
        if self.args.router_replay == "R3":
            instead = "Set router_replay='R2', which needs no routes from the generation."
            rollout.records[_COLUMN] = TokenRecord(ROUTES.option, instead)

    def around_generate(self, turn: Turn, call_next: Callable[[Turn], Any]) -> Any:
        """Record the routes of a generation, under R3."""
        trainer = self.trainer
        if self.args.router_replay != "R3" or turn.rollout is None:
            return call_next(turn)
        if trainer.use_vllm:
            result = call_next(turn)
            refuse_other_count(turn, ROUTES.option)
            layers = self.routers(trainer.model).decoder_layers
            routes = [from_engine(array, layers) for array in trainer.vllm_generation.take(ROUTES)]
        else:
            with record_passes(models.bare(trainer, trainer.model), self.routers(trainer.model)) as passes:
                result = call_next(turn)
            refuse_other_count(turn, ROUTES.option)
            routes = passes.routes(turn, pad_to_multiple_of=int(self.args.pad_to_multiple_of or 1))
        turn.rollout.records[_COLUMN].add(turn, routes)
        return result

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Add the column `routes`, unless there are none: R2 without a pass of the old policy."""
        if self.args.router_replay is None:
            return
        mask = rollout.attention_mask
        routes = self._rollout_routes(rollout, rollout.input_ids, mask, rollout.samples["prompt_ids"].size(1))
        if routes is None:
            return
        tokens_left = mask.flip(-1).cumsum(-1).flip(-1)  # from each column on
        is_needed = mask & (tokens_left > 1)  # no log-prob depends on the last token's route
        missing = is_needed & ~is_route(routes).all(-1)
        bytes_held = torch.tensor([routes.numel() * routes.element_size(), 1])
        fallback = torch.stack([missing.sum(), is_needed.sum()])
        self.trainer.metrics.pooled(sums={"routing/fallback": fallback, "routing/bytes": bytes_held})
        rollout.samples[_COLUMN] = routes

    def _rollout_routes(self, rollout: Rollout, ids: Tensor, mask: Tensor, prompt_width: int) -> Tensor | None:
        """Return the routes of the padded batch, or None if nothing has recorded them yet."""
        record = rollout.records.get(_COLUMN)
        if record is None:
            return None
        if record.values is None and record.sequences:
            record.values = self._with_shared_prompts(record.as_padded(ids, mask), ids, mask, prompt_width)
        return record.values

    def _with_shared_prompts(self, routes: Tensor, ids: Tensor, mask: Tensor, prompt_width: int) -> Tensor:
        """Give sequences whose prompt is computed once the same routes for it."""
        if not self.args.share_prompts:
            return routes
        return share_prefix_routes(routes, ids.where(mask.bool(), -1)[:, : prompt_width - 1])

    # forward passes

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Replay the routes of the rollout or the micro-batch. Under R2, the old policy's pass records them."""
        if not self._is_on(forward):
            return call_next(forward)
        rollout = forward.rollout
        if rollout is None:
            routes = forward.samples.get(_COLUMN)
        else:
            routes = self._rollout_routes(rollout, forward.input_ids, forward.attention_mask, forward.prompt_width)
        if routes is not None:
            return self._replay(forward, routes, call_next)
        if rollout is None or forward.role != "old":  # R2 without a pass of the old policy
            return call_next(forward)
        return self._record(forward, rollout, call_next)

    def _is_on(self, forward: ForwardPass) -> bool:
        if self.args.router_replay is None:
            return False
        if forward.role == "reference":
            return bool(self.args.router_replay_reference)
        return forward.role in ("old", "policy")

    def _replay(self, forward: ForwardPass, routes: Tensor, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        routers = self.routers(forward.model)
        replays: list[Replay] = []

        def replayed(model: ModelCall, *, token_indices: Tensor, **batch: Any) -> Any:
            token_routes = routes.flatten(0, 1)[token_indices.flatten()]  # the batch may come in parts
            with forward.hold_until_backward(routers.replay(token_routes)) as replay:
                outputs = model(token_indices=token_indices, **batch)
                replay.check()
            replays.append(replay)
            return outputs

        forward.wrap_model(lambda model: functools.partial(replayed, model), needs_token_indices=True)
        log_probs = call_next(forward)
        if forward.rollout is None:
            self._log_replays(replays)
        return log_probs

    def _record(
        self, forward: ForwardPass, rollout: Rollout, call_next: Callable[[ForwardPass], LogProbs]
    ) -> LogProbs:
        routers = self.routers(forward.model)
        index_parts: list[Tensor] = []
        route_parts: list[Tensor] = []

        def recorded(model: ModelCall, *, token_indices: Tensor, **batch: Any) -> Any:
            with routers.record() as recording:
                outputs = model(token_indices=token_indices, **batch)
            (routes,) = recording.routes_of_passes([token_indices.numel()])
            index_parts.append(token_indices.flatten())
            route_parts.append(routes)
            return outputs

        forward.wrap_model(lambda model: functools.partial(recorded, model), needs_token_indices=True)
        log_probs = call_next(forward)
        ids = forward.input_ids
        mask = forward.attention_mask.bool()
        recorded_routes = torch.cat(route_parts)
        missing = nothing(recorded_routes.dtype)
        routes = recorded_routes.new_full((ids.numel(), *recorded_routes.shape[1:]), missing)
        routes[torch.cat(index_parts)] = recorded_routes
        routes = routes.unflatten(0, ids.shape).where(mask[..., None, None], missing)
        record = rollout.records.setdefault(_COLUMN, TokenRecord("router_replay='R2'"))
        record.values = self._with_shared_prompts(routes, ids, mask, forward.prompt_width)
        return log_probs

    def _log_replays(self, replays: Sequence[Replay]) -> None:
        changed = torch.stack([replay.changed for replay in replays]).sum(0)
        replayed = torch.stack([replay.replayed for replay in replays]).sum(0)
        sums = {"routing/changed": torch.stack([changed.sum(), replayed.sum()])}
        if self.args.log_level == "debug":  # the same on all processes, unlike the level of their loggers
            for layer, pair in enumerate(torch.stack([changed, replayed], dim=-1)):
                sums[f"routing/changed/{layer}"] = pair
        self.trainer.metrics.pooled(sums=sums)
