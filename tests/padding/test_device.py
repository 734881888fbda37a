"""Packing on a pretended GPU: the same as on the CPU, and no transfer for each row of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.devices import CUDA, pretended_gpu
from trl_steady.padding.packing import lengths_of, pack

PROMPT, WIDTH = 4, 9


def batch(groups: int) -> tuple[Tensor, Tensor]:
    """Input ids and mask of groups of three answers to a prompt, of unequal lengths."""
    rows = torch.arange(3 * groups)
    columns = torch.arange(WIDTH)
    starts, ends = rows // 3 % PROMPT, PROMPT + 1 + rows % (WIDTH - PROMPT)
    mask = (columns >= starts.unsqueeze(-1)) & (columns < ends.unsqueeze(-1))
    ids = torch.where(columns < PROMPT, 10 * (rows // 3).unsqueeze(-1) + columns, 100 * rows.unsqueeze(-1) + columns)
    return ids, mask.long()


def packed(ids: Tensor, mask: Tensor, *, shares: bool) -> Any:
    lengths = lengths_of(mask, prompt_width=PROMPT, input_ids=ids if shares else None)
    assert lengths is not None
    packing = pack(lengths, prompt_width=PROMPT, device=ids.device)
    values = packing.gather(ids)[:, 1:].double()
    scattered = packing.scatter_predictions(values, (len(ids), WIDTH - 1))
    assert packing.rows.device == packing.columns.device == scattered.device == ids.device
    return packing.rows.tolist(), packing.columns.tolist(), list(packing.segments), scattered.tolist()


@pytest.mark.parametrize("shares", [False, True])
def test_packing_on_a_gpu_is_that_of_the_cpu(shares: bool) -> None:
    ids, mask = batch(groups=3)
    expected = packed(ids, mask, shares=shares)
    with pretended_gpu():
        assert packed(ids.to(CUDA), mask.to(CUDA), shares=shares) == expected


@pytest.mark.parametrize("shares", [False, True])
def test_packing_waits_for_the_gpu_as_often_for_many_rows_as_for_few(shares: bool) -> None:
    waits = []
    for groups in (2, 8):
        ids, mask = batch(groups)
        with pretended_gpu() as gpu:
            lengths = lengths_of(mask.to(CUDA), prompt_width=PROMPT, input_ids=ids.to(CUDA) if shares else None)
            read = len(gpu.waits)
            pack(lengths, prompt_width=PROMPT, device=torch.device(CUDA))
            assert len(gpu.waits) == read
            waits.append(len(gpu.waits))
    assert waits[0] == waits[1]
