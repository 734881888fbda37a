"""RLOO with our features: with all of them off it is TRL's bit for bit, and each acts as it does under GRPO."""

import functools
from pathlib import Path
from typing import Any

import pytest

import trl_steady
from tests.tools import resumable, tiny
from tests.tools.cases import cases

trainer = functools.partial(tiny.trainer, method="RLOO")


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None for some, which RLOO leaves out of the baseline."""
    return [None if sum(ids) % 5 == 0 else float(len(ids)) for ids in completion_ids]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "several passes": {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3},
    # no group is clipped to equal rewards, whose advantages are exactly 0 here only
    "normalised": {"normalize_advantages": True, "reward_clip_range": (0.0, 14.0)},
    "sampling": {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1},
    "two rewards": {"reward_weights": [1.0, 0.5], "build": {"reward_funcs": [tiny.reward, lengths]}},
    "lora": {"lora": True, "beta": 0.1},
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "build": {"eval_dataset": tiny.dataset(4)},
    },
}


@pytest.mark.filterwarnings("ignore:sampling leaves tokens out")
@pytest.mark.parametrize("name", cases(OPTIONS, ("accumulation", "several passes", "two rewards", "lora")))
def test_everything_off_is_trls_bit_for_bit(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    model = ("dense", "moe")[list(OPTIONS).index(name) % 2]
    ours = tiny.train(trainer(models[model], tmp_path, padded=True, **OPTIONS[name]))
    theirs = tiny.train(trainer(models[model], tmp_path, ours=False, **OPTIONS[name]))
    assert resumable.differences(tiny.parameters(theirs), tiny.parameters(ours)) == []
    assert resumable.differences(tiny.history(theirs), tiny.history(ours)) == []
    moved = tiny.parameters(trainer(models[model], tmp_path, padded=True, **OPTIONS[name]))
    assert resumable.differences(moved, tiny.parameters(ours)) != []


def test_the_kl_is_exactly_0_after_a_refresh_with_lora(models: dict[str, Path], tmp_path: Path) -> None:
    """RLOO's KL is that of a rollout, which is the first thing after a refresh."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 1.0}
    moving = tiny.train(trainer(models["dense"], tmp_path, lora=True, max_steps=12, **options))
    assert [refresh.step for refresh in moving.reference_refreshes] == [4, 8]
    kls = {row["step"] - 1: row["kl"] for row in moving.state.log_history if "kl" in row}
    assert kls[0] == kls[4] == kls[8] == 0  # the initial adapter counts too: the reference is its copy
    fixed = tiny.train(trainer(models["dense"], tmp_path, lora=True, max_steps=12, beta=0.1))
    assert all(row["kl"] != 0 for row in fixed.state.log_history[4:] if "kl" in row)


def test_records_of_the_sampler_act(models: dict[str, Path], tmp_path: Path) -> None:
    """Their folders show under GRPO what the passes make of them."""
    routed = tiny.history(tiny.train(trainer(models["moe"], tmp_path, router_replay="R2")))
    assert any(row.get("routing/changed", 0) > 0 for row in routed)
    kept = tiny.history(tiny.train(trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_k=5)))
    name = "sampling_mask/kept_tokens"
    assert {row[name] for row in kept if name in row} == {5}


def test_step_rewards_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [trl_steady.StepRewards.at_tokens([1.0], [len(ids)]) for ids in completion_ids]

    with pytest.raises(
        ValueError, match="returned StepRewards, but RLOO has one ratio and one advantage per sequence"
    ):
        tiny.train(trainer(models["dense"], tmp_path, build={"reward_funcs": steps}))


def test_inside_a_window_the_kl_of_the_reward_must_stay(models: dict[str, Path], tmp_path: Path) -> None:
    """The rewards of the rollout contain it. Under GRPO, whose loss reads it in each update, it may change."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    tiny.train(trainer(models["dense"], tmp_path, beta=0.1, **options))
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match=r"window that began with\s+beta=0\.1; this run has beta=0\.2"):
        trainer(models["dense"], tmp_path, beta=0.2, **options).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"began with\s+normalize_advantages=False; this run .*=True"):
        again = trainer(models["dense"], tmp_path, beta=0.1, normalize_advantages=True, **options)
        again.train(resume_from_checkpoint=checkpoint)
    resumed = trainer(models["dense"], tmp_path, beta=0.1, epsilon=0.3, **options)  # the loss reads it in each update
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 5
