"""What is read off a mask. Where tokens go is in `test_model`."""

import torch

from tests.features.padding_free.tools import packing_of
from tests.oracles.padding import padded
from trl_steady.features.padding_free.packing import sequence_lengths


def test_padding_may_hold_any_token(share: bool) -> None:
    """Prompts of the same tokens share, whatever stands before them; those of other tokens do not."""
    batch = padded([([1, 2, 3], [4]), ([2, 3], [5]), ([2, 3], [6]), ([1, 2, 3], [7])], left=1, right=1)
    for filler in (0, 1, 2):
        ids = batch.ids.where(batch.mask.bool(), filler)
        ids[1, 1] = 1  # the padded row now reads like the longer prompt
        other = batch.with_ids(ids)
        packing, expected = packing_of(other, share), packing_of(batch, share)
        assert torch.equal(packing.rows, expected.rows) and torch.equal(packing.columns, expected.columns)
        assert packing.segments == expected.segments


def test_padding_between_tokens_is_found() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 1, 1]])
    assert sequence_lengths(mask[:1], prompt_width=2) == [(1, 2, -1)]
    assert sequence_lengths(mask, prompt_width=2) is None
    assert sequence_lengths(mask.flip(1), prompt_width=3) is None
    assert sequence_lengths(torch.tensor([[1, 0, 1, 1]]), prompt_width=2) is None  # at the right of a prompt
