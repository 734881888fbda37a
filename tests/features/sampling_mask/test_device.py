"""Candidates on a pretended GPU: no operation mixes devices, results are the CPU's, and little memory is kept."""

import itertools

import torch
from torch import Tensor

from tests.tools.devices import CUDA, bytes_held, pretended_gpu
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.recording import CandidateRecorder

SEQUENCES, PROMPT, STEPS, VOCABULARY = 3, 5, 40, 60
COMPLETIONS = [[7] * STEPS, [7] * 3, [7] * 11]


def candidates() -> Tensor:
    """(steps, B, V), with token 7 and 0 to 9 more in each set."""
    draws = torch.rand(STEPS, SEQUENCES, VOCABULARY, generator=torch.Generator().manual_seed(0))
    kept = draws < torch.linspace(0, 0.15, STEPS)[:, None, None]
    kept[:, :, 7] = True
    return kept


def generated(device: torch.device | str) -> CandidateRecorder:
    """What has been recorded when transformers has drawn token 7 everywhere, each step with tensors of its own."""
    recorder = CandidateRecorder()
    for step, kept in enumerate(candidates()):
        input_ids = torch.full((SEQUENCES, PROMPT + step), 7).to(device)
        recorder(input_ids, torch.zeros(kept.shape).where(kept, -torch.inf).to(device))
    return recorder


def test_sets_of_a_gpu_are_those_of_the_cpu_and_all_that_a_recording_holds() -> None:
    expected = lists(generated("cpu").candidates(COMPLETIONS))
    with pretended_gpu():
        on_gpu = generated(CUDA)
        sets = on_gpu.candidates(COMPLETIONS)
        assert sets.has(torch.tensor(list(itertools.chain(*COMPLETIONS)))).all()
        assert lists(sets) == expected
        trained = CandidateSets.cat([sets]).to(CUDA).take(torch.tensor([0, -1, 2], device=CUDA))
        assert lists(trained) == [expected[0], [], expected[2]]
        assert bytes_held(on_gpu) == 8 * (SEQUENCES + 1) * STEPS + 4 * int(candidates().sum())
    mask = candidates()
    tokens = [(step, row) for row, each in enumerate(COMPLETIONS) for step in range(len(each))]
    assert expected == [mask[place].nonzero().flatten().tolist() for place in tokens]
