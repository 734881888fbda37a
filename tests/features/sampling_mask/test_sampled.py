"""The kept sampling mask in training: among which tokens every pass scores, what that changes, and what is logged."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.features.router_replay.tools import FREE
from tests.features.sampling_mask import tools as sampled
from tests.features.sampling_mask.tools import CLOSE, Sampled, build, without_ours
from tests.oracles import routes as routed_oracle
from tests.oracles import sampling as oracle
from tests.tools import resumable, tiny
from trl_steady.features.sampling_mask import candidates as kept

R3 = {"router_replay": "R3", "router_replay_reference": True}
LORA = {"lora": "attention", "learning_rate": 0.1}
# a rollout every second step, the reference moves in the middle: it is first the initial policy, later another one
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 1.0}
MOVING |= {"steps_per_generation": 2, "max_steps": 6}
IN_BUDGET = {"token_budget": 30, "gradient_accumulation_steps": 2}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.6, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 6},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "share_prompts": True, **IN_BUDGET},
        {"top_p": 0.9, "generation_kwargs": {"top_p": 0.5, "typical_p": 0.9}, "steps_per_generation": 1},
        {"min_p": 0.2, "temperature": 0.7, **LORA, **MOVING},
        {"model": "moe", "min_p": 0.2, **R3, **IN_BUDGET, **FREE},
        {"model": "falcon_h1", "min_p": 0.2, "gradient_checkpointing": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts columns")
def test_every_pass_scores_among_the_tokens_that_were_kept(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Of each token: its set, its log-probs among it, and an entropy of the whole vocabulary."""
    folder = models[options.get("model", "dense")]
    options = {"max_steps": 3, **{name: value for name, value in options.items() if name != "model"}}
    trainer = tiny.train(build(folder, tmp_path, **options))
    policy, temperature, tokens, distant = sampled.models(folder, trainer), options.get("temperature", 1.0), 0, 0
    of_reference = [routed_oracle.initial(folder)] * len(trainer.rollouts)
    if "sync_ref_model" in options:
        first, _, last = (policy(weights) for weights, _ in trainer.rollouts)
        of_reference = [first, first, last]
    for update in trainer.updates:
        now, before = policy(update.weights), policy(trainer.rollouts[update.rollout][0])
        for row in sampled.rows(update):
            given = trainer.sets_by_tokens(update.rollout)[tuple(row.ids)]
            assert row.sets in given and all(row.sets) and not any(row.of_padding)
            of_routes = row.routes if options.get("router_replay_reference") else None
            live = sampled.scores(now, row, temperature, row.routes)
            expected = {
                "logps": live,
                "old_per_token_logps": sampled.scores(before, row, temperature, row.routes),
                "ref_per_token_logps": sampled.scores(of_reference[update.rollout], row, temperature, of_routes),
            }
            if trainer.args.is_on_policy:  # and the policy is the old one
                del expected["old_per_token_logps"]
            assert row.values.keys() == {*expected, "entropies"}
            for name, z in expected.items():
                torch.testing.assert_close(row.values[name].double(), sampled.log_probs(z, row), **CLOSE)
            torch.testing.assert_close(row.values["entropies"].double(), oracle.entropies(live), **CLOSE)
            tokens += len(row.sets)
            distant += int((oracle.kept_mass(live, row.sets) < 0.9).sum())
    assert distant > 0.3 * tokens > 0


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("is_large", "trim_padding"), [(True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:.*leaves tokens out", "ignore:.*were sampled among more")
def test_without_sets_a_run_is_the_same_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool, trim_padding: bool
) -> None:
    """Where all is sampled from, and where sets are too large to be kept, with and without padding."""
    options = {"trim_padding": trim_padding, "max_steps": 3, "top_p": 0.6 if is_large else 1.0, "top_k": 0}
    without = tiny.train(build(models["dense"], tmp_path, keep_sampling_mask=False, **options))
    if is_large:
        monkeypatch.setattr(kept, "MAX_CANDIDATES", 0)
    trainer = tiny.train(build(models["dense"], tmp_path, **options))
    assert without_ours(tiny.history(trainer)) == tiny.history(without)
    assert resumable.differences(tiny.parameters(without), tiny.parameters(trainer)) == []
    assert tiny.history(trainer)[0]["sampling_mask/fallback"] == 1
    assert any(sets for drawn in trainer.draws[0][0] for sets in drawn.sets)


@pytest.mark.filterwarnings("ignore:.*leaves tokens out")
def test_what_is_logged_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"top_p": 0.5, "temperature": 0.7}
    trainer = tiny.train(build(models["dense"], tmp_path, max_steps=5, **options))
    sizes_of = {
        4 * number: [len(each) for drawn in turn for each in drawn.sets]
        for number, (turn,) in enumerate(trainer.draws)
    }
    assert any(1 in sizes for sizes in sizes_of.values())
    policy, temperature = sampled.models(models["dense"], trainer), trainer.args.temperature
    for number, (logged, update) in enumerate(zip(tiny.history(trainer), trainer.updates, strict=False)):
        of_mask = {name.removeprefix("sampling_mask/"): v for name, v in logged.items() if "sampling_mask" in name}
        found = [(sampled.scores(policy(update.weights), row, temperature), row) for row in sampled.rows(update)]
        masses = torch.cat([oracle.kept_mass(z, row.sets)[[len(s) > 0 for s in row.sets]] for z, row in found])
        assert of_mask.pop("kept_mass") == pytest.approx(float(masses.mean()), rel=1e-5)
        sizes = sizes_of.get(number, [])
        known = [size for size in sizes if size]
        expected = (
            {
                "kept_tokens": sum(known) / len(known),
                "kept_tokens_max": max(known),
                "singletons": known.count(1) / len(known),
                "fallback": sizes.count(0) / len(sizes),
            }
            if sizes
            else {}
        )
        assert of_mask == pytest.approx(expected, rel=1e-12)
    assert max(sizes_of[0]) != max(sizes_of[4])
    seldom = tiny.history(tiny.train(build(models["dense"], tmp_path, max_steps=5, logging_steps=5, **options)))
    assert seldom[0]["sampling_mask/kept_tokens_max"] == max(itertools.chain(*sizes_of.values()))
    without = tiny.train(build(models["dense"], tmp_path, keep_sampling_mask=False, max_steps=1, **options))
    assert not any("sampling_mask" in name for row in tiny.history(without) for name in row)


def test_a_teacher_of_a_subclass_is_left_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """In the rollout and in the loss, its log-probs are of the whole vocabulary, and its routers choose."""
    teacher = tiny.trainer(models["moe"], tmp_path).model
    for parameter in teacher.parameters():
        parameter.data += 0.1 * parameter.data.abs().mean() * torch.randn_like(parameter)
    alone, asked = routed_oracle.initial(models["moe"], teacher.state_dict()), []

    class Taught(Sampled):
        def _get_per_token_logps_and_entropies(
            self, model: Any, ids: Tensor, mask: Tensor, width: int, *others: Any, **options: Any
        ) -> Any:
            with torch.no_grad():
                taught = super()._get_per_token_logps_and_entropies(teacher, ids, mask, width)[0]
            asked.append(self.rollout_in_progress is None)
            for sequence, is_token, found in zip(ids, mask.bool(), taught, strict=True):
                prompt = int(is_token[:-width].sum())
                with torch.no_grad():
                    expected = routed_oracle.log_probs(alone, sequence[is_token].tolist(), prompt)
                torch.testing.assert_close(found[is_token[-width:]], expected, **CLOSE)
            return super()._get_per_token_logps_and_entropies(model, ids, mask, width, *others, **options)

    tiny.train(build(models["moe"], tmp_path, Taught, top_p=0.6, router_replay="R2", max_steps=2))
    assert asked == [False, False, True, True]  # for the old policy, for the reference, and for each update
