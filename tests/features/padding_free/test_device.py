"""Packing on a pretended GPU: no transfer for each row of a batch."""

import pytest
import torch

from tests.tools.devices import CUDA, pretended_gpu
from trl_steady.features.padding_free.packing import pack, sequence_lengths

PROMPT, WIDTH = 4, 9


@pytest.mark.parametrize("shares", [False, True])
def test_packing_waits_for_the_gpu_as_often_for_many_rows_as_for_few(shares: bool) -> None:
    """Groups of three answers to a prompt, of unequal lengths."""
    waits = []
    for groups in (2, 8):
        rows, columns = torch.arange(3 * groups).unsqueeze(-1), torch.arange(WIDTH)
        mask = (columns >= rows // 3 % PROMPT) & (columns < PROMPT + 1 + rows % (WIDTH - PROMPT))
        ids = torch.where(columns < PROMPT, 10 * (rows // 3), 100 * rows) + columns
        with pretended_gpu() as gpu:
            lengths = sequence_lengths(mask.to(CUDA), prompt_width=PROMPT, input_ids=ids.to(CUDA) if shares else None)
            assert lengths is not None
            read = len(gpu.waits)
            packing = pack(lengths, prompt_width=PROMPT, device=torch.device(CUDA))
            assert packing.rows.device == packing.columns.device == torch.device(CUDA)
            assert len(gpu.waits) == read
            waits.append(len(gpu.waits))
    assert waits[0] == waits[1]
