"""The moving reference on CUDA. Not yet run on a GPU.

    python -m pytest tests/gpu/test_iterative_cuda.py -m gpu -s

prints what belongs into recipes/iterative_grpo/results: device, versions, accuracy, and the time of a refresh.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reference.test_reference import MOVING, base_tensors
from tests.tools import tiny
from tests.tools import wide as wide_model

from trl_steady.reference.part import ReferencePart
from trl_steady.reference.tensors import move

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_the_recipe_learns_on_cuda(tmp_path: Path) -> None:
    config = ROOT / "recipes/iterative_grpo/smollm2-135m.yaml"
    command = [
        "recipes/iterative_grpo/train.py",
        "--config",
        str(config),
        "--bf16",
        "true",
        "--output_dir",
        str(tmp_path),
    ]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    results = json.loads((tmp_path / "results.json").read_text())
    print(json.dumps({key: results[key] for key in ("device", "versions", "accuracy", "seconds")}, indent=1))
    refreshes = [row for row in results["history"] if "ref/refresh_step" in row]
    assert len(refreshes) >= 2 and all(row["kl"] == 0.0 for row in refreshes)


@pytest.mark.parametrize("base", wide_model.BASES)
def test_the_base_stays_and_the_reference_moves(wide: Path, tmp_path: Path, base: str) -> None:
    options: dict[str, Any] = {**MOVING, "max_steps": 50, "use_cpu": False, "bf16": True}
    trainer = tiny.trainer(wide_model.load(wide, base, device="cuda:0"), tmp_path, lora=True, **options)
    before = [value.clone() for value in base_tensors(trainer.model)]
    trainer.train()
    after = base_tensors(trainer.model)
    assert len(after) == len(before) and all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    assert [step for step, _, _ in trainer.reference_refreshes] == list(range(4, 50, 4))
    pairs = trainer.part(ReferencePart).callback.pairs()
    move(pairs, 1.0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    move(pairs, 1.0)
    torch.cuda.synchronize()
    print(
        f"{torch.cuda.get_device_name()}: a refresh of {len(pairs)} tensors took {time.perf_counter() - started:.6f} s"
    )
    assert all(torch.equal(pair.policy, pair.reference) for pair in pairs)


def test_what_a_reference_costs() -> None:
    """Figures to record, not to assert."""
    subprocess.run([sys.executable, "tests/benchmarks/reference.py"], check=True, cwd=ROOT)
