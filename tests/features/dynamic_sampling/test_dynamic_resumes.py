"""Dynamic sampling: prompts of further rounds, and runs that end and go on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.features.dynamic_sampling import tools as rounds
from tests.features.dynamic_sampling.tools import PREFIX, build, everything, groups, metric
from tests.tools import resumable, tiny


def test_a_resume_knows_the_worst_reward_that_was_seen(models: dict[str, Path], tmp_path: Path) -> None:
    def only_at_first(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        return [float(trainer_state.global_step > 0 or i % 4 > 0) for i in range(len(completion_ids))]

    options = {"steps_per_generation": 2, "max_steps": 4, "reward": only_at_first}
    whole = tiny.train(build(models["dense"], tmp_path, save_strategy="steps", save_steps=2, **options))
    assert metric(whole, f"{PREFIX}solved") == [0.0, 1.0]
    resumed = build(models["dense"], tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert metric(resumed, f"{PREFIX}solved")[-1:] == [1.0]


# prompts of further rounds


def further(trainer: Any) -> list[int]:
    """Numbers of the prompts of all rounds but the first ones, in their order."""
    later = [answers for rollout in trainer.rollouts for answers in rollout.rounds[1:]]
    return [rounds.number(group[0].prompt) for answers in later for group in groups(answers)]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("data", [tiny.dataset(6), tiny.dataset(6).to_iterable_dataset()], ids=["rows", "stream"])
def test_prompts_are_taken_pass_by_pass_and_a_resume_goes_on(
    models: dict[str, Path], tmp_path: Path, data: Any
) -> None:
    """No pass repeats a prompt or leaves one out, whatever the checkpoints."""
    data = data.map(lambda row: {**row, "of_no_use": 1})
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 12}
    options |= {"keywords": {"train_dataset": data}, "steps_per_generation": 2, "per_device_train_batch_size": 8}
    options |= {"remove_unused_columns": True} if isinstance(data, Dataset) else {}
    whole = tiny.train(build(models["dense"], tmp_path, **options))
    taken = further(whole)
    passes = [taken[start : start + 6] for start in range(0, len(taken) - 5, 6)]
    assert len(passes) >= 2 and all(sorted(each) == list(range(6)) for each in passes)
    assert len(set(map(tuple, passes))) > 1
    for checkpoint in (1, 3, 4):
        if isinstance(data, IterableDataset) and checkpoint > 1:
            break  # transformers cannot restore the position of a second pass
        resumed = build(models["dense"], tmp_path / "resumed", **{**options, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
        assert resumable.differences(resumable.state(whole), resumable.state(resumed)) == []
        assert further(resumed) == taken[len(taken) - len(further(resumed)) :] != []


def test_a_checkpoint_without_the_option_goes_on_with_it(models: dict[str, Path], tmp_path: Path) -> None:
    """At the end of a window; inside one it is refused."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "steps_per_generation": 2}
    tiny.train(build(models["dense"], tmp_path, dynamic_sampling=False, num_iterations=2, **options))
    assert not [*tmp_path.rglob("dynamic_sampling.json")]
    inside = build(models["dense"], tmp_path, num_iterations=2, **{**options, "save_strategy": "no"})
    with pytest.raises(ValueError, match=r"dynamic_sampling=False; this run has dynamic_sampling=True"):
        inside.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = build(models["dense"], tmp_path, num_iterations=2, **{**options, "max_steps": 6})
    after.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert after.state.global_step == 6 and further(after)


# a function as an option


def test_a_function_is_saved_with_the_arguments_and_logged_by_its_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"dynamic_sampling_filter": everything, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = tiny.train(build(models["dense"], tmp_path, **options))
    saved = torch.load(tmp_path / "checkpoint-1/training_args.bin", weights_only=False)
    assert saved.dynamic_sampling_filter is everything
    assert json.loads(trainer.args.to_json_string())["dynamic_sampling_filter"] == "everything"
