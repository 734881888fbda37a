"""Whole runs with routing replay: resumed, evaluated, logged, and of agents."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.features.router_replay import tools as routed
from tests.oracles import routes as routed_oracle
from tests.oracles.routes import NONE
from tests.tools import resumable, tiny
from trl_steady.core.token_record import Traced


def test_a_run_is_not_resumed_inside_a_window_with_another_replay(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"lora": "attention", "router_aux_loss_coef": 0.0}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    tiny.train(routed.build(models["moe"], tmp_path, router_replay="R3", **options, **saving))
    for other in ({"router_replay": "R2"}, {"router_replay": None}, {"router_replay": "R3", "share_prompts": True}):
        resumed = routed.build(models["moe"], tmp_path, **options, **other)
        name, value = list(other.items())[-1]
        with pytest.raises(ValueError, match=rf"began with\s+{name}=.*this run has {name}={value!r}"):
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_evaluation_replays_too_and_leaves_training_alone(models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["moe"]
    options = {"router_replay": "R3", "beta": 0.1, "max_steps": 5, "per_device_eval_batch_size": 8}
    without = tiny.train(routed.build(folder, tmp_path, routed.Random, **options))
    evaluations = {"eval_strategy": "steps", "eval_steps": 2, "build": {"eval_dataset": tiny.dataset(4)}}
    trainer = tiny.train(routed.build(folder, tmp_path, routed.Random, **options, **evaluations))

    evaluated = [row for row in tiny.history(trainer) if "eval_loss" in row]
    assert len(evaluated) == 3  # after 2 and 4, and at the end
    for row in evaluated:
        assert {"eval_routing/fallback", "eval_routing/bytes", "eval_routing/changed"} <= row.keys()
        assert row["eval_routing/changed"] > 0.2
        assert not any(name.startswith("routing/") for name in row)
    trained = [row for row in tiny.history(trainer) if "eval_loss" not in row]
    assert trained[:-1] == tiny.history(without)[:-1]
    assert resumable.differences(tiny.parameters(without), tiny.parameters(trainer)) == []

    given = {tuple(r.ids): routed.of_rollout(r.values) for turns in trainer.turns for turn in turns for r in turn}
    found = [row for update in trainer.evaluations for row in update.rows]
    assert found and all(
        torch.equal(routed.ascending(row.routes), routed.ascending(given[tuple(row.ids)])) for row in found
    )


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("replay", "log_level"), [("R2", "debug"), ("R3", "passive")])
def test_what_is_logged_by_hand(models: dict[str, Path], tmp_path: Path, replay: str, log_level: str) -> None:
    """Tokens without a route go where they would."""

    class Holed(routed.Random):
        """One layer is missing for the second token of each sequence, and both are missing for the fourth."""

        def tampered(self, routed: Traced) -> Traced:
            routes = super().tampered(routed).values
            routes[1, 1] = NONE
            routes[3:4] = NONE
            return Traced(routed.ids, routes)

    verbosity = transformers.logging.get_verbosity()
    kind = Holed if replay == "R3" else routed.Recorded
    trainer = routed.build(models["moe"], tmp_path, kind, router_replay=replay, log_level=log_level)
    try:
        history = tiny.history(tiny.train(trainer))
    finally:
        transformers.logging.set_verbosity(verbosity)
    rollouts, policy = iter(trainer.rollouts), routed.oracles(models["moe"], trainer)
    for number, (row, update) in enumerate(zip(history[:-1], trainer.updates, strict=True)):
        now, refused, replayed = policy(update.weights), torch.zeros(routed.LAYERS), torch.zeros(routed.LAYERS)
        for found in update.rows:
            assert found.routes is not None
            refused += routed_oracle.refused(now, found.ids, found.routes)
            replayed += (found.routes != NONE).sum((0, 2))
            if replay == "R3":
                assert (found.routes[1, 1] == NONE).all() and (found.routes[1, 0] != NONE).all()
            with torch.no_grad():
                forced = routed_oracle.log_probs(now, found.ids, found.prompt, found.routes)
            torch.testing.assert_close(found.values["logps"], forced, **routed.CLOSE)
        assert row["routing/changed"] == pytest.approx(float(refused.sum() / replayed.sum()), rel=1e-6)
        layers = {name: value for name, value in row.items() if name.startswith("routing/changed/")}
        by_hand = {f"routing/changed/{layer}": float(n) for layer, n in enumerate(refused / replayed)}
        assert layers == (pytest.approx(by_hand, rel=1e-6) if log_level == "debug" else {})
        assert ("routing/bytes" in row) == ("routing/fallback" in row) == (number % 4 == 0)
        if number % 4 == 0:
            output = next(rollouts)[1]
            columns = output["prompt_ids"].size(1) + output["completion_ids"].size(1)
            lengths = [len(found.ids) for found in routed.rows(output)]
            missing = 0 if replay == "R2" else len(lengths) + sum(length - 1 > 3 for length in lengths)
            assert row["routing/bytes"] == 16 * columns * routed.LAYERS * routed.CHOSEN
            assert row["routing/fallback"] == missing / (sum(lengths) - len(lengths))
    assert history[3]["routing/changed"] > 0


def test_routers_that_an_adapter_brings_later_are_found(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.train(routed.build(models["moe"], tmp_path, router_replay="R2", lora="attention", max_steps=4))
    trainer.model.add_adapter("other", routed.LORA["saved router"])
    trainer.model.set_adapter("other")
    trainer.args.max_steps = 8
    tiny.train(trainer)
    assert trainer.state.global_step == 8
