"""A warning names overrides without `super()` that keep methods from acting. Well-behaved subclasses hear nothing."""

import functools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl

import trl_steady
from tests.tools import tiny
from trl_steady.trl_bridge.overrides import ACTS_IN, overrides, uncalled


class Own(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return trl.GRPOTrainer._compute_loss(self, model, inputs)


class Below(Own):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class Calling(trl_steady.GRPOTrainer):
    """Ours in some calls only."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) if self.model.training else inputs


def timed(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(*arguments: Any) -> Any:
        return method(*arguments)

    return wrapper


class Wrapped(trl_steady.GRPOTrainer):
    @timed
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


def found(kind: type, *places: str, without_super: bool = True) -> list[str]:
    """Look at a trainer that nothing has built."""
    names = overrides(object.__new__(kind), *places, without_super=without_super)
    return [name.removeprefix(f"{__name__}.") for name in names]


def test_only_methods_without_super_are_found_on_the_way_to_a_place() -> None:
    for kind, expected in (
        (Own, ["Own"]),
        (Below, ["Own"]),
        (Calling, []),
        (Wrapped, []),
        (trl_steady.PPOTrainer, []),
    ):
        assert found(kind, "loss") == [f"{name}._compute_loss" for name in expected], kind
        assert found(kind, "rewards", "generation") == []
    assert found(Below, "log-probs", without_super=False) == ["Below._compute_loss", "Own._compute_loss"]
    for place, names in ACTS_IN.items():
        for name in names:
            assert found(type("Mine", (trl_steady.GRPOTrainer,), {name: lambda self: None}), place), (place, name)


def test_an_attribute_is_found_too() -> None:
    trainer = SimpleNamespace(_compute_loss=print)
    assert overrides(trainer, "loss", without_super=True) == ["SimpleNamespace()._compute_loss"]


def build(kind: type, model: Path, folder: Path, **options: Any) -> Any:
    args = tiny.arguments(trl_steady.GRPOConfig, folder, **options)
    return kind(str(model), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())


def test_one_warning_names_the_overrides_and_what_they_keep_from_acting(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"without super\(\)") as caught:
        build(Below, models["dense"], tmp_path, loss_type="gspo", trim_padding=False)
    (said,) = [str(each.message) for each in caught if "super" in str(each.message)]
    assert re.search(r"Own\._compute_loss, these may have no effect: GSPO: loss_type='gspo'\. Call super\(\)", said)
    assert "Below" not in said


@pytest.mark.parametrize(("kind", "options"), [(Calling, {"loss_type": "gspo"}), (Own, {"trim_padding": False})])
def test_what_calls_super_or_needs_nothing_of_ours_hears_nothing(
    kind: type, options: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(kind, models["dense"], tmp_path, **options)


def test_methods_of_other_versions_that_nothing_calls_are_named(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfAnotherVersion(trl_steady.GRPOTrainer):
        """Nothing calls the first three. The others are the script's own helpers, or TRL's."""

        def micro_batch_loss(self, *arguments: Any) -> Any:
            return None

        def _compute_advantages(self, rewards: Any) -> Any:
            return super()._compute_advantages(rewards)

        def _get_per_token_logps(self, *arguments: Any) -> Any:
            return None

        def _generate_completions(self, prompts: Any) -> Any:
            return prompts

        def _my_helper(self) -> Any:
            return [self._generate_completions(each) for each in ()]

        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs(inputs)

    with pytest.warns(UserWarning, match="does not call") as caught:
        build(OfAnotherVersion, models["dense"], tmp_path)
    (said,) = [str(each.message) for each in caught if "does not call" in str(each.message)]
    assert set(re.findall(r"OfAnotherVersion\.(\w+)", said)) == {
        "_compute_advantages",
        "_get_per_token_logps",
        "micro_batch_loss",
    }
    assert said.startswith(f"trl {trl.__version__} ") and "advantages(rollout)" in said
    later = type("Later", (trl_steady.RLOOTrainer,), {"_transform_advantages": lambda self, advantages: advantages})
    assert [name.rpartition(".")[2] for name in uncalled(object.__new__(later))] == ["_transform_advantages"]
    monkeypatch.setattr(trl.RLOOTrainer, "_later", lambda self: self._transform_advantages(None), raising=False)
    assert uncalled(object.__new__(later)) == []


class OwnRollout(trl_steady.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return trl.GRPOTrainer._generate_and_score_completions(self, inputs)


def test_step_rewards_that_a_rollout_would_drop_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """Without an option that asks for them."""

    def in_steps(completion_ids: list[list[int]], **_: Any) -> list[trl_steady.StepRewards]:
        return [trl_steady.StepRewards.at_tokens([1.0], [len(ids)]) for ids in completion_ids]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = build(OwnRollout, models["dense"], tmp_path, loss_type="gspo_token", max_steps=2)
    trainer.reward_funcs = [in_steps]
    with pytest.raises(
        ValueError, match=r"returned StepRewards, but OwnRollout makes its rollouts without calling sup"
    ):
        trainer.train()


def test_a_rollout_func_stays_the_users_own(models: dict[str, Path], tmp_path: Path) -> None:
    """A resume compares its name, and a script may call methods of an object."""

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen.append(trainer.rollout_func is function)
        ids = [[50, 51] for _ in prompts]
        return {"prompt_ids": [[45]] * len(ids), "completion_ids": ids, "logprobs": [[-1.0]] * len(ids)}

    seen: list[bool] = []
    trainer = tiny.trainer(models["dense"], tmp_path, build={"rollout_func": function}, engine_check=None)
    assert trainer.rollout_func is function
    with pytest.raises(ValueError, match="rollout_func returned logprobs of lengths"):
        trainer.train()
    assert trainer.rollout_func is function and seen == [False]  # checked inside a rollout only
