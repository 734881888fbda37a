"""Dynamic sampling on two processes: all decide alike, and rows move with all that belongs to them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object

from tests.distributed import processes
from tests.features.dynamic_sampling import tools as rounds
from tests.oracles import routes as routed_oracle
from tests.tools import resumable, tiny
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.candidates import CandidateSets

SETTINGS: dict[str, dict[str, Any]] = {
    "a group on one process": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_generations": 4},
    "some groups on both": {"per_device_train_batch_size": 3, "steps_per_generation": 2, "num_generations": 4},
    "each group on both": {"per_device_train_batch_size": 6, "steps_per_generation": 1, "num_generations": 12},
    "large variances": {"per_device_train_batch_size": 6, "dynamic_sampling_filter": "reward_variance"},
    "RLOO": {"method": "RLOO", "per_device_train_batch_size": 6, "num_generations": 4, "beta": 0.1},
}


def by_luck(rewards: torch.Tensor, rows: list[dict[str, Any]]) -> bool:
    """A random filter: the processes draw other numbers. It gets whole groups."""
    assert len({row["prompt"] for row in rows}) == 1 and len(rows) == len(rewards)
    return bool(torch.rand(()) < 0.5)


def check_rollout(rollout: rounds.Rollout, size: int, *, is_random: bool = False, by_variance: bool = False) -> int:
    """Compare the rollout of both processes with its rounds, and return how many groups were replaced."""
    of_all: list[list[list[rounds.Answer]]] = gather_object([rollout.rounds])
    assert len({len(each) for each in of_all}) == 1  # no process waits alone
    whole = [[*itertools.chain(*of_round)] for of_round in zip(*of_all, strict=True)]
    groups = [[answers[i : i + size] for i in range(0, len(answers), size)] for answers in whole]
    key = lambda group: [(answer.prompt, answer.ids) for answer in group]
    samples = gather_object(rounds.sequences(rollout.samples))
    found = [samples[i : i + size] for i in range(0, len(samples), size)]
    first, later = [key(group) for group in groups[0]], [key(group) for of in groups[1:] for group in of]
    if is_random:
        assert all(group in (own, *later) for group, own in zip(found, first, strict=True))
        return sum(group != own for group, own in zip(found, first, strict=True))
    keeps = rounds.of_large_variance(groups[0]) if by_variance else rounds.differs
    spare = [key(group) for of in groups[1:] for group in of if keeps(group)]
    idle = [slot for slot, group in enumerate(groups[0]) if not keeps(group)]
    assert all(found[slot] == first[slot] for slot in range(len(first)) if slot not in idle)
    filled, left = idle[: len(spare)], idle[len(spare) :]  # whichever process has the slot, as on one process
    assert sorted(found[slot] for slot in filled) == sorted(spare[: len(idle)])
    assert all(found[slot] == first[slot] for slot in left)
    return len(filled)


@pytest.mark.supports("dynamic_sampling", on="DDP")
@processes.on_two
def test_both_processes_replace_the_same_groups(models: dict[str, Path], tmp_path: Path) -> None:
    for name, options in SETTINGS.items():
        options = {"steps_per_generation": 1, "max_steps": 6, **options}
        trainer = tiny.train(rounds.build(models["dense"], tmp_path / "out" / name, **options))
        size, by_variance = trainer.num_generations, trainer.args.dynamic_sampling_filter == "reward_variance"
        assert sum(check_rollout(each, size, by_variance=by_variance) for each in trainer.rollouts) > 1, name
        assert len(set(map(str, gather_object([tiny.history(trainer)[:-1]])))) == 1  # shares are of both


@processes.on_two
def test_a_random_filter_is_asked_once_for_each_group(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 6, "steps_per_generation": 1, "dynamic_sampling_filter": by_luck}
    trainer = rounds.build(models["dense"], tmp_path / "out", **options)
    torch.manual_seed(torch.distributed.get_rank())
    tiny.train(trainer)
    assert sum(check_rollout(each, 4, is_random=True) for each in trainer.rollouts) > 3


@processes.on_two
def test_routes_and_sets_move_with_their_rows(models: dict[str, Path], tmp_path: Path) -> None:
    """Routes are those of the model, and each token is in its set, also for rows that have moved."""
    options = {"router_replay": "R3", "keep_sampling_mask": True, "top_k": 5, "beta": 0.1, "max_steps": 4}
    options |= {"per_device_train_batch_size": 6, "steps_per_generation": 1, "num_generations": 4, "num_iterations": 2}
    trainer = tiny.train(rounds.build(models["moe"], tmp_path / "out", **options))
    moved = 0
    for rollout in trainer.rollouts:
        samples, known = rollout.samples, {answer.ids for answers in rollout.rounds for answer in answers}
        before = routed_oracle.initial(models["moe"], rollout.weights)
        ids = torch.cat([samples["prompt_ids"], samples["completion_ids"]], 1)
        mask = torch.cat([samples["prompt_mask"], samples["completion_mask"]], 1).bool()
        for row, (_, completion) in enumerate(rounds.sequences(samples)):
            moved += completion not in known
            natural = routed_oracle.natural(before, ids[row][mask[row]].tolist())
            routes = samples["routes"][row][mask[row]].long().sort(-1).values
            assert torch.equal(routes[:-1], natural[:-1])
            sets = lists(CandidateSets(*samples["kept_tokens"][row]))[: len(completion)]
            assert all(len(of) == 5 and token in of for of, token in zip(sets, completion, strict=True))
    assert sum(gather_object([moved])) > 0


@processes.on_two
def test_both_processes_resume(models: dict[str, Path], tmp_path: Path) -> None:
    """At each step, also inside a window."""
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 6}
    saving = {"save_strategy": "steps", "save_steps": 1}
    model, output = models["dense"], tmp_path / "out"
    whole = tiny.train(rounds.build(model, output, **options, **saving))
    for step in (1, 2, 3):
        again = rounds.build(model, output / "again", **options)
        again.train(resume_from_checkpoint=str(output / f"checkpoint-{step}"))
        assert resumable.differences(resumable.state(whole), resumable.state(again)) == [], step
