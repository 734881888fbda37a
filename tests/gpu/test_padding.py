"""Passes without padding on CUDA: TRL's loss and gradients, and no more memory. Not yet run on a GPU.

    python -m pytest tests/gpu/test_padding.py -m gpu -s

prints the differences and the memory; `python tests/benchmarks/padding.py --large` measures the time.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks import padding
from tests.benchmarks.padding import TRL, Bench, Outcome
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])


def options(checkpointing: bool) -> argparse.Namespace:
    return argparse.Namespace(
        batch=8, window=4, scale=1.0, variants=None, random=True, large=False, checkpointing=checkpointing
    )


def steps(bench: Bench, settings: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each set with TRL and each variant of ours, TRL's first."""
    for name in padding.SETS:
        rollout = bench.source.rollout = padding.rollouts(name, settings)
        for variant, ours in {TRL: {}, **padding.variants(name, rollout, settings)}.items():
            trainer = bench.trainer(variant)
            trainer._buffered_inputs = None  # the rollout of the step before
            bench.clear(variant)
            yield name, variant, ours


def outcomes(bench: Bench, settings: argparse.Namespace) -> Iterator[tuple[str, str, Outcome]]:
    for name, variant, ours in steps(bench, settings):
        yield name, variant, bench.outcome(variant, bench.window(variant, ours))


def distance(own: list[Tensor], true: list[Tensor]) -> float:
    """Of the gradients, relative to the length of the true one."""
    pairs = list(zip(own, true, strict=True))
    off = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (off / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


@CHECKPOINTING
def test_in_float32_a_step_is_trls_within_rounding(tmp_path: Path, checkpointing: bool) -> None:
    settings = options(checkpointing)
    padding.save_model(tmp_path, settings)
    theirs: dict[str, Outcome] = {}
    for name, variant, outcome in outcomes(Bench(tmp_path, settings, bf16=False), settings):
        if variant == TRL:
            theirs[name] = outcome
            continue
        apart = padding.difference(outcome, theirs[name])
        print(f"{name}, {variant}: {padding.told(apart)}")
        assert apart.loss < 1e-4 and apart.gradient < 1e-4


@CHECKPOINTING
def test_in_bf16_a_step_is_as_near_to_float32_as_trls(tmp_path: Path, checkpointing: bool) -> None:
    settings = options(checkpointing)
    padding.save_model(tmp_path, settings)
    true = {  # before the others are built: accelerate keeps one precision for all trainers of a process
        name: outcome.gradients
        for name, variant, outcome in outcomes(Bench(tmp_path, settings, bf16=False), settings)
        if variant == TRL
    }
    theirs: dict[str, float] = {}
    for name, variant, outcome in outcomes(Bench(tmp_path, settings, bf16=True), settings):
        off = distance(outcome.gradients, true[name])
        print(f"{name}, {variant}: gradient off by {off:.1e} of its length")
        if variant == TRL:
            theirs[name] = off
        assert off < 3 * theirs[name]


@CHECKPOINTING
def test_a_step_takes_no_more_memory_than_trls(tmp_path: Path, checkpointing: bool) -> None:
    settings = options(checkpointing)
    padding.save_model(tmp_path, settings)
    bench = Bench(tmp_path, settings)
    theirs: dict[str, int] = {}
    for name, variant, ours in steps(bench, settings):
        bench.window(variant, ours)  # a first step may leave work space behind
        bench.clear(variant)
        bench.trainer(variant)._buffered_inputs = None
        _, peak = padding.peak_bytes(lambda v=variant, o=ours: bench.window(v, o))
        print(f"{name}, {variant}: peak {peak / 2**20:,.1f} MiB above resident")
        if variant == TRL:
            theirs[name] = peak
        assert peak <= theirs[name] * 1.01  # equal lengths: the same but for the allocator's blocks
