"""Routing replay as a part: which pass records routes, which replays them, and the column of the samples."""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor

from trl_steady.host import models
from trl_steady.host.engine import Capture
from trl_steady.host.part import Part, Rollout, ScoringPass, Turn
from trl_steady.host.record import TokenRecord
from trl_steady.routing.proxy import RecordedModel, ReplayedModel
from trl_steady.routing.replay import Replay, RouteRecording, Routers, RoutingError, continued
from trl_steady.routing.routes import decoded, from_engine, is_route, no_route, shared

__all__ = ["ROUTES", "RoutingPart", "taken_routes"]

_COLUMN = "routes"
_R2_INSTEAD = "or set router_replay='R2', which takes the routes of the trainer's own pass"


def _check(model: torch.nn.Module, option: str = "router_replay='R3'") -> None:
    try:
        Routers(model)
    except ValueError as error:
        raise ValueError(f"{option}: {error} Leave router_replay unset.") from None


ROUTES = Capture(
    option="router_replay='R3'",
    what="routes",
    flag="enable_return_routed_experts",
    field="routed_experts",
    is_on="--enable-return-routed-experts",
    lost="Some versions return none for a request that was preempted; more memory for the KV cache avoids this",
    instead=_R2_INSTEAD,
    check=_check,
)


class RoutingPart(Part):
    """Replays the experts of the rollout with `router_replay`.

    "R2" is Qwen's vanilla routing replay (arXiv 2512.01374): the updates use the experts of the old policy in this
    trainer. "R3" is rollout routing replay: the old policy's pass and the updates use the experts of the generation.

    The column `routes` has (B, L, M, K) experts for the L columns of prompts and completions together, in M layers.
    """

    window_options = (
        ("router_replay", None),
        ("router_replay_reference", "router_replay"),
        ("share_prompts", "router_replay"),
    )

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._routers: weakref.WeakKeyDictionary[torch.nn.Module, Routers] = weakref.WeakKeyDictionary()

    @property
    def _kind(self) -> str | None:
        return self.trainer.args.router_replay

    # construction

    def captures(self, args: Any) -> list[Capture]:
        """Return that vLLM must return routes, under R3."""
        return [ROUTES] if args.use_vllm and args.router_replay == "R3" else []

    def built(self) -> None:
        """Refuse a model without routers, and ways of generating that do not tell the routes."""
        trainer = self.trainer
        if self._kind is None:
            return
        option = f"router_replay={self._kind!r}"
        _check(models.bare(trainer, trainer.model), option)  # a reference's adapter may still add routers
        if models.compiles(trainer):
            raise ValueError(f"{option} patches calls that torch.compile would compile away. Set torch_compile=False.")
        if isinstance(trainer.model, PeftModel) and trainer.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{option} does not work with prompt learning, whose virtual tokens have no routes. Train LoRA "
                "adapters, or leave router_replay unset."
            )
        if self._kind == "R2":
            return
        if trainer.rollout_func is not None:
            raise ValueError(
                f"{option} does not work with a rollout_func, which returns no routes. Leave rollout_func unset, "
                f"{_R2_INSTEAD}."
            )
        if trainer.args.use_transformers_continuous_batching and not trainer.use_vllm:
            raise ValueError(
                f"{option} does not work with use_transformers_continuous_batching=True, which mixes the tokens of "
                f"several sequences. Set it to False, {_R2_INSTEAD}."
            )

    def routers_of(self, model: torch.nn.Module) -> Routers:
        """Return the routers of the transformers model in `model`."""
        bare = models.bare(self.trainer, model)
        if bare not in self._routers:
            self._routers[bare] = Routers(bare)
        return self._routers[bare]

    # generation

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> "Generator[None]":
        """Begin a record. Adapters may have changed the routers since the last rollout."""
        for model in [model for model, routers in self._routers.items() if not routers.are_of(model)]:
            del self._routers[model]
        if self._kind == "R3":
            instead = "Set router_replay='R2', which needs no routes from the generation."
            rollout.records[_COLUMN] = TokenRecord(ROUTES.option, instead)
        yield

    @contextlib.contextmanager
    def generating(self, turn: Turn) -> "Generator[None]":
        """Record the routes of a generation, under R3."""
        trainer = self.trainer
        if self._kind != "R3" or turn.rollout is None:
            yield
            return
        if trainer.use_vllm:
            yield
            layers = self.routers_of(trainer.model).decoder_layers
            routes = taken_routes(trainer.vllm_generation, layers)
        else:
            bare = models.bare(trainer, trainer.model)
            with self._naming_option():
                with self.routers_of(trainer.model).recording() as recording, _fed(bare) as passes:
                    yield
                routes = self._of_generation(recording, passes, turn)
        turn.rollout.records[_COLUMN].add(turn, routes)

    def _of_generation(self, recording: RouteRecording, passes: list[Tensor], turn: Turn) -> list[Tensor]:
        """Return the routes (T - 1, M, K) of each sequence from transformers' passes over all of them."""
        count = len(turn.prompt_ids)
        padded = recording.routes_of_generation(count).cpu()
        fed = cast(list[list[int]], continued(passes, count).squeeze(-1).tolist())
        multiple = int(self.trainer.pad_to_multiple_of or 1)
        width = -(-max(map(len, turn.prompt_ids)) // multiple) * multiple  # prompts are padded on their left
        routes: list[Tensor] = []
        for row, (prompt, completion) in enumerate(zip(turn.prompt_ids, turn.completion_ids, strict=True)):
            own = slice(width - len(prompt), width + len(completion) - 1)
            if fed[row][own] != [*prompt, *completion][:-1]:
                raise ValueError(
                    "router_replay='R3': transformers has not fed the model the tokens of each sequence one after "
                    "another. Leave beam search, guidance and assisted decoding out of generation_kwargs and of the "
                    "model's generation_config, or set router_replay='R2'."
                )
            routes.append(padded[row, own])
        return routes

    def columns(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return `routes`, unless there are none: R2 without a pass of the old policy."""
        if self._kind is None:
            return {}
        mask = rollout.attention_mask
        routes = self._of_rollout(rollout, rollout.input_ids, mask, rollout.samples["prompt_ids"].size(1))
        if routes is None:
            return {}
        is_needed = mask & (mask.flip(-1).cumsum(-1).flip(-1) > 1)  # no log-prob depends on the last token's route
        missing = is_needed & ~is_route(routes).all(-1)
        bytes_held = torch.tensor([routes.numel() * routes.element_size(), 1])
        fallback = torch.stack([missing.sum(), is_needed.sum()])
        self.trainer.metrics.pooled(sums={"routing/fallback": fallback, "routing/bytes": bytes_held})
        return {_COLUMN: routes}

    def _of_rollout(self, rollout: Rollout, ids: Tensor, mask: Tensor, prompt_width: int) -> Tensor | None:
        """Return the routes of the padded batch, or None if nothing has recorded them yet."""
        record = rollout.records.get(_COLUMN)
        if record is not None and record.values is None and record.turns:
            record.values = self._of_one_prompt(record.aligned(ids, mask), ids, mask, prompt_width)
        return None if record is None else record.values

    def _of_one_prompt(self, routes: Tensor, ids: Tensor, mask: Tensor, prompt_width: int) -> Tensor:
        """Give sequences that share a prompt the same routes for it."""
        if not self.trainer.args.share_prompts:
            return routes
        return shared(routes, ids.where(mask.bool(), -1)[:, : prompt_width - 1])

    # scoring

    @contextlib.contextmanager
    def scoring(self, scoring: ScoringPass, model: Callable[..., Any]) -> "Generator[Callable[..., Any]]":
        """Replay the routes of the rollout or the micro-batch. Under R2, the pass of the old policy records them."""
        is_ours = scoring.role in ("old", "policy") or (
            scoring.role == "reference" and self.trainer.args.router_replay_reference
        )
        if self._kind is None or not is_ours:
            yield model
            return
        rollout, ids, mask = scoring.rollout, scoring.input_ids, scoring.attention_mask
        with self._naming_option():
            if rollout is None:
                routes = scoring.samples.get(_COLUMN)
            else:
                routes = self._of_rollout(rollout, ids, mask, scoring.prompt_width)
            if routes is not None:
                replayed = ReplayedModel(model, self.routers_of(scoring.model), routes, scoring.lasting)
                yield replayed
                if rollout is None:
                    self._log_replays(replayed.replays)
            elif rollout is not None and scoring.role == "old":
                recorded = RecordedModel(model, self.routers_of(scoring.model), ids.shape)
                yield recorded
                assert recorded.routes is not None
                own = recorded.routes.where(mask.bool()[..., None, None], no_route(recorded.routes.dtype))
                record = rollout.records.setdefault(_COLUMN, TokenRecord("router_replay='R2'"))
                record.values = self._of_one_prompt(own, ids, mask, scoring.prompt_width)
            else:  # R2 without a pass of the old policy
                yield model

    def _log_replays(self, replays: Sequence[Replay]) -> None:
        changed = torch.stack([replay.changed for replay in replays]).sum(0)
        replayed = torch.stack([replay.replayed for replay in replays]).sum(0)
        sums = {"routing/changed": torch.stack([changed.sum(), replayed.sum()])}
        if self.trainer.args.log_level == "debug":  # the same on all processes, unlike the level of their loggers
            pairs = torch.stack([changed, replayed], dim=-1)
            sums |= {f"routing/changed/{layer}": pair for layer, pair in enumerate(pairs)}
        self.trainer.metrics.pooled(sums=sums)

    @contextlib.contextmanager
    def _naming_option(self) -> "Generator[None]":
        """Turn an error of the routers into a ValueError that names the option."""
        try:
            yield
        except RoutingError as error:
            raise ValueError(f"router_replay={self._kind!r}: {error} Leave router_replay unset.") from error


def taken_routes(engine: Any, layers: Sequence[int]) -> list[Tensor]:
    """Return the routes (T - 1, M, K) of each sequence of the engine's last call. It forgets them.

    Args:
        engine: TRL's engine that captures `ROUTES`.
        layers: (M,) indices of the decoder layers that have routers.

    Raises:
        ValueError: The engine has returned no routes for a sequence.
    """
    return [from_engine(decoded(own), layers=layers) for own in engine.take(ROUTES)]


@contextlib.contextmanager
def _fed(model: torch.nn.Module) -> "Generator[list[Tensor]]":
    """Record the token ids (B * n, 1) that each pass of a model gets inside this context."""
    passes: list[Tensor] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        passes.append(ids.reshape(-1, 1))

    with model.register_forward_pre_hook(keep, with_kwargs=True):
        yield passes
