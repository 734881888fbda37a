"""Where tokens go and what they see, against loops over rows and columns."""

import random

import pytest
import torch

from tests.features.padding_free.tools import packing_of
from tests.oracles import padding as oracles
from tests.oracles.padding import Batch, Name, padded
from trl_steady.features.padding_free.packing import Packing, sequence_lengths

BATCHES: dict[str, Batch] = {
    "as wide as it is": padded([([1, 2], [3, 4]), ([5, 6], [7, 8])]),
    "columns to spare": padded([([1, 2, 3], [4]), ([5], [6, 7])], left=2, right=3),
    "an answer to nothing": padded([([1, 2], [3]), ([], [4, 5])]),
    "one prompt": padded([([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([1, 2, 3], [])], left=1),
    "two prompts in turn": padded([([1, 2, 3], [4]), ([5, 6], [7]), ([1, 2, 3], [8]), ([5, 6], [9, 9])]),
    "a prompt and its end": padded([([1, 2, 3], [4]), ([2, 3], [5]), ([1, 2, 3], [6]), ([2, 3], [7]), ([3], [8])]),
    "a prompt and its start": padded([([1, 2, 3, 4], [4]), ([1, 2], [5]), ([1, 2, 3, 4], [6]), ([1, 2], [7])]),
    "prompts of one token, with padding": padded([([1], [2, 3]), ([1], [4]), ([5, 6], [5]), ([5, 6], [7])]),
    "the pad token in the text": padded([([0, 0, 2], [0, 3]), ([0, 2], [0]), ([0, 0, 2], [0, 0]), ([0, 2], [1])]),
}


def _random(seed: int) -> Batch:
    draw = random.Random(seed)
    # no two end differently after the same start: such prompts may share that start or not
    prompts = [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], [4, 4], [0, 0, 4], [1, 1, 1, 4]]
    rows = [(draw.choice(prompts), [draw.randrange(9) for _ in range(draw.randrange(5))]) for _ in range(8)]
    return padded(rows, left=draw.randrange(3), right=1 + draw.randrange(3))


BATCHES |= {f"random {seed}": _random(seed) for seed in range(6)}


SHARED = pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])


def _names(packing: Packing) -> list[Name]:
    return list(zip(packing.rows.tolist(), packing.columns.tolist(), strict=True))


def _sees(packing: Packing) -> torch.Tensor:
    """(N, N), spelled out from the segments."""
    sees = torch.zeros(len(packing.rows), len(packing.rows), dtype=torch.bool)
    for segment in packing.segments:
        for query in range(segment.start, segment.end):
            sees[query, segment.start : query + 1] = True
            if segment.prefix is not None:
                sees[query, segment.prefix] = True
    return sees


@SHARED
@pytest.mark.parametrize("name", BATCHES)
def test_a_packed_batch_is_that_of_the_oracle(name: str, shared: bool) -> None:
    """Its tokens, what each of them sees, and where the predictions go."""
    batch = BATCHES[name]
    packing, segments = packing_of(batch, shared), oracles.segments(batch, shared)
    names = _names(packing)
    assert sorted(names) == sorted(name for segment in segments for name in segment.names)
    borders = [0, *(segment.end for segment in packing.segments)]
    assert [segment.start for segment in packing.segments] == borders[:-1] and borders[-1] == len(names)
    assert all(segment.end > segment.start for segment in packing.segments)
    assert all(s.prefix is None or s.prefix.start < s.prefix.stop <= s.start for s in packing.segments)
    assert _sees(packing).tolist() == oracles.visible(names, segments).tolist()
    assert packing.gather(batch.ids).tolist() == [[int(batch.ids[name]) for name in names]]
    predictions = [float(index + 1) for index in range(len(names) - 1)]
    scattered = packing.scatter_predictions(torch.tensor([predictions]), (batch.shape[0], batch.shape[1] - 1))
    assert scattered.tolist() == oracles.scatter(predictions, names, segments, batch.shape)
    predicted = scattered[:, batch.prompt_columns - 1 :]
    follows = batch.mask[:, batch.prompt_columns - 1 : -1].bool() & batch.mask[:, batch.prompt_columns :].bool()
    assert torch.equal(predicted != 0, follows) and len(predicted.unique()) == follows.sum() + (~follows).any()


def test_by_hand() -> None:
    """Row 0 is `. a b | c d`, row 1 is `x y z | w .`, and row 2 asks what row 0 does."""
    batch = padded([([1, 2], [3, 4]), ([7, 8, 9], [6]), ([1, 2], [5])])
    apart = packing_of(batch, False)
    assert apart.gather(batch.ids).tolist() == [[1, 2, 3, 4, 7, 8, 9, 6, 1, 2, 5]]
    assert apart.columns.tolist() == [1, 2, 3, 4, 0, 1, 2, 3, 1, 2, 3]
    shared = packing_of(batch, True)
    assert sorted(shared.gather(batch.ids)[0].tolist()) == [1, 2, 2, 3, 4, 5, 6, 7, 8, 9]
    prefixes = [segment.prefix for segment in shared.segments if segment.prefix is not None]
    assert len(prefixes) == 2 and prefixes[0] == prefixes[1]
    assert shared.gather(batch.ids)[0, prefixes[0]].tolist() == [1]
    said = torch.tensor([[10.0, 20, 30, 40, 50, 60, 70, 80, 90, 100]])
    assert apart.scatter_predictions(said, (3, 4)).tolist() == [[0, 10, 20, 30], [50, 60, 70, 0], [0, 90, 100, 0]]


@SHARED
def test_padding_may_hold_any_token(shared: bool) -> None:
    """Prompts of the same tokens share, whatever stands before them; those of other tokens do not."""
    batch = padded([([1, 2, 3], [4]), ([2, 3], [5]), ([2, 3], [6]), ([1, 2, 3], [7])], left=1, right=1)
    for filler in (0, 1, 2):
        ids = batch.ids.where(batch.mask.bool(), filler)
        ids[1, 1] = 1  # the padded row now reads like the longer prompt
        other = batch.with_ids(ids)
        assert _names(packing_of(other, shared)) == _names(packing_of(batch, shared))
        assert list(packing_of(other, shared).segments) == list(packing_of(batch, shared).segments)


def test_padding_between_tokens_is_found() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 1, 1]])
    assert sequence_lengths(mask[:1], prompt_width=2) == [(1, 2, -1)]
    assert sequence_lengths(mask, prompt_width=2) is None
    assert sequence_lengths(mask.flip(1), prompt_width=3) is None
    assert sequence_lengths(torch.tensor([[1, 0, 1, 1]]), prompt_width=2) is None  # at the right of a prompt
