"""Replay of routes in training: the experts that every pass takes, its log-probs under them, and what is logged."""

import copy
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import trl_steady
from tests import agent, resumable, routed_oracle, tiny
from tests.routed_oracle import NONE
from trl_steady import unpadded
from trl_steady.checks import NATIVE_LOSS_TYPES, SEQUENCE_RATIO_LOSS_TYPES
from trl_steady.padding.families import traits
from trl_steady.routing.routes import Routed

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
# packed or padded, a sum is taken in another order than of a sequence alone; log-probs are around 5 nats
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
LOSS_TYPES = (*NATIVE_LOSS_TYPES, *SEQUENCE_RATIO_LOSS_TYPES)
LORA: dict[str, LoraConfig] = {
    "attention": LoraConfig(**tiny.LORA),
    "experts": LoraConfig(
        **{**tiny.LORA, "target_modules": []},
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
    ),
    "router": LoraConfig(**{**tiny.LORA, "target_modules": []}, target_parameters=["mlp.gate.weight"]),
    "attention and router": LoraConfig(**tiny.LORA, target_parameters=["mlp.gate.weight"]),
    "saved router": LoraConfig(**tiny.LORA, modules_to_save=["mlp.gate"]),
}


class Row(NamedTuple):
    """A sequence of a padded batch."""

    ids: list[int]
    prompt: int
    routes: Tensor | None
    """(T, L, K), those of its tokens."""
    of_padding: Tensor | None
    values: dict[str, Tensor]
    """What the batch says of its completion's tokens."""


class Update(NamedTuple):
    rollout: int
    weights: dict[str, Tensor]
    rows: list[Row]
    inputs: dict[str, Any]


class Recorded(trl_steady.GRPOTrainer):
    """Ours, which keeps what left its rollouts, what came to its loss, and the weights of each."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.rollouts: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self.turns: list[list[list[Routed]]] = []
        self.updates: list[Update] = []
        self.evaluations: list[Update] = []
        super().__init__(*arguments, **keywords)

    def rollout(self, inputs: Any) -> dict[str, Any]:
        self.turns.append([])
        weights = routed_oracle.weights(self.model)
        output = super().rollout(inputs)
        self.rollouts.append((weights, {k: v.clone() for k, v in output.items() if isinstance(v, Tensor)}))
        return output

    def generate(self, prompt_ids: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = super().generate(prompt_ids, *arguments, **keywords)
        if self.args.router_replay == "R3":
            turns = self._rollout.turns
            turns[-1] = [self.tampered(routed) for routed in turns[-1]]
            self.turns[-1].append(turns[-1])
        return answer

    def tampered(self, routed: Routed) -> Routed:
        return routed

    def micro_batch_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        weights = routed_oracle.weights(self.model)
        loss = super().micro_batch_loss(model, inputs)
        of_tokens = {"logps": self.scored.detach()}
        update = Update(len(self.rollouts) - 1, weights, list(rows({**inputs, **of_tokens})), inputs)
        (self.updates if self.model.training else self.evaluations).append(update)
        return loss

    def log_probs(self, *arguments: Any, **keywords: Any) -> Any:
        scores = super().log_probs(*arguments, **keywords)
        self.scored = scores[0]
        return scores

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        with torch.random.fork_rng():  # what is sampled to train on is the same with and without evaluation
            return super().evaluate(*arguments, **keywords)


class Random(Recorded):
    """As if the rollout had gone through any experts."""

    def tampered(self, routed: Routed) -> Routed:
        generator = torch.Generator().manual_seed(zlib.crc32(str(routed.ids).encode()))
        shape = (len(routed.ids) - 1, LAYERS, EXPERTS)
        return Routed(routed.ids, torch.rand(shape, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.uint8))


def rows(batch: dict[str, Any]) -> Iterator[Row]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
    routes, completions = batch.get("routes"), batch["completion_mask"].bool()
    names = ("logps", "old_per_token_logps", "ref_per_token_logps")
    for i, own in enumerate(mask):
        yield Row(
            ids[i][own].tolist(),
            int(batch["prompt_mask"][i].sum()),
            None if routes is None else routes[i][own],
            None if routes is None else routes[i][~own],
            {name: batch[name][i][completions[i]] for name in names if name in batch},
        )


def build(
    folder: Path,
    output: Path,
    kind: type[Recorded] = Recorded,
    *,
    lora: str | None = None,
    build: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    arguments = tiny.arguments(trl_steady.GRPOConfig, output, **options)
    keywords: dict[str, Any] = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    if lora is not None:
        keywords["peft_config"] = LORA[lora]
    keywords |= build or {}
    return kind(keywords.pop("model", str(folder)), keywords.pop("reward_funcs", tiny.reward), arguments, **keywords)


def of_rollout(routes: Tensor) -> Tensor:
    """(T, L, K) as R3 has them: the last token was never fed."""
    return torch.cat([routes, torch.full_like(routes[:1], NONE)])


def ascending(routes: Tensor | None) -> Tensor:
    assert routes is not None
    return routes.long().sort(-1).values


def oracles(folder: Path, trainer: Any) -> Callable[[dict[str, Tensor]], torch.nn.Module]:
    """The model by itself with given weights."""
    return functools.partial(routed_oracle.plain, folder, trainer.model)


FREE = {"router_aux_loss_coef": 0.0}  # a load-balancing loss goes with TRL's own micro-batches only


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "max_steps": 9},
        {"trim_padding": False},
        {"cuts": True, "max_steps": 5, "model_init_kwargs": {"attn_implementation": "eager"}},
        {"token_budget": 30, "gradient_accumulation_steps": 2, "max_steps": 3, **FREE},
        {"share_prompts": True, **FREE},
        {"share_prompts": True, "token_budget": 40, "gradient_accumulation_steps": 2, "max_steps": 3, **FREE},
        {"gradient_checkpointing": False, "temperature": 0.7},
        {"lora": "attention", "learning_rate": 0.1},
        {"lora": "experts", "learning_rate": 0.1},
        {"lora": "router", "learning_rate": 0.1},
        {"lora": "saved router", "learning_rate": 0.1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts columns")
def test_r2_takes_the_experts_of_the_policy_that_scored_the_rollout(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    folder = models["moe"]
    if options.get("cuts"):  # as if sequences could not be laid end to end
        monkeypatch.setattr(unpadded, "traits", lambda each: replace(traits(each), why_not_packed="of the test"))
        options = {name: value for name, value in options.items() if name != "cuts"}
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trim_padding": False},
        {"trim_padding": False, "pad_to_multiple_of": 8},
        {"token_budget": 30, "gradient_accumulation_steps": 2, **FREE},
        {"gradient_checkpointing": False, "temperature": 0.7},
        {"lora": "attention"},
        {"router_replay_reference": True},
        {"router_replay_reference": True, "lora": "attention"},
        {"router_replay_reference": True, "lora": "saved router", "token_budget": 30, **FREE},
        {"lora": "saved router"},
        {"lora": "router"},
        {"lora": "attention", "sync_ref_model": True},
        {"steps_per_generation": 1},
        {"steps_per_generation": 1, "router_replay_reference": True},
    ],
    ids=str,
)
def test_r3_takes_the_experts_of_the_rollout(models: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    """In the old policy's pass and in the first update, whose ratio is 1; in the reference's pass if asked to."""
    folder = models["moe"]
    trainer = tiny.train(build(folder, tmp_path, Random, router_replay="R3", beta=0.1, max_steps=2, **options))
    policy = oracles(folder, trainer)
    temperature = options.get("temperature", 1.0)
    (turn,) = trainer.turns[0]
    given = {tuple(routed.ids): of_rollout(routed.routes) for routed in turn}
    before = policy(trainer.rollouts[0][0])
    reference = before if options.get("sync_ref_model") else routed_oracle.initial(folder)
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


def test_the_reference_takes_the_old_policys_experts_if_asked_to(models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["moe"]
    options = {"router_replay": "R2", "beta": 0.1, "lora": "attention", "max_steps": 1}
    reference, apart = routed_oracle.initial(folder), 0
    for is_asked in (False, True):
        trainer = tiny.train(build(folder, tmp_path, router_replay_reference=is_asked, **options))
        before = oracles(folder, trainer)(trainer.rollouts[0][0])
        for row in rows(trainer.rollouts[0][1]):
            natural = routed_oracle.natural(before, row.ids)
            assert torch.equal(ascending(row.routes), natural)
            with torch.no_grad():
                forced = routed_oracle.log_probs(reference, row.ids, row.prompt, natural)
                free = routed_oracle.log_probs(reference, row.ids, row.prompt)
            torch.testing.assert_close(row.values["ref_per_token_logps"], forced if is_asked else free, **CLOSE)
            apart += not torch.allclose(forced, free, **CLOSE)
    assert apart > 10


def test_sequences_that_share_a_prompt_take_the_experts_of_one_of_them(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Of the first of the rollout, but for its last token, which each has to itself."""
    folder = models["moe"]
    options = {"share_prompts": True, "num_generations": 8, "max_steps": 2, **FREE}
    trainer = tiny.train(build(folder, tmp_path, Random, router_replay="R3", **options))
    prompts = [row.prompt for row in rows(trainer.rollouts[0][1])]
    (turn,) = trainer.turns[0]
    expected: dict[tuple[int, ...], Tensor] = {}
    firsts: dict[tuple[int, ...], Tensor] = {}
    for routed, prompt in zip(turn, prompts, strict=True):
        routes, shared = of_rollout(routed.routes), tuple(routed.ids[: prompt - 1])
        first = firsts.setdefault(shared, routes[: prompt - 1].clone())
        expected[tuple(routed.ids)] = torch.cat([first, routes[prompt - 1 :]])
    assert len(firsts) == 2
    before, policy = routed_oracle.initial(folder), oracles(folder, trainer)
    for update in trainer.updates:
        now = policy(update.weights)
        for row in update.rows:
            routes = expected[tuple(row.ids)]
            assert row.routes is not None and torch.equal(row.routes, routes)
            with torch.no_grad():
                for name, model in {"logps": now, "old_per_token_logps": before}.items():
                    forced = routed_oracle.log_probs(model, row.ids, row.prompt, routes)
                    torch.testing.assert_close(row.values[name], forced, **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": False},
        {"trim_padding": False, "pad_to_multiple_of": 8},
        {"generation_kwargs": {"use_cache": False}},
        {"generation_kwargs": {"use_cache": False}, "gradient_checkpointing": False},
        {"lora": "router"},
        {"mask_truncated_completions": True},
        {"max_completion_length": 1},
    ],
    ids=str,
)
def test_what_generate_has_routed_is_where_each_token_goes(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Prompts are padded on their left, and rows that have ended go on with padding."""
    trainer = tiny.train(build(models["moe"], tmp_path, router_replay="R3", max_steps=5, **options))
    policy = oracles(models["moe"], trainer)
    assert len(trainer.rollouts) == 2
    for (weights, output), (turn,) in zip(trainer.rollouts, trainer.turns, strict=True):
        model, found = policy(weights), list(rows(output))
        assert len({row.prompt for row in found}) > 1
        assert options.get("max_completion_length") == 1 or len({len(row.ids) - row.prompt for row in found}) > 2
        for row, routed in zip(found, turn, strict=True):
            natural = routed_oracle.natural(model, routed.ids)
            assert torch.equal(ascending(routed.routes), natural[:-1])
            assert row.routes is not None and torch.equal(ascending(row.routes)[:-1], natural[: len(row.ids) - 1])
            if len(row.ids) == len(routed.ids):
                assert (row.routes[-1] == NONE).all()
            assert row.of_padding is not None and (row.of_padding == NONE).all()


SGD = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 8}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_run_again_in_backward_take_the_same_experts(
    models: dict[str, Path], tmp_path: Path, use_reentrant: bool
) -> None:
    """On routes that have moved, gradient checkpointing changes nothing."""
    options = {"router_replay": "R2", **SGD}
    once = tiny.train(build(models["moe"], tmp_path, gradient_checkpointing=False, **options))
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    twice = tiny.train(build(models["moe"], tmp_path, **options, **again))
    changed = [row["routing/changed"] for row in tiny.history(once)[:-1]]
    assert sum(share > 0 for share in changed) >= 4
    assert [row["routing/changed"] for row in tiny.history(twice)[:-1]] == changed
    after = tiny.parameters(once)
    # the reentrant kind adds gradients up in another order, without replay too, which eight large steps blow up;
    # layers that ran again on other experts would be off by 1e-2 and more
    close = {"rtol": 1e-3, "atol": 2e-4} if use_reentrant else {"rtol": 0.0, "atol": 0.0}
    for name, value in tiny.parameters(twice).items():
        torch.testing.assert_close(value, after[name], **close, msg=lambda text, n=name: f"{n}: {text}")


def scored_with_gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss outside of training, and its gradients."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward(retain_graph=True)
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.fixture
def halfway(models: dict[str, Path], tmp_path: Path) -> Any:
    """After one of a rollout's four updates; without a load-balancing loss, which sees a last token too."""
    options = {"gradient_checkpointing": False, "max_steps": 1, **FREE}
    trainer = tiny.train(build(models["moe"], tmp_path, Random, router_replay="R3", **options))
    trainer.model.train()
    return trainer


def test_gradients_are_those_of_the_forced_experts_with_live_gates(models: dict[str, Path], halfway: Any) -> None:
    inputs = halfway._buffered_inputs[1]
    halfway.compute_loss(halfway.model, inputs)
    halfway.model.zero_grad()
    halfway.scored[inputs["completion_mask"].bool()].sum().backward()
    alone = routed_oracle.plain(models["moe"], halfway.model, routed_oracle.weights(halfway.model))
    sum(routed_oracle.log_probs(alone, row.ids, row.prompt, row.routes).sum() for row in rows(inputs)).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in halfway.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)
    gates = [value for name, value in expected.items() if "gate.weight" in name]
    assert len(gates) == LAYERS and all(gate.norm() > 1 for gate in gates)  # the router trains


@pytest.mark.parametrize("trim_padding", [True, False])
def test_routes_of_a_last_token_and_of_padding_change_nothing(halfway: Any, trim_padding: bool) -> None:
    halfway.args.trim_padding = trim_padding
    inputs = halfway._buffered_inputs[1]
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    assert last.sum() == len(mask) and not mask.all()
    loss, gradients = scored_with_gradient(halfway, inputs)

    def with_others(where: Tensor) -> dict[str, Any]:
        routes = inputs["routes"].clone()
        routes[where] = (inputs["routes"][where] % EXPERTS + 1) % EXPERTS  # also where there was none
        routes[where] = torch.stack([routes[where][..., 0], (routes[where][..., 0] + 1) % EXPERTS], dim=-1)
        return {**inputs, "routes": routes}

    for where in (last, ~mask):
        changed = with_others(where)
        assert not torch.equal(changed["routes"], inputs["routes"])
        same, own = scored_with_gradient(halfway, changed)
        torch.testing.assert_close(same, loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own, gradients, rtol=1e-5, atol=1e-6)
    other, _ = scored_with_gradient(halfway, with_others(mask & ~last))
    assert (other - loss).abs() > 1e-3


def test_weights_that_stay_give_the_same_run_with_and_without_replay(models: dict[str, Path], tmp_path: Path) -> None:
    for padding in ({}, {"trim_padding": False}):
        options = {"learning_rate": 0.0, "beta": 0.1, **padding}
        free = tiny.history(tiny.train(build(models["moe"], tmp_path, **options)))
        replayed = tiny.history(tiny.train(build(models["moe"], tmp_path, router_replay="R2", **options)))
        names = [{name for name in row if name.startswith("routing/")} for row in replayed]
        assert all("routing/changed" in of_row for of_row in names[:-1])
        assert [{k: v for k, v in row.items() if not k.startswith("routing/")} for row in replayed] == free
        assert [row.get("routing/changed", 0) for row in replayed] == [0] * len(replayed)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_a_run_resumes_exactly_inside_a_window(
    models: dict[str, Path], tmp_path: Path, replay: str, gradient_checkpointing: bool
) -> None:
    """Its first pass is a replay, with gradients: nothing has been recorded."""
    options = {"router_replay": replay, "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    options |= {"lora": "attention and router", "gradient_checkpointing": gradient_checkpointing}
    whole = tiny.train(build(models["moe"], tmp_path, Random, **options))
    resumed = build(models["moe"], tmp_path, Random, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(resumed.updates) == 4 and tiny.history(whole)[3]["routing/changed"] > 0
    assert resumable.differences(resumable.state(whole), resumable.state(resumed)) == []


def test_a_run_is_not_resumed_inside_a_window_with_another_replay(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "lora": "attention"}
    for replay in ("R2", "R3", None):
        tiny.train(build(models["moe"], tmp_path / str(replay), router_replay=replay, **options))
    for there, here in (("R2", "R3"), ("R3", "R2"), ("R2", None), (None, "R3")):
        checkpoint = tmp_path / str(there) / "checkpoint-2"
        other = build(models["moe"], tmp_path, router_replay=here, lora="attention")
        with pytest.raises(ValueError, match="lies inside a generation window that began with other") as refused:
            other.train(resume_from_checkpoint=str(checkpoint))
        settings_there, settings_here = str(refused.value).split(" there, ")
        for settings, replay in ((settings_there, there), (settings_here, here)):
            if replay is None:
                assert "router_replay" not in settings
            else:
                assert f"'router_replay': {replay!r}" in settings


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_evaluation_replays_too_and_leaves_training_alone(
    models: dict[str, Path], tmp_path: Path, replay: str
) -> None:
    folder = models["moe"]
    options = {"router_replay": replay, "beta": 0.1, "max_steps": 5, "per_device_eval_batch_size": 8}
    without = tiny.train(build(folder, tmp_path, Random, **options))
    evaluations = {"eval_strategy": "steps", "eval_steps": 2, "build": {"eval_dataset": tiny.dataset(4)}}
    trainer = tiny.train(build(folder, tmp_path, Random, **options, **evaluations))

    evaluated = [row for row in tiny.history(trainer) if "eval_loss" in row]
    assert len(evaluated) == 3  # after 2 and 4, and at the end
    for row in evaluated:
        assert {"eval_routing/fallback", "eval_routing/bytes", "eval_routing/changed"} <= row.keys()
        assert (row["eval_routing/changed"] > 0.2) == (replay == "R3")
        assert not any(name.startswith("routing/") for name in row)
    trained = [row for row in tiny.history(trainer) if "eval_loss" not in row]
    assert trained[:-1] == tiny.history(without)[:-1]
    assert resumable.differences(tiny.parameters(without), tiny.parameters(trainer)) == []

    given = {tuple(r.ids): of_rollout(r.routes) for turns in trainer.turns for turn in turns for r in turn}
    policy = oracles(folder, trainer)
    assert len(trainer.evaluations) == 6
    for update in trainer.evaluations:
        now = policy(update.weights)
        for row in update.rows:
            routes = given[tuple(row.ids)] if replay == "R3" else routed_oracle.natural(now, row.ids)
            assert torch.equal(ascending(row.routes), ascending(routes))
            with torch.no_grad():
                forced = routed_oracle.log_probs(now, row.ids, row.prompt, row.routes)
            torch.testing.assert_close(row.values["logps"], forced, **CLOSE)


def test_a_frozen_router_is_replayed(models: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if "mlp.gate." in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    trainer = tiny.train(build(models["moe"], tmp_path, router_replay="R2", max_steps=4, build={"model": model}))
    assert len(frozen) == LAYERS
    assert resumable.differences({n: tiny.parameters(trainer)[n] for n in frozen}, frozen) == []
    policy = oracles(models["moe"], trainer)
    before, now = policy(trainer.rollouts[0][0]), policy(trainer.updates[-1].weights)
    assert tiny.history(trainer)[3]["routing/changed"] > 0
    for row in trainer.updates[-1].rows:
        assert torch.equal(ascending(row.routes), routed_oracle.natural(before, row.ids))
        with torch.no_grad():
            forced = routed_oracle.log_probs(now, row.ids, row.prompt, row.routes)
        torch.testing.assert_close(row.values["logps"], forced, **CLOSE)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_trains_with_replay(models: dict[str, Path], tmp_path: Path, loss_type: str) -> None:
    options = {"loss_type": loss_type, "max_steps": 2}
    history = tiny.history(tiny.train(build(models["moe"], tmp_path, router_replay="R2", **options)))
    without = tiny.history(tiny.train(build(models["moe"], tmp_path, **options)))
    assert history[0]["loss"] == without[0]["loss"] and history[1]["routing/changed"] > 0
    assert all(math.isfinite(row[name]) for row in history[:2] for name in ("loss", "grad_norm"))
    assert history[1]["grad_norm"] != without[1]["grad_norm"]
    assert {"routing/changed", "routing/fallback", "routing/bytes"} <= history[0].keys()
    assert not any(name.startswith("routing/") for row in without for name in row)


def changed_by_hand(folder: Path, trainer: Any, update: Update) -> tuple[Tensor, int]:
    """(L,) replayed choices that the routers would not have made, and how many are replayed in each layer."""
    now = oracles(folder, trainer)(update.weights)
    refused = [routed_oracle.refused(now, row.ids, row.routes) for row in update.rows if row.routes is not None]
    replayed = sum(int((row.routes[:, 0] != NONE).sum()) for row in update.rows if row.routes is not None)
    return torch.stack(refused).sum(0), replayed


@pytest.mark.parametrize(("replay", "log_level"), [("R2", "debug"), ("R3", "passive")])
def test_what_is_logged_by_hand(models: dict[str, Path], tmp_path: Path, replay: str, log_level: str) -> None:
    verbosity = transformers.logging.get_verbosity()
    kind = Random if replay == "R3" else Recorded
    trainer = build(models["moe"], tmp_path, kind, router_replay=replay, log_level=log_level)
    try:
        history = tiny.history(tiny.train(trainer))
    finally:
        transformers.logging.set_verbosity(verbosity)
    rollouts = iter(trainer.rollouts)
    for number, (row, update) in enumerate(zip(history[:-1], trainer.updates, strict=True)):
        refused, replayed = changed_by_hand(models["moe"], trainer, update)
        assert row["routing/changed"] == pytest.approx(int(refused.sum()) / (LAYERS * replayed), rel=1e-12)
        layers = {name: value for name, value in row.items() if name.startswith("routing/changed/")}
        by_hand = {f"routing/changed/{layer}": int(n) / replayed for layer, n in enumerate(refused)}
        assert layers == (pytest.approx(by_hand, rel=1e-12) if log_level == "debug" else {})
        assert ("routing/bytes" in row) == ("routing/fallback" in row) == (number % 4 == 0)
        if number % 4 == 0:
            output = next(rollouts)[1]
            columns = output["prompt_ids"].size(1) + output["completion_ids"].size(1)
            assert row["routing/bytes"] == 16 * columns * LAYERS * CHOSEN
            assert row["routing/fallback"] == 0
    assert history[3]["routing/changed"] > 0


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_routes_among_more_experts_than_a_byte_holds(tmp_path: Path, replay: str) -> None:
    sizes = {"num_experts": 300, "num_experts_per_tok": 8, "moe_intermediate_size": 4, "head_dim": 8}
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**tiny.SIZES, **sizes}))
    alone = copy.deepcopy(model).eval()
    options = {"router_replay": replay, "max_steps": 1, "build": {"model": model}}
    trainer = tiny.train(build(tmp_path, tmp_path / "run", **options))
    output = trainer.rollouts[0][1]
    assert output["routes"].dtype == torch.int16
    columns = output["prompt_ids"].size(1) + output["completion_ids"].size(1)
    assert tiny.history(trainer)[0]["routing/bytes"] == 16 * columns * LAYERS * 8 * 2
    assert tiny.history(trainer)[0]["routing/changed"] == 0
    for row in rows(output):
        assert torch.equal(ascending(row.routes)[:-1], routed_oracle.natural(alone, row.ids)[:-1])
        assert row.of_padding is not None and (row.of_padding == -1).all()
    assert output["routes"].max() > 255


class Holed(Random):
    """Of each sequence's second token, one layer is missing; of a fourth, both."""

    def tampered(self, routed: Routed) -> Routed:
        routes = super().tampered(routed).routes
        routes[1, 1] = NONE
        routes[3:4] = NONE
        return Routed(routed.ids, routes)


def test_tokens_without_a_route_go_where_they_would_and_are_counted(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.train(build(models["moe"], tmp_path, Holed, router_replay="R3", max_steps=2))
    lengths = [len(row.ids) for row in rows(trainer.rollouts[0][1])]
    missing = len(lengths) + sum(length - 1 > 3 for length in lengths)
    assert min(lengths) > 2
    assert tiny.history(trainer)[0]["routing/fallback"] == missing / (sum(lengths) - len(lengths))
    policy = oracles(models["moe"], trainer)
    for number, update in enumerate(trainer.updates):
        now = policy(update.weights)
        for row in update.rows:
            assert row.routes is not None and (row.routes[1, 1] == NONE).all() and (row.routes[1, 0] != NONE).all()
            with torch.no_grad():
                forced = routed_oracle.log_probs(now, row.ids, row.prompt, row.routes)
            torch.testing.assert_close(row.values["logps"], forced, **CLOSE)
        of_layers = [
            sum(int((row.routes[:, layer, 0] != NONE).sum()) for row in update.rows if row.routes is not None)
            for layer in range(LAYERS)
        ]
        refused, _ = changed_by_hand(models["moe"], trainer, update)
        logged = tiny.history(trainer)[number]["routing/changed"]
        assert logged == pytest.approx(int(refused.sum()) / (CHOSEN * sum(of_layers)), rel=1e-12)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts that calls tools."""
    mixture = functools.partial(
        Qwen3MoeConfig, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=64
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "Qwen2Config", mixture)
        return agent.save_model(tmp_path_factory.mktemp("caller"), steps=90)


def agents(folder: Path, output: Path, tools: list[Callable[..., Any]], kind: type[Recorded] = Recorded) -> Any:
    """After a rollout of several turns, and its first two updates."""
    build_ = {
        "tools": tools,
        "train_dataset": agent.dataset(agent.one_by_one, agent.both_at_once),
        "processing_class": agent.tokenizer(),
    }
    options: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "max_completion_length": 160,
        "min_p": 0.1,  # nothing that was not learned
        "learning_rate": 1e-5,
        "max_steps": 2,
        "router_replay": "R3",
        "build": build_,
    }
    return tiny.train(build(folder, output, kind, **options))


@pytest.mark.parametrize("kind", [Recorded, Random])
def test_turns_of_an_agent_are_put_together(caller: Path, tmp_path: Path, kind: type[Recorded]) -> None:
    """A turn's last token is fed by the next one, and what a tool says too; what was fed before keeps its routes."""
    trainer = agents(caller, tmp_path, agent.tools([]), kind)
    assert len(trainer.turns[0]) >= 3 and len(trainer.turns[0][0]) == 16 > len(trainer.turns[0][1])
    assert tiny.history(trainer)[0]["routing/fallback"] == 0
    model = oracles(caller, trainer)(trainer.rollouts[0][0])
    turns = []
    for row in rows(trainer.rollouts[0][1]):
        turns.append(len(agent.turns(row.ids[row.prompt :])))
        expected = torch.full((len(row.ids), LAYERS, CHOSEN), NONE, dtype=torch.uint8)
        for routed in itertools.chain(*reversed(trainer.turns[0])):  # the first turn has the last word
            if row.ids[: len(routed.ids)] == routed.ids:
                expected[: len(routed.routes)] = routed.routes
        assert row.routes is not None and torch.equal(row.routes, expected)
        if kind is Recorded:
            assert torch.equal(ascending(row.routes)[:-1], routed_oracle.natural(model, row.ids)[:-1])
    assert set(turns) >= {1, 2}
    for row in trainer.updates[0].rows:
        with torch.no_grad():
            forced = routed_oracle.log_probs(model, row.ids, row.prompt, row.routes)
        torch.testing.assert_close(row.values["logps"], forced, **CLOSE)


def test_of_two_completions_that_are_the_same_either_may_go_on(caller: Path, tmp_path: Path) -> None:
    """TRL ends the one whose tool says too much for its completion."""
    number = itertools.count()

    def at_length(tool: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(tool)
        def answer(**arguments: int) -> Any:
            return "9" * 200 if next(number) % 2 == 0 else tool(**arguments)

        return answer

    trainer = agents(caller, tmp_path, [at_length(tool) for tool in agent.tools([])])
    first = [routed.ids for routed in trainer.turns[0][0]]
    found = list(rows(trainer.rollouts[0][1]))
    ended = [row.ids for row, ids in zip(found, first, strict=True) if row.ids == ids]
    assert any(ids in ended for row, ids in zip(found, first, strict=True) if row.ids != ids)
    assert tiny.history(trainer)[0]["routing/fallback"] == 0
    model = oracles(caller, trainer)(trainer.rollouts[0][0])
    for row in found:
        assert torch.equal(ascending(row.routes)[:-1], routed_oracle.natural(model, row.ids)[:-1])


def test_a_moving_reference_with_routers_of_its_own_takes_the_routes(models: dict[str, Path], tmp_path: Path) -> None:
    """Its copy of a trained router comes after the policy's, and is replayed too: at the start the two are one."""
    options = {"router_replay": "R2", "router_replay_reference": True, "beta": 0.1, "sync_ref_model": True}
    trained = tiny.train(
        tiny.trainer(models["moe"], tmp_path, **options, build={"peft_config": LORA["saved router"]}, max_steps=2)
    )
    first, second = (row["kl"] for row in tiny.history(trained)[:2])
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-4


def test_a_run_is_not_resumed_inside_a_window_with_prompts_shared_otherwise(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Its routes were not those of one prompt."""
    options = {"router_replay": "R3", "lora": "attention", "router_aux_loss_coef": 0.0}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    tiny.train(build(models["moe"], tmp_path, **options, **saving))
    other = build(models["moe"], tmp_path, share_prompts=True, **options)
    with pytest.raises(ValueError, match=r"'share_prompts': False.*there,.*'share_prompts': True"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_routers_that_an_adapter_brings_later_are_found(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.train(build(models["moe"], tmp_path, router_replay="R2", lora="attention", max_steps=4))
    trainer.model.add_adapter("other", LORA["saved router"])
    trainer.model.set_adapter("other")
    trainer.args.max_steps = 8
    tiny.train(trainer)
    assert trainer.state.global_step == 8
