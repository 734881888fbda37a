"""Routing replay as a part: which pass records routes, which replays them, and the column of the samples."""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trl_steady.core.engine import EngineOutput
from trl_steady.core.feature import Active, Trainer
from trl_steady.core.token_record import TokenRecord
from trl_steady.core.types import ForwardPass, Rollout, Turn
from trl_steady.features.legacy import Part
from trl_steady.features.router_replay.model import RecordedModel, ReplayedModel
from trl_steady.features.router_replay.replay import Replay, RouteRecording, Routers, continued
from trl_steady.features.router_replay.routes import from_engine, is_route, shared
from trl_steady.functional.turns import nothing
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.vllm import SteadyGeneration

_COLUMN = "routes"
_R2_INSTEAD = "set router_replay='R2', which takes the routes of the trainer's own pass"

ROUTES = EngineOutput(
    option="router_replay='R3'",
    what="routes",
    flag="enable_return_routed_experts",
    field="routed_experts",
    remedy=f"Start a server with --enable-return-routed-experts, or {_R2_INSTEAD}. A preempted request may lack them: "
    "give the KV cache more memory.",
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

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._routers: dict[torch.nn.Module, Routers] = {}

    @property
    def _kind(self) -> str | None:
        return self.trainer.args.router_replay

    # construction

    def captures(self, args: Any) -> list[EngineOutput]:
        """Return that vLLM must return routes, under R3."""
        return [ROUTES] if args.use_vllm and args.router_replay == "R3" else []

    def built(self) -> None:
        """Refuse a model without routers, and an R3 that would get no routes."""
        trainer = self.trainer
        if self._kind is None:
            return
        Routers(models.bare(trainer, trainer.model))  # not kept: a reference's adapter may still add routers
        setting = f"router_replay={self._kind!r}"
        if models.compiles(trainer):
            self.refuse(setting, "the graph of torch.compile would be that of one batch's routes")
        if self._kind == "R3" and trainer.rollout_func is not None:
            self.refuse(setting, "a rollout_func returns no routes")

    def routers_of(self, model: torch.nn.Module) -> Routers:
        """Return the routers of the transformers model in `model`."""
        bare = models.bare(self.trainer, model)
        if bare not in self._routers:
            self._routers[bare] = Routers(bare)
        return self._routers[bare]

    def describe(self) -> Iterable[Active]:
        """Return whose routes are replayed."""
        if self._kind is not None:
            what = "of the pass that scored the rollout" if self._kind == "R2" else "of the rollout itself"
            yield Active(f"{self._kind}: routes {what}", ("router_replay",))
        if self.trainer.args.router_replay_reference:
            yield Active("routes in the reference's pass too", ("router_replay_reference",))

    # generation

    @contextlib.contextmanager
    def rolling(self, rollout: Rollout) -> "Generator[None]":
        """Begin a record. Adapters may have changed the routers since the last rollout."""
        self._routers.clear()
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
            routes = taken_routes(trainer.vllm_generation, self.routers_of(trainer.model).decoder_layers)
        else:
            bare = models.bare(trainer, trainer.model)
            with self.routers_of(trainer.model).recording() as recording, fed(bare) as passes:
                yield
            routes = self._of_generation(recording, passes, turn)
        turn.rollout.records[_COLUMN].add(turn, routes)

    def _of_generation(self, recording: RouteRecording, passes: list[Tensor], turn: Turn) -> list[Tensor]:
        """Return the routes (T - 1, M, K) of each sequence from transformers' passes over all of them."""
        count = len(turn.prompt_ids)
        is_batch = all(len(ids) % count == 0 for ids in passes)  # not with continuous batching
        fed = cast(list[list[int]], continued(passes, count).tolist() if is_batch else [[]] * count)
        multiple = int(self.trainer.args.pad_to_multiple_of or 1)
        width = -(-max(map(len, turn.prompt_ids)) // multiple) * multiple  # prompts are padded on their left
        slices: list[slice] = []
        for row, (prompt, completion) in enumerate(zip(turn.prompt_ids, turn.completion_ids, strict=True)):
            tokens = slice(width - len(prompt), width + len(completion) - 1)
            if fed[row][tokens] != [*prompt, *completion][:-1]:
                raise ValueError(
                    "router_replay='R3': transformers has not fed the model the tokens of each sequence one after "
                    "another. Leave beam search, guidance, assisted decoding and continuous batching out of the "
                    f"options of generation, or {_R2_INSTEAD}."
                )
            slices.append(tokens)
        padded = continued(recording.routes_of_passes([len(ids) for ids in passes]), count).cpu()
        return [padded[row, tokens] for row, tokens in enumerate(slices)]

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
        if record is None:
            return None
        if record.values is None and record.turns:
            record.values = self._of_one_prompt(record.aligned(ids, mask), ids, mask, prompt_width)
        return record.values

    def _of_one_prompt(self, routes: Tensor, ids: Tensor, mask: Tensor, prompt_width: int) -> Tensor:
        """Give sequences that share a prompt the same routes for it."""
        if not self.trainer.args.share_prompts:
            return routes
        return shared(routes, ids.where(mask.bool(), -1)[:, : prompt_width - 1])

    # scoring

    @contextlib.contextmanager
    def scoring(self, scoring: ForwardPass, model: Callable[..., Any]) -> "Generator[Callable[..., Any]]":
        """Replay the routes of the rollout or the micro-batch. Under R2, the pass of the old policy records them."""
        is_ours = scoring.role in ("old", "policy") or (
            scoring.role == "reference" and self.trainer.args.router_replay_reference
        )
        if self._kind is None or not is_ours:
            yield model
            return
        rollout, ids, mask = scoring.rollout, scoring.input_ids, scoring.attention_mask
        if rollout is None:
            routes = scoring.samples.get(_COLUMN)
        else:
            routes = self._of_rollout(rollout, ids, mask, scoring.prompt_width)
        if routes is not None:
            replayed = ReplayedModel(model, self.routers_of(scoring.model), routes, scoring.hold_until_backward)
            yield replayed
            if rollout is None:
                self._log_replays(replayed.replays)
        elif rollout is not None and scoring.role == "old":
            recorded = RecordedModel(model, self.routers_of(scoring.model), ids.shape)
            yield recorded
            assert recorded.routes is not None
            routes = recorded.routes.where(mask.bool()[..., None, None], nothing(recorded.routes.dtype))
            record = rollout.records.setdefault(_COLUMN, TokenRecord("router_replay='R2'"))
            record.values = self._of_one_prompt(routes, ids, mask, scoring.prompt_width)
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


def taken_routes(engine: SteadyGeneration, layers: Sequence[int]) -> list[Tensor]:
    """Return the routes (T - 1, M, K) of each sequence of the engine's last call. It forgets them.

    `layers` are the (M,) indices of the decoder layers that have routers.
    """
    return [from_engine(routes, layers) for routes in engine.take(ROUTES)]


@contextlib.contextmanager
def fed(model: torch.nn.Module) -> "Generator[list[Tensor]]":
    """Record the token ids (B * n,) that each pass of a model gets inside this context."""
    passes: list[Tensor] = []

    def keep(_: object, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        passes.append(ids.flatten())

    with model.register_forward_pre_hook(keep, with_kwargs=True):
        yield passes
