"""Steps with each way to leave out padding."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from benchmarks import padding
from benchmarks.padding import TRL, Bench

from tests.gpu import models
from tests.gpu.places import Place

CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])


def steps(bench: Bench, place: Place, sets: Sequence[str] = padding.SETS) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each set with TRL and each variant of ours, TRL's first."""
    settings = models.bench_options(place)
    for name in sets:
        rollout = bench.source.rollout = padding.rollouts(name, settings)
        for variant, ours in {TRL: {}, **padding.variants(name, rollout, settings)}.items():
            bench.clear(variant)
            yield name, variant, ours
