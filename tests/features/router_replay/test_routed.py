"""Replay of routes in training: the experts that every pass takes, its log-probs under them, and what is logged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.features.router_replay.tools import (
    CLOSE,
    FREE,
    Random,
    ascending,
    build,
    of_rollout,
    oracles,
    rows,
)
from tests.oracles import routes as routed_oracle
from tests.oracles.routes import NONE
from tests.tools import tiny


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "max_steps": 9},
        {"share_prompts": True, "token_budget": 40, "gradient_accumulation_steps": 2, "max_steps": 3, **FREE},
        {"lora": "experts", "learning_rate": 0.1, "temperature": 0.7, "trim_padding": False},
    ],
    ids=str,
)
def test_r2_replays_the_experts_of_the_policy_that_scored_the_rollout(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = models["moe"]
    free = tiny.train(build(folder, tmp_path, **options))
    trainer = tiny.train(build(folder, tmp_path, router_replay="R2", **options))
    for name in ("loss", "grad_norm"):
        assert tiny.history(trainer)[0][name] == tiny.history(free)[0][name]

    policy, moved = oracles(folder, trainer), 0
    rollouts: list[list[list[int]]] = [[] for _ in trainer.rollouts]
    temperature = options.get("temperature", 1.0)
    for update in trainer.updates:
        before, now = policy(trainer.rollouts[update.rollout][0]), policy(update.weights)
        rollouts[update.rollout] += [row.ids for row in update.rows]
        for row in update.rows:
            assert torch.equal(ascending(row.routes), routed_oracle.natural(before, row.ids))
            assert row.of_padding is not None and (row.of_padding == NONE).all()
            with torch.no_grad():
                forced = routed_oracle.log_probs(now, row.ids, row.prompt, row.routes, temperature)
                torch.testing.assert_close(row.values["logps"], forced, **CLOSE)
                if moved < 5 and not torch.equal(routed_oracle.natural(now, row.ids), ascending(row.routes)):
                    live = routed_oracle.log_probs(now, row.ids, row.prompt, None, temperature)
                    moved += not torch.allclose(forced, live, **CLOSE)
    assert moved == 5
    assert not any("forward" in vars(m) for m in trainer.model.modules() if isinstance(m, Qwen3MoeTopKRouter))
    generated = [[row.ids for row in rows(output)] for _, output in trainer.rollouts]
    assert len(generated) > 1
    whole = options.get("num_iterations", 1) * sorted(generated[0])
    assert sorted(rollouts[0]) == sorted(whole) and rollouts[0][:16] != generated[0]  # TRL shuffles them


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": False, "temperature": 0.7, "share_prompts": True, "num_generations": 8, **FREE},
        {"router_replay_reference": True, "lora": "saved router", "token_budget": 30, **FREE},
        {"steps_per_generation": 1},
    ],
    ids=str,
)
def test_r3_replays_the_experts_of_the_rollout(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """In the old policy's pass and in the first update, whose ratio is 1; in the reference's pass if asked to.

    Sequences that share a prompt take the experts of the first of them, but for the last token of the prompt.
    """
    folder = models["moe"]
    trainer = tiny.train(build(folder, tmp_path, Random, router_replay="R3", beta=0.1, max_steps=2, **options))
    policy = oracles(folder, trainer)
    temperature = options.get("temperature", 1.0)
    (turn,) = trainer.turns[0]
    given = {tuple(routed.ids): of_rollout(routed.values) for routed in turn}
    if "share_prompts" in options:
        firsts: dict[tuple[int, ...], Tensor] = {}
        for row in rows(trainer.rollouts[0][1]):
            routes, shared = given[tuple(row.ids)], row.prompt - 1
            first = firsts.setdefault(tuple(row.ids[:shared]), routes[:shared])
            given[tuple(row.ids)] = torch.cat([first, routes[shared:]])
        assert len(firsts) == 2
    before = policy(trainer.rollouts[0][0])
    reference = routed_oracle.initial(folder)
    updates, apart = [update for update in trainer.updates if update.rollout == 0], 0
    for number, update in enumerate(updates):
        now = policy(update.weights)
        if number == 0:
            torch.testing.assert_close(now.state_dict(), before.state_dict(), rtol=0, atol=0)
        for row in update.rows:
            routes = given[tuple(row.ids)]
            assert row.routes is not None and torch.equal(row.routes, routes)
            of_reference = routes if options.get("router_replay_reference") else None
            with torch.no_grad():
                expected = {
                    "logps": routed_oracle.log_probs(now, row.ids, row.prompt, routes, temperature),
                    "old_per_token_logps": routed_oracle.log_probs(before, row.ids, row.prompt, routes, temperature),
                    "ref_per_token_logps": routed_oracle.log_probs(
                        reference, row.ids, row.prompt, of_reference, temperature
                    ),
                }
                live = routed_oracle.log_probs(now, row.ids, row.prompt, None, temperature)
            if "steps_per_generation" in options:  # the policy is the old one
                del expected["old_per_token_logps"]
            assert row.values.keys() == expected.keys()
            for name, values in expected.items():
                torch.testing.assert_close(row.values[name], values, **CLOSE)
            apart += not torch.allclose(live, expected["logps"], **CLOSE)
    assert apart == sum(len(update.rows) for update in updates) > 0


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trim_padding": False, "pad_to_multiple_of": 8},
        {"generation_kwargs": {"use_cache": False}, "gradient_checkpointing": False},
        {"lora": "router", "mask_truncated_completions": True},
    ],
    ids=str,
)
def test_recorded_routes_are_those_of_each_token_by_itself(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Prompts are padded on their left, and rows that have ended go on with padding."""
    trainer = tiny.train(build(models["moe"], tmp_path, router_replay="R3", max_steps=5, **options))
    policy = oracles(models["moe"], trainer)
    assert len(trainer.rollouts) == 2
    for (weights, output), (turn,) in zip(trainer.rollouts, trainer.turns, strict=True):
        model, found = policy(weights), list(rows(output))
        assert len({row.prompt for row in found}) > 1
        assert len({len(row.ids) - row.prompt for row in found}) > 2
        for row, routed in zip(found, turn, strict=True):
            natural = routed_oracle.natural(model, routed.ids)
            assert torch.equal(ascending(routed.values), natural[:-1])
            assert row.routes is not None and torch.equal(ascending(row.routes)[:-1], natural[: len(row.ids) - 1])
            if len(row.ids) == len(routed.ids):
                assert (row.routes[-1] == NONE).all()
            assert row.of_padding is not None and (row.of_padding == NONE).all()
