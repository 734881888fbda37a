"""A reward model that is retrained on two processes (gloo, CPU) and on one, with the same global batch."""

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from tests.distributed import processes
from tests.distributed.checks import check_close
from tests.features.reward_model import tools as rewarding
from tests.tools import resumable, tiny
from trl_steady.features.reference.feature import Reference
from trl_steady.features.reward_model import callback
from trl_steady.features.reward_model.feature import RewardModel
from trl_steady.features.reward_model.training import measure
from trl_steady.trl_bridge.patching import patched

GLOBAL_BATCH = 8
RUNS: dict[str, dict[str, Any]] = {
    "pointwise": {"kind": "lora", "objective": "pointwise"},
    "pairs": {"kind": "full", "objective": "pairs"},
    "steps": {"kind": "lora", "objective": "steps"},
    "held out": {"kind": "lora", "objective": "pointwise", "refresh": {"accept": "held_out_not_worse"}},
}
RESUMED: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 10, "save_steps": 3}
"""The reward model is retrained after step 8. Rollouts are sampled."""


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers that depend on the prompt and on the place in the global batch only."""
    first, tokenizer = trainer.accelerator.process_index * len(prompts), trainer.processing_class
    answers = []
    for place, prompt in enumerate(prompts, first):
        drawn = random.Random(f"{prompt} {place}")
        answers.append("".join(drawn.choices("0123456789ab", k=drawn.randint(1, 8))))
    ids = [tokenizer(answer)["input_ids"] for answer in answers]
    return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}


def fixed(kind: str, model: Path, output: Path, *, objective: str, refresh: Any = None) -> dict[str, Any]:
    """What a run leaves. With two processes, each group lies on both."""
    state = PartialState()
    options: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // state.num_processes,
        "num_generations": GLOBAL_BATCH,
        "steps_per_generation": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "top_k": 1,  # continuations of steps are the likeliest ones, and the same on any number of processes
        "build": {"rollout_func": rollout},
    }
    how = {"replay_fraction": 0.3, "continuations": 2, "history": 16, "learning_rate": 1e-2, **(refresh or {})}
    torch.manual_seed(0)  # the adapter of one process and of two
    trainer = rewarding.refreshed(kind, model, output, objective=objective, refresh=how, **options)
    rewarding.stir(trainer)
    refresher, feature, rewards, retrained = rewarding.refresher(trainer), trainer.feature(RewardModel), [], []
    # Adam would blow rounding up to the size of an update where the gradient is zero on paper
    for group in refresher.optimizer.adamw.param_groups:
        group["eps"] = 1e-3
    own_rewards, own_refresh = feature.compute_rewards, refresher.refresh

    def noted_rewards(*arguments: Any) -> list[Any]:
        rewards.append(own_rewards(*arguments))
        return rewards[-1]

    def noted_refresh(step: int) -> None:
        own_refresh(step)
        retrained.append(resumable.of_reward_model(feature)["weights"])

    feature.adapter.compute_rewards = noted_rewards
    trainer.feature(Reference).callback.before_refresh[:] = [noted_refresh]
    trainer.train()
    return {
        "processes": (state.num_processes, state.backend),
        "rewards": [[getattr(own, "values", [own]) for own in rows] for rows in rewards],
        "retrained": retrained,
        "reward model": resumable.of_reward_model(feature),
        "parameters": tiny.parameters(trainer),
        "history": tiny.history(trainer),
    }


def work(rank: int, *, model: Path, output: Path) -> None:
    """Do all runs on this process, and write what each leaves."""
    PartialState(cpu=True)
    for name, options in RUNS.items():
        torch.save(fixed(model=model, output=output / name, **options), output / name / f"rank_{rank}.pt")


@pytest.fixture(scope="module")
def together(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what both processes leave of a run."""
    output = tmp_path_factory.mktemp("two")
    processes.run(functools.partial(work, model=models["dense"], output=output), output)
    return lambda name: [torch.load(output / name / f"rank_{rank}.pt") for rank in range(2)]


@pytest.mark.supports("reward model, full", "reward model, LoRA", on="DDP")
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_retrain_the_reward_model_as_one_does(
    name: str, models: dict[str, Path], tmp_path: Path, together: Any
) -> None:
    one, two = fixed(model=models["dense"], output=tmp_path, **RUNS[name]), together(name)
    assert [process["processes"] for process in (one, *two)] == [(1, None), (2, "gloo"), (2, "gloo")]
    # scores of all completions; the two processes have them one after the other
    assert len(one["rewards"]) == len(two[0]["rewards"]) == len(two[1]["rewards"]) == 9
    for whole, *halves in zip(one["rewards"], *(process["rewards"] for process in two), strict=True):
        both = [scores for half in halves for scores in half]
        assert len(both) == len(whole) == GLOBAL_BATCH
        for expected, found in zip(whole, both, strict=True):  # without padding, sums are taken in another order
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert max(max(scores, default=0.0) for scores in whole) - min(min(s, default=0.0) for s in whole) > 0.1
    for part in ("retrained", "reward model", "parameters"):  # of both processes bit for bit
        assert resumable.differences(two[0][part], two[1][part]) == [], part
    expected, found = one["reward model"], two[0]["reward model"]
    assert [refresh[0] for refresh in expected["refreshes"]] == [4, 8] and expected["refreshes"][1][2] > 0
    for part in ("refreshes", "rollouts", "completions", "history"):  # tokens, labels and shares: no rounding
        assert resumable.differences(expected[part], found[part]) == [], part
    known = {label for labels in expected["history"]["labels"] for label in labels}
    assert known == ({1.0} if name == "pairs" else {0.0, 1.0})
    for weights, own in zip(one["retrained"], two[0]["retrained"], strict=True):
        check_close(name, weights, own)
    check_close(name, one["parameters"], two[0]["parameters"])
    assert len(one["history"]) == len(two[0]["history"])
    for expected, found in zip(one["history"], two[0]["history"], strict=True):
        own = {name for name in expected if name.startswith(("reward", "ref/"))}
        assert own == {name for name in found if name.startswith(("reward", "ref/"))}
        for name in own:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.supports("reward model, LoRA", "exact resume", on="DDP")
@processes.on_two
def test_two_processes_resume_exactly_inside_an_outer_iteration(models: dict[str, Path], tmp_path: Path) -> None:
    """The run resumes in the first outer iteration, and in the second."""
    PartialState(cpu=True)
    ends = {}
    for name, checkpoint in (("whole", None), ("first", "checkpoint-6"), ("second", "checkpoint-9")):
        torch.manual_seed(torch.distributed.get_rank())  # a new adapter differs between processes
        trainer = rewarding.build_resumable("lora", models["dense"], tmp_path / name, **RESUMED)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / "whole" / checkpoint))
        ends[name] = resumable.state(trainer)
    assert resumable.differences(ends["whole"], ends["first"]) == []
    assert resumable.differences(ends["whole"], ends["second"]) == []
    own = ends["whole"]["reward model"]
    assert [refresh[0] for refresh in own["refreshes"]] == [8] and own["completions"]
    one, two = gather_object([own])
    assert resumable.differences(one, two) == []


@processes.on_two
def test_two_machines_without_a_common_disk_resume_too(models: dict[str, Path], tmp_path: Path) -> None:
    """Each process has a disk of its own, as if it were the only one of a machine."""
    os.environ["LOCAL_RANK"] = "0"
    PartialState(cpu=True)
    ends, folder = [], tmp_path / str(torch.distributed.get_rank())
    for name, checkpoint in (("whole", None), ("second", str(folder / "whole/checkpoint-9"))):
        trainer = rewarding.build_resumable("lora", models["dense"], folder / name, save_on_each_node=True, **RESUMED)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(resumable.of_reward_model(trainer.feature(RewardModel)))
    assert resumable.differences(*ends) == []
    assert resumable.differences(*gather_object([ends[0]])) == []


@processes.on_two
def test_a_process_with_fewer_examples_measures_in_as_many_passes(models: dict[str, Path], tmp_path: Path) -> None:
    """A pass exchanges the lengths of its sequences, so that a pass of one process alone would never end.

    The reward model is retrained on 8 answers of which one has no verdict, with a budget of tokens for a pass.
    """
    PartialState(cpu=True)
    asked, measured = [], []

    def label(prompts: list[str], completions: list[str], **columns: Any) -> list[bool | None]:
        asked.append(len(completions))
        is_unknown = torch.distributed.get_rank() == 1 and len(asked) == 1
        return [None if is_unknown and i == 0 else i % 2 == 0 for i in range(len(completions))]

    def noted(scorer: Any, examples: Any) -> dict[str, float]:
        measured.append(len(examples))
        return measure(scorer, examples)

    options = {"per_device_train_batch_size": 1, "num_generations": 2, "steps_per_generation": 2, "max_steps": 5}
    how = {"label_fn": label}
    trainer = rewarding.refreshed("lora", models["dense"], tmp_path, refresh=how, token_budget=16, **options)
    rewarding.stir(trainer)
    with patched(callback, {"measure": noted}):
        trainer.train()
    own = resumable.of_reward_model(trainer.feature(RewardModel))
    one, other = gather_object([{"measured": measured, "reward model": own}])
    assert resumable.differences(one, other) == []
    # sets of fresh, replayed and held-out examples, measured before and after
    assert len(measured) == 6 and sum(measured) == 2 * 7  # one set is odd, and one process has one more of it
    ((step, *_, old, new),) = own["refreshes"]
    assert step == 4 and old is not None and new is not None
