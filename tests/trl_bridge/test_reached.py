"""What keeps micro-batches from our methods is refused before the first optimizer step, launcher or not."""

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import trl_steady
from tests.tools import tiny

Models = dict[str, Path]


def build(kind: type, model: Path, folder: Path, **options: Any) -> Any:
    args = tiny.arguments(trl_steady.GRPOConfig, folder, **{"max_steps": 2, **options.pop("args", {}), **options})
    data = {"train_dataset": tiny.dataset(), "eval_dataset": tiny.dataset(4), "processing_class": tiny.tokenizer()}
    return kind(str(model), reward_funcs=tiny.reward, args=args, **data)


def refused(trainer: Any, **train: Any) -> str:
    """What training says before any optimizer step."""
    before = tiny.parameters(trainer)
    with pytest.raises(ValueError) as error:
        trainer.train(**train)
    assert all(torch.equal(value, before[name]) for name, value in tiny.parameters(trainer).items())
    return str(error.value)


class OwnLoss(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        return model(input_ids=ids, attention_mask=mask).logits.mean()


class Below(OwnLoss):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class OwnStep(trl_steady.GRPOTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = OwnLoss._compute_loss(self, model, self._prepare_inputs(inputs))  # type: ignore[arg-type]
        self.accelerator.backward(loss)
        return loss.detach()


class WarmingUp(trl_steady.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.model.training and self.state.global_step < 2:
            return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]
        return super().compute_loss(model, inputs, *arguments, **keywords)


class OwnScores(trl_steady.GRPOTrainer):
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any
    ) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return logps, torch.zeros_like(logps), None


class OwnRewards(trl_steady.GRPOTrainer):
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        return torch.tensor([[float(len(ids))] for ids in completion_ids_list])


class OwnRollout(trl_steady.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return trl.GRPOTrainer._generate_and_score_completions(self, inputs)


class OwnGeneration(trl_steady.GRPOTrainer):
    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        return trl.GRPOTrainer._generate_single_turn(self, *arguments, **keywords)


GSPO = {"loss_type": "gspo"}
STEPS = {"loss_type": "gspo_token", "step_advantage": "process"}
R3 = {"router_replay": "R3", "router_aux_loss_coef": 0.0}
WAYS: list[tuple[type, str, dict[str, Any], str]] = [
    (Below, "dense", GSPO, r"Below\._compute_loss and \S+OwnLoss\._compute_loss"),
    (WarmingUp, "dense", {**GSPO, "eval_on_start": True, "eval_strategy": "steps"}, r"WarmingUp\.compute_loss"),
    (OwnScores, "dense", {"share_prompts": True}, r"OwnScores\._get_per_token_logps"),
    (OwnRewards, "dense", STEPS, r"OwnRewards\._calculate_rewards"),
    (OwnRollout, "moe", {**R3, "router_replay": "R2"}, r"OwnRollout\._generate_and_score_completions"),
    (OwnGeneration, "moe", R3, r"OwnGeneration\._generate_single_turn"),
]


@pytest.mark.parametrize(("kind", "model", "options", "named"), WAYS, ids=str)
def test_an_override_that_bypasses_an_option_is_refused_by_name(
    kind: type, model: str, options: dict[str, Any], named: str, models: Models, tmp_path: Path
) -> None:
    said = refused(build(kind, models[model], tmp_path, **options))
    assert re.search(rf"{named}.* this would have no effect: .*Call super\(\)", said)
    assert any(f"{option}=" in said for option in options)


def test_an_override_of_the_training_step_is_refused_one_step_late(models: Models, tmp_path: Path) -> None:
    for steps in (1, 2):
        trainer = build(OwnStep, models["dense"], tmp_path, **GSPO, args={"max_steps": steps})
        with pytest.raises(ValueError, match=r"OwnStep\.training_step kept .*GSPO: loss_type='gspo'"):
            trainer.train()
        assert trainer.state.global_step == 1


def test_an_attribute_and_a_patch_are_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(trl_steady.GRPOTrainer, models["dense"], tmp_path, **GSPO)
    trainer._compute_loss = functools.partial(OwnLoss._compute_loss, trainer)
    assert refused(trainer).startswith("GRPOTrainer()._compute_loss kept")
    trainer = build(trl_steady.GRPOTrainer, models["dense"], tmp_path, **GSPO)
    monkeypatch.setattr(trl_steady.GRPOTrainer, "_compute_loss", OwnLoss._compute_loss, raising=False)
    assert refused(trainer).startswith("trl_steady.trainers.grpo.GRPOTrainer._compute_loss kept")


def test_step_rewards_that_a_rollout_would_drop_are_refused(models: Models, tmp_path: Path) -> None:
    """Without an option that asks for them."""

    def in_steps(completion_ids: list[list[int]], **_: Any) -> list[trl_steady.StepRewards]:
        return [trl_steady.StepRewards.at_tokens([1.0], [len(ids)]) for ids in completion_ids]

    trainer = build(OwnRollout, models["dense"], tmp_path, loss_type="gspo_token")
    trainer.reward_funcs = [in_steps]
    assert "returned StepRewards, but OwnRollout makes its rollouts without calling super()" in refused(trainer)


class Sometimes(trl_steady.GRPOTrainer):
    """Ours in the last micro-batch of an optimizer step only."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.accelerator.sync_gradients:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "options"), [(Sometimes, GSPO), (OwnLoss, {"trim_padding": False})], ids=str)
def test_what_calls_ours_or_needs_nothing_of_ours_trains(
    kind: type, options: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 8}
        trained = tiny.train(build(kind, models["dense"], tmp_path, **steps, **options))
    assert trained.state.global_step == 2


def test_a_bypassed_default_is_a_warning(models: Models, tmp_path: Path) -> None:
    said = r"OwnScores\._.* trim_padding=True\. Call super\(\)"
    with pytest.warns(UserWarning, match=said):
        assert tiny.train(build(OwnScores, models["dense"], tmp_path)).state.global_step == 2


def test_a_resume_inside_a_window_needs_no_rollout_until_it_makes_one(models: Models, tmp_path: Path) -> None:
    options = {"loss_type": "gspo_token", "step_advantage": "process", "save_strategy": "steps", "save_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no reward function returns StepRewards
        tiny.train(build(trl_steady.GRPOTrainer, models["dense"], tmp_path, **options))
        checkpoint = str(tmp_path / "checkpoint-2")
        resumed = build(OwnRollout, models["dense"], tmp_path, **options, args={"max_steps": 4})
        resumed.train(resume_from_checkpoint=checkpoint)  # steps 3 and 4 of 4 on one rollout
        assert resumed.state.global_step == 4
        resumed = build(OwnRollout, models["dense"], tmp_path, **options, args={"max_steps": 6})
        with pytest.raises(ValueError, match=r"OwnRollout\._generate_and_score_completions"):
            resumed.train(resume_from_checkpoint=checkpoint)
        assert resumed.state.global_step == 4
