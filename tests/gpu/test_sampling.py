"""Kept tokens of transformers' generation on CUDA: sets, training, and memory. Not yet run on a GPU.

    python -m pytest tests/gpu/test_sampling_cuda.py -m gpu -s

prints the memory that a recording holds. `tests/trainers/test_on_gpu.py` runs the same trainers on a pretended GPU.
"""

from pathlib import Path

import pytest
import torch
from tests.tools import tiny
from transformers import AutoModelForCausalLM

from trl_steady.sampling.recording import KeptMass
from trl_steady.sampling.recording import SetRecording as Recording

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
TOP_K = 5


def test_sets_are_the_finite_scores_of_generate(models: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["dense"]).eval().cuda()
    ids = torch.tensor([[50, 51, 52], [60, 61, 62]], device="cuda")
    recording, mass = Recording(), KeptMass(1.0)
    with recording.listening(model), mass.listening(model):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_p=0.8,
            top_k=0,
            max_new_tokens=8,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    completions = out.sequences[:, 3:].tolist()
    finite = [(scores > -torch.inf).tolist() for scores in out.scores]
    expected = [[i for i, own in enumerate(finite[step][row]) if own] for row in range(2) for step in range(8)]
    assert [sorted(own) for own in recording.of(completions).lists()] == expected
    measured = mass.of(completions)
    assert measured is not None and measured[0].min() >= 0.8 - 1e-6  # rounding of a sum in float32


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_run_with_the_mask(models: dict[str, Path], tmp_path: Path, by_tokens: bool) -> None:
    options = {"token_budget": 60, "share_prompts": True} if by_tokens else {}
    trainer = tiny.trainer(
        models["dense"], tmp_path, keep_sampling_mask=True, top_k=TOP_K, beta=0.1, use_cpu=False, **options
    )
    tiny.train(trainer)
    first, *others = [row for row in trainer.state.log_history if "loss" in row]
    assert first["sampling_mask/kept_tokens"] == TOP_K and first["sampling_mask/fallback"] == 0
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in (first, *others))


def test_without_the_mask_the_first_rollout_says_how_far_off_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, top_p=0.8, use_cpu=False, max_steps=1)
    with pytest.warns(UserWarning, match=r"the kept tokens had 0\.[89]"):
        trainer.train()


def test_a_recording_does_not_hold_the_tokens_of_every_step() -> None:
    """Views of `input_ids` held 0.5 GB here."""
    sequences, steps, vocabulary = 64, 1_000, 2_000
    recording = Recording()
    scores = torch.full((sequences, vocabulary), -torch.inf, device="cuda")
    scores[:, :TOP_K] = 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for step in range(steps):
        recording.add(torch.ones(sequences, 500 + step, dtype=torch.long, device="cuda"), scores)
    held = torch.cuda.memory_allocated() - before
    print(f"{torch.cuda.get_device_name()}: {held:,} bytes on the device after {steps} steps")
    assert held <= 2 * steps * 8 * sequences  # a token of each sequence at each step, in blocks of 512 bytes
