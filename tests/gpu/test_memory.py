"""Peak memory of a step beside TRL's, and of a recording of kept tokens."""

from pathlib import Path

import torch
from benchmarks import padding
from benchmarks.padding import TRL

from tests.gpu import models
from tests.gpu.padded import CHECKPOINTING, steps
from tests.gpu.places import Place, everywhere
from tests.gpu.recorder import Figures
from tests.tools.devices import bytes_held
from trl_steady.features.sampling_mask.recording import CandidateRecorder

MIB = 2**20


@everywhere(slow=True)
@CHECKPOINTING
def test_a_step_takes_no_more_memory_than_trls(
    place: Place, tmp_path: Path, checkpointing: bool, figures: Figures
) -> None:
    place.need_bf16()
    models.save_model(tmp_path, place.choose(models.SMALL, models.LARGE))
    settings = models.bench_options(place, checkpointing=checkpointing)
    bench = padding.Bench(tmp_path, settings, **{**place.arguments, "bf16": place.is_cuda})
    theirs: dict[str, int] = {}
    for name, variant, ours in steps(bench, place):
        bench.window(variant, ours)  # a first step may leave work space behind
        bench.clear(variant)
        _, peak = padding.peak_bytes(lambda v=variant, o=ours: bench.window(v, o))
        figures(f"{name}, {variant}: peak above resident", peak / MIB, "MiB")
        if variant == TRL:
            theirs[name] = peak
        assert peak > 0
        # the allocator rounds blocks up, and a packed row also has tables of its sequences; nothing is saved where the
        # batch is not padded
        assert peak <= theirs[name] * 1.05
        if name == "lognormal" and variant != TRL:  # 35 % of the tokens, and logits, are real
            # gradients and bf16 copies are most of the peak of a large model with checkpointing: 0.94 by the formula
            most = 1.0 if place.is_cuda and checkpointing else 0.8
            assert peak < most * theirs[name]


@everywhere
def test_a_recording_does_not_hold_the_tokens_of_every_step(place: Place, figures: Figures) -> None:
    """Views of `input_ids` held 0.5 GB here."""
    sequences, steps, vocabulary, kept = place.choose((4, 50, 100, 5), (64, 1_000, 2_000, 5))
    recorder = CandidateRecorder()
    scores = torch.full((sequences, vocabulary), -torch.inf, device=place.device)
    scores[:, :kept] = 0.0
    before = torch.cuda.memory_allocated() if place.is_cuda else 0
    for step in range(steps):
        recorder(torch.ones(sequences, 500 + step, dtype=torch.long, device=place.device), scores)
    held = torch.cuda.memory_allocated() - before if place.is_cuda else bytes_held(recorder)
    assert held > 0 or place.is_cuda  # the sets are on the CPU
    if place.is_cuda:
        assert held <= 2 * steps * 8 * sequences  # two numbers of each sequence at each step
    else:
        # the token and the sets of each sequence at each step, which are on the CPU too; `input_ids` are 500 tokens
        assert held <= 2 * steps * sequences * (8 + kept * 8 + 8)
    figures("bytes held of a recording, per step and sequence", held / steps / sequences, "bytes")
