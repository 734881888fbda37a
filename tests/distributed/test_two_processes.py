"""Two processes (gloo, CPU) and one process with the same global batch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import train

GLOBAL_BATCH = 8


def launch(processes: int, model: Path, output: Path, loss_type: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    output.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # without an MPI, `accelerate launch --cpu` starts one process whatever it is told; --multi_gpu is torchrun
    launcher = ["-m", "accelerate.commands.launch", "--cpu" if processes == 1 else "--multi_gpu"]
    launcher += ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    launcher += ["--main_process_port", str(port), "--num_cpu_threads_per_process", "1"]
    script = ["-m", train.__name__, str(model), str(output), loss_type, str(GLOBAL_BATCH)]
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ACCELERATE_USE_CPU": "true"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((output / "history.json").read_text())
    assert (written["processes"], written["backend"]) == (processes, "gloo" if processes > 1 else None)
    return torch.load(output / "parameters.pt"), written["history"]


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
def test_two_processes_train_as_one_does(models: dict[str, Path], tmp_path: Path, loss_type: str) -> None:
    one, history_one = launch(1, models["dense"], tmp_path / "one", loss_type)
    two, history_two = launch(2, models["dense"], tmp_path / "two", loss_type)
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=1e-4, atol=2e-6), name
    assert len(history_one) == len(history_two) == 7
    for row_one, row_two in zip(history_one, history_two, strict=True):
        for metric in ("kl", "ratio/sequence_min", "ratio/sequence_mean", "ratio/sequence_max", "reward"):
            if metric in row_one:
                assert row_two[metric] == pytest.approx(row_one[metric], rel=1e-3, abs=1e-6), metric
    assert any(row.get("ratio/sequence_max", 1) > 1.001 for row in history_one)
