"""PPO on two processes (gloo, CPU) and on one process with the same global batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from tests.distributed import processes, runs, train
from tests.distributed.checks import check_close, check_histories, check_references, marked
from tests.tools import resumable, tiny


@pytest.mark.supports("PPO, full", "PPO, LoRA", "PPO, quantised base", "ptx_coef", on="DDP")
@pytest.mark.supports("moving reference, LoRA", "token_budget", "share_prompts", "step rewards", on="DDP")
@pytest.mark.supports("adapter_dtype", on="DDP")
def test_two_processes_train_ppo_as_one_does(
    models: dict[str, Path], wide: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert marked(request) == train.features(train.PPO.values())
    folders = {**models, "wide": wide}
    together = train.together(train.PPO, folders, tmp_path / "two")
    for run, one in train.alone(train.PPO, folders, tmp_path / "one").items():
        two = together[run]
        assert [(process["processes"], process["backend"]) for process in two] == 2 * [(2, "gloo")]
        # values, returns and whitened advantages; the two processes have the completions one after the other
        assert len(one["rollouts"]) == len(two[0]["rollouts"]) >= 2
        for whole, *halves in zip(one["rollouts"], *(process["rollouts"] for process in two), strict=True):
            assert whole.keys() == {"values", "returns", "advantages"}
            for name, expected in whole.items():
                found = [row for half in halves for row in half[name]]
                assert len(found) == len(expected) == train.GLOBAL_BATCH * (4 if "tokens" in run else 1)
                for row, own in zip(expected, found, strict=True):
                    assert own == pytest.approx(row, rel=1e-3, abs=1e-4, nan_ok=True), (run, name)
            assert max(abs(value) for row in whole["advantages"] for value in row) > 0.5
        for each in two:  # both have the same critic, bit for bit
            assert resumable.differences(two[0]["critic"], each["critic"]) == []
            assert resumable.differences(two[0]["parameters"], each["parameters"]) == []
        check_close(run, one["parameters"], two[0]["parameters"])
        check_close(run, one["critic"], two[0]["critic"])
        if run in ("ppo full", "ppo lora"):  # metrics of a budget are means over the micro-batches of each process
            check_histories(one["history"], two[0]["history"])
            for row, own in zip(one["history"], two[0]["history"], strict=True):
                for metric in (name for name in row if name.startswith(("value/", "ptx_loss"))):
                    assert own[metric] == pytest.approx(row[metric], rel=1e-3, abs=1e-3), metric
        if run == "ppo lora":
            check_references(run, one, two)
            assert [step for step, _, _ in one["refreshes"]] == [2, 4]
            kl_coefs = [row["kl_coef"] for row in one["history"] if "kl_coef" in row]
            assert len(set(kl_coefs)) == len(kl_coefs) == 3


@pytest.mark.supports("exact resume", "PPO, LoRA", on="DDP")
@processes.on_two
def test_two_processes_resume_ppo_exactly_inside_a_window(models: dict[str, Path], tmp_path: Path) -> None:
    """A window is 4 steps, and the checkpoint is inside the second one. Rollouts are sampled."""
    PartialState(cpu=True)
    options: dict[str, Any] = {
        **{"method": "PPO", "num_generations": 1, "beta": 0.0, "kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 64},
        **{"value_warmup_steps": 2, "ptx_coef": 0.2, "ref_model_mixup_alpha": 0.6},
        **{"per_device_train_batch_size": 2, "ref_model_sync_steps": 3, "max_steps": 6, "save_steps": 5},
        "build": {"train_dataset": tiny.dataset(24), "ptx_dataset": runs.TEXTS},
    }
    ends = {}
    for name, checkpoint in (("whole", None), ("resumed", str(tmp_path / "whole/checkpoint-5"))):
        torch.manual_seed(torch.distributed.get_rank())  # a new adapter differs until DDP evens it
        trainer = resumable.build("lora", models["dense"], tmp_path / name, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends[name] = resumable.state(trainer)
    assert resumable.differences(ends["whole"], ends["resumed"]) == []
    assert ends["whole"]["kl_coef"] != options["kl_coef"]
    assert len(ends["whole"]["refreshes"]) == 1
    one, two = gather_object([ends["whole"]["critic"]])
    assert resumable.differences(one, two) == []
