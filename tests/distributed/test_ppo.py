"""PPO on two processes (gloo, CPU) and on one process with the same global batch."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from tests.distributed import processes, runs, sharded, train
from tests.distributed.checks import check_close, check_histories, check_references, marked
from tests.tools import resumable, tiny

RESUMED: dict[str, Any] = {
    **{"method": "PPO", "num_generations": 1, "beta": 0.0, "kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 64},
    **{"value_warmup_steps": 2, "ptx_coef": 0.2, "ref_model_mixup_alpha": 0.6},
    **{"per_device_train_batch_size": 2, "ref_model_sync_steps": 3, "max_steps": 6, "save_steps": 5},
    "build": {"train_dataset": tiny.dataset(24), "ptx_dataset": runs.TEXTS},
}
"""A window is 4 steps, and the checkpoint is inside the second one. Rollouts are sampled."""


def work(rank: int, *, models: dict[str, Path], output: Path) -> None:
    """Do all runs on this process, and write what each leaves."""
    sharded.enable("DDP")
    PartialState(cpu=True)
    for run in train.PPO:
        folder = output / run
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(train.fixed(run, models, folder), folder / f"rank_{rank}.pt")
    ends, folder = {}, output / "resumed"
    for name, checkpoint in (("whole", None), ("resumed", str(folder / "whole" / "checkpoint-5"))):
        torch.manual_seed(rank)  # a new adapter differs between processes until DDP evens it
        trainer = resumable.build("lora", models["dense"], folder / name, **RESUMED)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends[name] = resumable.state(trainer)
    torch.save(ends, folder / f"rank_{rank}.pt")


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], wide: Path) -> dict[str, Path]:
    return {**models, "wide": wide}


@pytest.fixture(scope="module")
def together(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what both processes leave of a run."""
    output = tmp_path_factory.mktemp("two")
    processes.run(functools.partial(work, models=folders, output=output), output)
    return lambda run: [torch.load(output / run / f"rank_{rank}.pt") for rank in range(2)]


@pytest.mark.supports("PPO, full", "PPO, LoRA", "PPO, quantised base", "ptx_coef", on="DDP")
@pytest.mark.supports("moving reference, LoRA", "token_budget", "share_prompts", "step rewards", on="DDP")
@pytest.mark.supports("adapter_dtype", on="DDP")
def test_two_processes_train_ppo_as_one_does(
    folders: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, together: Any
) -> None:
    assert marked(request) == train.features(train.PPO.values())
    for run in train.PPO:
        one, two = train.fixed(run, folders, tmp_path / run), together(run)  # type: ignore[arg-type]
        assert [(process["processes"], process["backend"]) for process in two] == 2 * [(2, "gloo")]
        check_rollouts(run, one, two)
        for each in two:  # both have the same critic, bit for bit
            assert resumable.differences(two[0]["critic"], each["critic"]) == []
            assert resumable.differences(two[0]["parameters"], each["parameters"]) == []
        check_close(run, one["parameters"], two[0]["parameters"])
        check_close(run, one["critic"], two[0]["critic"])
        if run in ("ppo full", "ppo lora"):  # metrics of a budget are means over the micro-batches of each process
            check_histories(one["history"], two[0]["history"])
            check_values(one["history"], two[0]["history"])
        if run == "ppo lora":
            check_references(run, one, two)
            assert [step for step, _, _ in one["refreshes"]] == [2, 4]
            kl_coefs = [row["kl_coef"] for row in one["history"] if "kl_coef" in row]
            assert len(set(kl_coefs)) == len(kl_coefs) == 3


def check_rollouts(run: str, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Values, returns and whitened advantages of all completions. The two processes have them one after the other."""
    assert len(one["rollouts"]) == len(two[0]["rollouts"]) >= 2
    for whole, *halves in zip(one["rollouts"], *(process["rollouts"] for process in two), strict=True):
        assert whole.keys() == {"values", "returns", "advantages"}
        for name, expected in whole.items():
            found = [row for half in halves for row in half[name]]
            assert len(found) == len(expected) == train.GLOBAL_BATCH * (4 if "tokens" in run else 1)
            for row, own in zip(expected, found, strict=True):
                assert own == pytest.approx(row, rel=1e-3, abs=1e-4, nan_ok=True), (run, name)
        assert max(abs(value) for row in whole["advantages"] for value in row) > 0.5


def check_values(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    for row, own in zip(one, two, strict=True):
        for metric in (name for name in row if name.startswith(("value/", "ptx_loss"))):
            assert own[metric] == pytest.approx(row[metric], rel=1e-3, abs=1e-3), metric


@pytest.mark.supports("exact resume", "PPO, LoRA", on="DDP")
def test_two_processes_resume_ppo_exactly_inside_a_window(together: Any) -> None:
    ends = together("resumed")
    for process in ends:
        assert resumable.differences(process["whole"], process["resumed"]) == []
        assert process["whole"]["kl_coef"] != RESUMED["kl_coef"]
        assert len(process["whole"]["refreshes"]) == 1
    assert resumable.differences(ends[0]["whole"]["critic"], ends[1]["whole"]["critic"]) == []
