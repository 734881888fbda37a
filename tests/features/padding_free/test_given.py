"""Inputs and attention that a model gets without its padding, and what is left of them after a pass."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.features.padding_free.tools import lengths_in
from tests.oracles.padding import Batch, padded
from trl_steady.features.padding_free.model import PaddingFreeModel
from trl_steady.features.padding_free.packing import Segment
from trl_steady.features.padding_free.support import Support


def call(
    batch: Batch, share: bool = False, others: dict[str, Any] | None = None, **changed: Any
) -> tuple[Any, dict[str, Any], list[Sequence[Segment]]]:
    """Return the outputs of a pass, what the model was called with, and the segments in which it attended."""
    given: dict[str, Any] = {}
    entered: list[Sequence[Segment]] = []

    def model(**keywords: Any) -> Any:
        given.update(keywords)
        said = keywords["input_ids"][:, 1:].float()  # each token's id shows from where an output comes back
        return SimpleNamespace(log_probs=said, entropy=said + 100, aux_loss="from the model")

    def attend_within(segments: Sequence[Segment]) -> Any:
        entered.append(segments)
        return contextlib.nullcontext()

    support = {"implementation": "sdpa", "why_not_packed": None, "is_shift_invariant": True, "width_limit": 1e9}
    called = PaddingFreeModel(
        model,
        Support(**{**support, **changed}),
        prompt_width=batch.prompt_columns,
        lengths=iter(lengths_in(batch, share)),
        attend_within=attend_within,
    )
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "labels": batch.labels}
    return called(**inputs, fused_lm_head=True, **(others or {})), given, entered


def test_a_packed_row() -> None:
    batch = padded([([5, 6, 7], [8]), ([9], [4, 10])], left=1, right=1)
    outputs, given, entered = call(batch)
    assert given["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 10]]
    assert given["position_ids"].tolist() == [[1, 2, 3, 4, 3, 4, 5]]  # the columns of the padded batch
    assert given["labels"].tolist() == [[-100, -100, -100, 8, -100, 4, 10]]
    assert given["attention_mask"] is None
    assert [(s.start, s.end, s.prefix) for s in entered[0]] == [(0, 4, None), (4, 7, None)]
    # values return to their columns; no token predicts the first one of a segment
    assert outputs.log_probs.tolist() == [[0, 6, 7, 8, 0, 0], [0, 0, 0, 4, 10, 0]]
    assert outputs.entropy.tolist() == [[0, 106, 107, 108, 0, 0], [0, 0, 0, 104, 110, 0]]
    assert outputs.aux_loss == "from the model"


@pytest.mark.parametrize("is_shift_invariant", [True, False])
def test_columns_that_are_padding_in_every_row_are_cut(is_shift_invariant: bool) -> None:
    """A model that cannot be packed loses them at both ends, or at the right only if a shift would change it."""
    batch = padded([([5, 6], [7]), ([8], [9, 10])], left=2, right=3, pad=3)
    outputs, given, entered = call(batch, why_not_packed="a reason", is_shift_invariant=is_shift_invariant)
    left = [] if is_shift_invariant else [3, 3]
    assert not entered and "position_ids" not in given
    assert given["input_ids"].tolist() == [[*left, 5, 6, 7, 3], [*left, 3, 8, 9, 10]]
    no_label = [-100] * len(left)
    assert given["labels"].tolist() == [[*no_label, -100, -100, 7, -100], [*no_label, -100, -100, 9, 10]]
    assert given["attention_mask"].tolist() == [[0 * n for n in left] + row for row in ([1, 1, 1, 0], [0, 1, 1, 1])]
    start = [0, 0] if is_shift_invariant else [3]
    first = [[], []] if is_shift_invariant else [[5], [3]]
    expected = [[*start, *first[0], 6, 7, 3, 0, 0, 0], [*start, *first[1], 8, 9, 10, 0, 0, 0]]
    assert outputs.log_probs.tolist() == expected


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids", "pixel_values"])
def test_other_inputs_are_passed_on_without_packing(name: str, share: bool) -> None:
    """Kinds of tokens are cut like the tokens; images are passed on as they are."""
    batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
    values = torch.arange(batch.ids.numel()).view(batch.shape)
    _, given, entered = call(batch, share, {name: values})
    assert not entered
    assert given["input_ids"].shape == given["attention_mask"].shape == (2, 4)
    assert torch.equal(given[name], values if name == "pixel_values" else values[:, 1:5])


def test_a_batch_with_an_input_that_we_do_not_know_is_left_alone(share: bool) -> None:
    """A later TRL may give some for each column."""
    batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
    values = torch.arange(batch.ids.numel()).view(batch.shape)
    outputs, given, entered = call(batch, share, {"support_ids": values, "token_type_ids": values})
    assert not entered and given["input_ids"] is batch.ids and given["attention_mask"] is batch.mask
    assert given["support_ids"] is given["token_type_ids"] is values
    assert outputs.log_probs.shape == (2, batch.shape[1] - 1)


def test_a_batch_wider_than_the_limit_is_left_alone(share: bool) -> None:
    batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
    for limit, is_whole in ((batch.shape[1] - 1, True), (batch.shape[1], False)):
        outputs, given, entered = call(batch, share, width_limit=limit)
        assert (given["input_ids"] is batch.ids) == (given["attention_mask"] is batch.mask) == is_whole
        assert bool(entered) != is_whole
        assert outputs.log_probs.shape == (2, batch.shape[1] - 1)


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([([5, 6], [7]), ([], [8, 9])], 2),
        ([([], [7]), ([], [8, 9])], 1),  # where the first tokens of the answers are told
    ],
    ids=["one", "all"],
)
def test_an_answer_to_nothing_is_not_packed(rows: Any, first: int, share: bool) -> None:
    """Its first token is told by padding, which a packed row has not."""
    batch = padded(rows, left=2, right=1)
    _, given, entered = call(batch, share)
    assert not entered
    assert torch.equal(given["input_ids"], batch.ids[:, first:-1])


def test_a_batch_without_padding_is_packed_if_its_prompts_are_shared() -> None:
    batch = padded([([5, 6], [7, 8]), ([5, 6], [9, 10])])
    _, given, entered = call(batch, share=True)
    assert len(entered) == 1
    assert sorted(given["input_ids"][0].tolist()) == [5, 6, 6, 7, 8, 9, 10]
