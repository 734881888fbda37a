"""Generation ahead on two processes: both get what the main one asked for, and neither waits alone."""

import functools
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import requests
import torch
import torch.multiprocessing
from accelerate.utils import gather_object

import trl_steady
from tests.distributed import processes
from tests.features.dynamic_sampling.tools import number
from tests.features.generate_ahead import tools as ahead
from tests.features.generate_ahead.tools import Watched
from tests.tools import engines, tiny
from tests.tools.engines import COMPLETIONS, Server
from tests.tools.resumable import differences

engine, server = engines.engine, engines.server

SETTINGS: dict[str, dict[str, Any]] = {
    "a group on one process": {"per_device_train_batch_size": 8, "steps_per_generation": 1, "max_steps": 6},
    "each group on both": {"per_device_train_batch_size": 4, "steps_per_generation": 1, "num_generations": 8},
    "windows of two steps": {
        "num_iterations": 2,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 9,
    },
    "LoRA": {"per_device_train_batch_size": 8, "steps_per_generation": 1, "lora": True},
}


@pytest.fixture
def watched(server: Server) -> Watched:
    return Watched(server, size=8)


@pytest.fixture
def url(server: Server) -> str:
    """The address of a server that answers a resumed run as the whole one: it repeats itself after a group."""
    Watched(server, size=4)
    return server.url


def trained(rank: int, url: str, model: Path, output: Path) -> None:
    for (name, options), is_ahead in itertools.product(SETTINGS.items(), (False, True)):
        if rank == 0:
            requests.post(url + ahead.RUN, json={})
        with ahead.connected():
            torch.manual_seed(0)
            trainer = tiny.train(ahead.build(url, model, output / name / str(is_ahead), is_ahead=is_ahead, **options))
        first, second = gather_object([tiny.parameters(trainer)])
        assert all(torch.equal(first[key], second[key]) for key in first)
        behind = [row["async/versions_behind"] for row in tiny.history(trainer) if "async/versions_behind" in row]
        size = 16 * trainer.num_generations // trainer.args.generation_batch_size  # rollouts of an epoch
        assert behind == ([float(i % size > 0) for i in range(len(behind))] if is_ahead else [])
        assert len(behind) > 1 or not is_ahead


@pytest.mark.supports("async_generate", on="DDP")
def test_both_processes_get_the_answers_of_the_policy_before(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    processes.run(functools.partial(trained, url=server.url, model=models["dense"], output=tmp_path), tmp_path)
    runs = [watched.asked[slice(*ends)] for ends in itertools.pairwise([*watched.runs, None])]
    for usual, found in zip(runs[::2], runs[1::2], strict=True):
        assert [each.prompts for each in found] == [each.prompts for each in usual]
        versions = [each.version - usual[0].version for each in usual]
        size = 16 // len(usual[0].prompts)
        expected = [versions[i - (i % size > 0)] for i in range(len(usual))]
        assert [each.version - found[0].version for each in found] == expected
        assert all(each.is_steady for each in found)


def failing(rank: int, url: str, model: Path, output: Path) -> None:
    with ahead.connected():
        trainer = ahead.build(url, model, output, **SETTINGS["a group on one process"])
        with pytest.raises(RuntimeError, match=r"async_generate=True: .*at step 2"):
            trainer.train()


def test_an_error_of_the_server_ends_both_processes(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    post = server.post

    def refusing(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS and len(watched.asked) == 2:
            server.refused[COMPLETIONS] = (400, "the engine is dead")
            raise ValueError("the engine is dead")
        return post(path, body)

    server.post = refusing  # type: ignore[method-assign]
    processes.run(functools.partial(failing, url=server.url, model=models["dense"], output=tmp_path), tmp_path, 120)


@processes.on_two
def test_both_processes_resume_with_the_answers_that_were_ahead(
    models: dict[str, Path], tmp_path: Path, url: str
) -> None:
    options: dict[str, Any] = {**SETTINGS["a group on one process"], "save_strategy": "steps", "save_steps": 1}
    with ahead.connected():
        whole = tiny.train(ahead.build(url, models["dense"], tmp_path, **options))
        again, checked = (
            ahead.build(url, models["dense"], tmp_path / str(check), **options, engine_check=check)
            for check in (None, 1e-6)
        )
        checkpoint = str(tmp_path / "checkpoint-2")
        again.train(resume_from_checkpoint=checkpoint)
        assert differences(ahead.state(whole), ahead.state(again)) == []
        with pytest.raises(ValueError, match="engine_check=1e-06: engine and policy differ"):
            checked.train(resume_from_checkpoint=checkpoint)
        assert checked.state.global_step == 3  # the third rollout is the checkpoint's


def with_a_bad_row(rank: int, url: str, model: Path, output: Path) -> None:
    def read(batch: dict[str, Any]) -> dict[str, Any]:
        if rank == 1 and any(number(prompt) == 14 for prompt in batch["prompt"]):
            raise KeyError("planted")
        return batch

    data = tiny.dataset()
    data.set_transform(read)
    with ahead.connected():
        options = SETTINGS["a group on one process"]
        ahead.build(url, model, output, build={"train_dataset": data}, **options).train()


def test_an_error_of_one_process_s_data_ends_the_run(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    check = functools.partial(with_a_bad_row, url=server.url, model=models["dense"], output=tmp_path)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="KeyError: 'planted'"):
        processes.run(check, tmp_path, 60)


class CopiesRows(trl_steady.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return super()._generate_and_score_completions(inputs if self.accelerator.is_main_process else list(inputs))


def copying(rank: int, url: str, model: Path, output: Path) -> None:
    with ahead.connected(), patch.object(trl_steady, "GRPOTrainer", CopiesRows):
        trainer = ahead.build(url, model, output, **SETTINGS["a group on one process"])
        with pytest.warns(UserWarning, match="rows of a rollout are not those that transformers drew"):
            trainer.train()


def test_rows_that_one_process_replaces_are_asked_ahead_by_none(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    processes.run(functools.partial(copying, url=server.url, model=models["dense"], output=tmp_path), tmp_path, 60)
    assert len(watched.asked) == 6
