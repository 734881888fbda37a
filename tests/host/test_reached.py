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
from tests.trainers.test_training import rollout as engine
from trl_steady.trainers import active

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


class OwnHook(trl_steady.GRPOTrainer):
    def micro_batch_loss(self, model: Any, inputs: Any) -> Any:
        return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]


class OwnCompute(trl_steady.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]


class Mixin:
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]


class Mixed(Mixin, trl_steady.GRPOTrainer):
    pass


class OwnStep(trl_steady.GRPOTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = OwnLoss._compute_loss(self, model, self._prepare_inputs(inputs))  # type: ignore[arg-type]
        self.accelerator.backward(loss)
        return loss.detach()


class InTrainingOnly(trl_steady.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.model.training:
            return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]
        return super().compute_loss(model, inputs, *arguments, **keywords)


GSPO = {"loss_type": "gspo"}
IN_THE_LOSS: dict[str, dict[str, Any]] = {
    "GSPO: loss_type='gspo'": GSPO,
    "GSPO-token: loss_type='gspo_token'": {"loss_type": "gspo_token"},
    "per-token ratio under a sequence-level loss: use_bias_correction_kl=True, beta=0.1": {
        **{"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 1e-3}
    },
    "ratio to the engine's log-probs: kl_ratio_denominator='sampler'": {
        **{"beta": 0.1, "kl_ratio_denominator": "sampler"}
    },
    "estimators other than k3: kl_estimator='k2'": {"beta": 0.1, "kl_estimator": "k2"},
    "off-policy mask, by sequence or by token: off_policy_mask_threshold=0.5, off_policy_mask_level='sequence'": {
        "off_policy_mask_threshold": 0.5
    },
    "geometric mask, trainer against engine: geometric_mask_range=[0.9, 1.1]": {"geometric_mask_range": [0.9, 1.1]},
    "veto of outlier tokens, trainer against engine: token_veto_threshold=0.1": {"token_veto_threshold": 0.1},
}


@pytest.mark.parametrize(("asked", "options"), IN_THE_LOSS.items(), ids=list(IN_THE_LOSS))
def test_a_loss_without_ours_is_refused_where_an_option_asks_for_ours(
    asked: str, options: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    def with_engine(*arguments: Any, **keywords: Any) -> Any:  # since some of the options want one
        return OwnLoss(*arguments, rollout_func=engine, **keywords)

    said = refused(build(with_engine, models["dense"], tmp_path, engine_check=None, **options))  # type: ignore[arg-type]
    whose = f"{OwnLoss.__module__}.OwnLoss overrides _compute_loss without calling super(), so this would have no eff"
    assert said.startswith(whose) and f"{asked}. Call super()._compute_loss(...), or leave " in said


WAYS = {
    Below: "Below and tests.host.test_reached.OwnLoss override _compute_loss without calling super()",
    OwnHook: "OwnHook overrides micro_batch_loss without calling super()",
    OwnCompute: "OwnCompute overrides compute_loss without calling super()",
    Mixed: "Mixin overrides compute_loss without calling super()",
    OwnStep: "OwnStep overrides training_step without calling super()",
}


@pytest.mark.parametrize(("kind", "said"), WAYS.items(), ids=[kind.__name__ for kind in WAYS])
def test_it_is_named_wherever_it_is(kind: type, said: str, models: Models, tmp_path: Path) -> None:
    assert said in refused(build(kind, models["dense"], tmp_path, **GSPO))


class WarmingUp(trl_steady.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.state.global_step < 2:
            return OwnLoss._compute_loss(self, model, inputs)  # type: ignore[arg-type]
        return super().compute_loss(model, inputs, *arguments, **keywords)


def test_an_override_that_calls_super_under_a_condition_has_some_steps(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation before the first step reaches our loss, but trains nothing."""
    monkeypatch.setattr(active, "PATIENCE", 2)
    said = "In the first optimizer step .*overrides compute_loss without calling super.*an error after 2 such steps"
    with pytest.warns(UserWarning, match=said):
        warming = tiny.train(build(WarmingUp, models["dense"], tmp_path, **GSPO, args={"max_steps": 4}))
    assert warming.state.global_step == 4
    never = {"eval_on_start": True, "eval_strategy": "steps", "args": {"max_steps": 4}}
    trainer = build(InTrainingOnly, models["dense"], tmp_path, **GSPO, **never)
    with pytest.warns(UserWarning, match=said), pytest.raises(ValueError, match="InTrainingOnly overrides compute_l"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_an_attribute_of_the_trainer_is_named(models: Models, tmp_path: Path) -> None:
    trainer = build(trl_steady.GRPOTrainer, models["dense"], tmp_path, **GSPO)
    trainer._compute_loss = functools.partial(OwnLoss._compute_loss, trainer)
    assert "GRPOTrainer has an attribute _compute_loss that does not call the class's method" in refused(trainer)


def test_a_patch_of_our_class_is_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(trl_steady.GRPOTrainer, models["dense"], tmp_path, **GSPO)
    monkeypatch.setattr(trl_steady.GRPOTrainer, "_compute_loss", OwnLoss._compute_loss, raising=False)
    ours = "trl_steady.trainers.grpo.GRPOTrainer._compute_loss"
    assert f"test_reached.OwnLoss._compute_loss replaces {ours} without calling" in refused(trainer)


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


R3 = {"router_replay": "R3", "router_aux_loss_coef": 0.0}
ELSEWHERE: list[tuple[type, str, dict[str, Any], str]] = [
    (OwnScores, "dense", {"share_prompts": True}, "_get_per_token_logps_and_entropies"),
    (OwnLoss, "dense", {"share_prompts": True}, "_compute_loss"),  # the old policy's pass is ours, not this one
    (OwnRewards, "dense", {"loss_type": "gspo_token", "step_advantage": "process"}, "_calculate_rewards"),
    (OwnRollout, "dense", {"loss_type": "gspo_token", "step_advantage": "process"}, "_generate_and_score_comp"),
    (OwnRollout, "moe", {**R3, "router_replay": "R2"}, "_generate_and_score_completions"),
    (OwnGeneration, "moe", R3, "_generate_single_turn"),
    (OwnCompute, "moe", R3, "compute_loss"),
    (OwnCompute, "dense", {"keep_sampling_mask": True, "top_k": 5}, "compute_loss"),
]


@pytest.mark.parametrize(("kind", "model", "options", "method"), ELSEWHERE, ids=str)
def test_what_acts_elsewhere_is_looked_for_there(
    kind: type, model: str, options: dict[str, Any], method: str, models: Models, tmp_path: Path
) -> None:
    said = refused(build(kind, models[model], tmp_path, **options))
    assert f"{kind.__qualname__} overrides {method}" in said
    assert f"{next(iter(options.items()))[0]}=" in said or f"{list(options)[-1]}=" in said


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


class ByCompute(trl_steady.GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return self._compute_loss(model, inputs)


class Wrapped(trl_steady.GRPOTrainer):
    @functools.wraps(trl_steady.GRPOTrainer._compute_loss)
    def _compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        return trl_steady.GRPOTrainer._compute_loss(self, *arguments, **keywords)


@pytest.mark.parametrize("kind", [Sometimes, ByCompute, Wrapped])
def test_what_calls_ours_trains(kind: type, models: Models, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        options = {"gradient_accumulation_steps": 2, "steps_per_generation": 8, **GSPO}
        trained = tiny.train(build(kind, models["dense"], tmp_path, **options))
    assert "ratio/sequence_mean" in trained.state.log_history[0]


def test_it_comes_before_the_backward_pass(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which DeepSpeed takes the optimizer's step."""
    trainer = build(OwnLoss, models["dense"], tmp_path, **GSPO)
    monkeypatch.setattr(trainer.accelerator, "backward", lambda *_, **__: pytest.fail("backward"))
    refused(trainer)


@pytest.mark.parametrize(
    ("kind", "options", "method"),
    [(OwnLoss, {}, "_compute_loss"), (OwnLoss, {"beta": 0.1}, "_compute_loss"), (OwnScores, {}, "_get_per_token")],
)
def test_what_is_on_by_default_is_a_warning(
    kind: type, options: dict[str, Any], method: str, models: Models, tmp_path: Path
) -> None:
    said = rf"{kind.__qualname__} overrides {method}.* trim_padding=True\. Call super\(\).*or switch off trim_padding"
    with pytest.warns(UserWarning, match=said):
        assert tiny.train(build(kind, models["dense"], tmp_path, **options)).state.global_step == 2


def test_with_nothing_of_ours_on_nothing_is_asked(models: Models, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tiny.train(build(OwnLoss, models["dense"], tmp_path, trim_padding=False))


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
        with pytest.raises(ValueError, match="OwnRollout overrides _generate_and_score_completions"):
            resumed.train(resume_from_checkpoint=checkpoint)
        assert resumed.state.global_step == 4
        resumed = build(OwnLoss, models["dense"], tmp_path, **options, args={"max_steps": 4})
        with pytest.raises(ValueError, match="OwnLoss overrides _compute_loss"):
            resumed.train(resume_from_checkpoint=checkpoint)


def test_a_trainer_says_once_which_methods_are_on(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(Sometimes, models["dense"], tmp_path, **GSPO)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"trl-steady \S+, trl \S+: tests.host.test_reached.Sometimes on trl_steady.GRPOTrainer, loss_type='gspo'",
        lines[0],
    )
    assert lines[1:] == [
        "  on: GSPO: loss_type='gspo'",
        "  on: padding-free passes (the default): trim_padding=True",
    ]
    tiny.train(trainer)
    assert "  on: " not in capsys.readouterr().out
