"""The GSPO recipe and the seam's cost on CUDA. Not yet run on a GPU.

    python -m pytest tests/gpu -m gpu -s

prints what belongs into recipes/gspo/results: device, versions, tokens a second and peak memory of ours and of TRL.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_the_recipe_learns_in_bf16_on_cuda(tmp_path: Path) -> None:
    config = ROOT / "recipes/gspo/smollm2-135m-comparison.yaml"
    command = ["recipes/gspo/train.py", "--config", str(config), "--bf16", "true", "--output_dir", str(tmp_path)]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    results = json.loads((tmp_path / "results.json").read_text())
    print(json.dumps({key: results[key] for key in ("device", "versions", "accuracy", "seconds")}, indent=1))
    assert results["accuracy"]["sampled at temperature 1, 4 each"]["low"] > 0


def test_ours_beside_trl_on_the_same_rollouts() -> None:
    """Figures to record, not to assert."""
    subprocess.run([sys.executable, "tests/benchmarks/seam.py", "--smollm2", "--batch", "32"], check=True, cwd=ROOT)
