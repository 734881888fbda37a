"""Passes without padding: TRL's loss and gradients, with each attention function that packs sequences."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks import padding
from benchmarks.padding import TRL, Bench, Outcome
from torch import Tensor

from tests.gpu import models
from tests.gpu.padded import CHECKPOINTING, steps
from tests.gpu.places import KERNELS, Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools.headroom import within

PADDED = ("lognormal", "long prompts")  # the sets in which sequences are packed


def outcomes(bench: Bench, place: Place, sets: Sequence[str] = padding.SETS) -> Iterator[tuple[str, str, Outcome]]:
    for name, variant, ours in steps(bench, place, sets):
        yield name, variant, bench.outcome(variant, bench.window(variant, ours))


def built(folder: Path, place: Place, *, checkpointing: bool = False, weights: str = "float32", bf16: bool) -> Bench:
    """Both trainers on one model. accelerate keeps one precision for all trainers of a process: that of the last."""
    if not (folder / "config.json").exists():
        models.save_model(folder, place.choose(models.SMALL, models.MIDDLE))
    return Bench(
        folder,
        models.bench_options(place, checkpointing=checkpointing),
        **{**place.arguments, "bf16": bf16, "model_init_kwargs": {"dtype": weights, "attn_implementation": "sdpa"}},
    )


def true_gradients(folder: Path, place: Place, *, checkpointing: bool = False) -> dict[str, list[Tensor]]:
    """Those of TRL in float32, for each set."""
    bench = built(folder, place, checkpointing=checkpointing, bf16=False)
    return {
        name: [each.clone() for each in outcome.gradients]
        for name, variant, outcome in outcomes(bench, place)
        if variant == TRL
    }


@everywhere(slow=True)
@CHECKPOINTING
def test_in_float32_a_step_is_trls_within_rounding(
    place: Place, tmp_path: Path, checkpointing: bool, figures: Figures
) -> None:
    theirs: dict[str, Outcome] = {}
    for name, variant, outcome in outcomes(built(tmp_path, place, checkpointing=checkpointing, bf16=False), place):
        if variant == TRL:
            theirs[name] = outcome
            continue
        found = padding.difference(outcome, theirs[name])
        # float32 has 24 bits, 6e-8; sums over some thousand tokens are taken in another order
        assert within(found.loss, 1e-4) and within(found.gradient, 1e-4)
        figures(f"{name}, {variant}: gradient, largest difference from TRL's", found.gradient, "")


@everywhere(slow=True)
@CHECKPOINTING
def test_in_bf16_a_step_is_as_near_to_float32_as_trls(
    place: Place, tmp_path: Path, checkpointing: bool, figures: Figures
) -> None:
    place.need_bf16()
    true = true_gradients(tmp_path, place, checkpointing=checkpointing)
    theirs: dict[str, float] = {}
    for name, variant, outcome in outcomes(built(tmp_path, place, checkpointing=checkpointing, bf16=True), place):
        off = models.apart(outcome.gradients, true[name])
        figures(f"{name}, {variant}: gradient, distance from float32 of its length", off, "")
        if variant == TRL:
            theirs[name] = off
        # both are draws of the same rounding, whose size differs from draw to draw by much less than a factor of 3
        assert off < 3 * theirs[name]


@everywhere(slow=True)
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_is_as_near_to_float32_as_trls_padded_pass(
    place: Place, tmp_path: Path, name: str, figures: Figures
) -> None:
    """With weights in bf16. TRL's passes are padded and by "sdpa"."""
    place.need_kernel(name)
    true = true_gradients(tmp_path, place)
    bench = built(tmp_path, place, weights="bfloat16", bf16=True)
    ours, theirs = bench.trainers["trl_steady"], dict[str, float]()
    with place.kernel(name, ours.model, ours.ref_model), place.counted_varlen() as calls:
        for of_set, variant, outcome in outcomes(bench, place, PADDED):
            off = models.apart(outcome.gradients, true[of_set])
            figures(f"{of_set}, {variant}: gradient, distance from float32 of its length", off, "")
            if variant == TRL:
                theirs[of_set] = off
            assert off < 3 * theirs[of_set]  # draws of the same rounding, as above
        has_varlen = place.has_varlen
    if calls is not None:
        assert bool(calls.call_count) == (name == "sdpa" and has_varlen)
        figures("calls of torch's varlen_attn", calls.call_count, "calls")
