"""Whole recipes and benchmarks on CUDA, with SmolLM2's weights. They take minutes: not in `make test-gpu`.

    python -m pytest tests/gpu/test_recipes.py -m slow -s

prints what belongs into the results of the recipes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def trained(recipe: str, config: str, output: Path) -> dict[str, Any]:
    """Run a recipe in bf16. Return its results."""
    command = [f"recipes/{recipe}/train.py", "--config", f"recipes/{recipe}/{config}", "--bf16", "true"]
    subprocess.run([sys.executable, *command, "--output_dir", str(output)], check=True, cwd=ROOT)
    results = json.loads((output / "results.json").read_text())
    print(json.dumps({key: results[key] for key in ("device", "versions", "accuracy", "seconds")}, indent=1))
    return results


def test_the_gspo_recipe_learns_in_bf16(tmp_path: Path) -> None:
    results = trained("gspo", "smollm2-135m-comparison.yaml", tmp_path)
    assert results["accuracy"]["sampled at temperature 1, 4 each"]["low"] > 0


def test_the_iterative_recipe_learns(tmp_path: Path) -> None:
    results = trained("iterative_grpo", "smollm2-135m.yaml", tmp_path)
    refreshes = [row for row in results["history"] if "ref/refresh_step" in row]
    assert len(refreshes) >= 2 and all(row["kl"] == 0.0 for row in refreshes)


@pytest.mark.parametrize("benchmark", [("seam.py", "--smollm2", "--batch", "32"), ("reference.py",)], ids="_".join)
def test_a_benchmark_beside_trl_ends(benchmark: tuple[str, ...]) -> None:
    """It prints figures to record."""
    command = [sys.executable, f"benchmarks/{benchmark[0]}", *benchmark[1:]]
    ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    print(ended.stdout)
    assert "ours" in ended.stdout
