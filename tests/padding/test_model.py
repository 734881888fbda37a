"""A model without its padding, against each sequence by itself, and against the padded model."""

import pytest
import torch

from tests.oracles import padding as oracles
from tests.oracles.padding import Batch
from tests.tools.packed import (
    BATCHES,
    SIZES,
    WAYS,
    answers_of,
    exact,
    gradients_of,
    model_of,
    unpadded,
)


class TestValues:
    """Against each sequence by itself, which has no padding and nobody to attend to by mistake."""

    @pytest.mark.parametrize(
        ("name", "implementation", "batch", "share"),
        [
            (*WAYS[(number + 3 * share) % len(WAYS)], batch, share)
            for number, batch in enumerate(BATCHES.values())
            for share in (False, True)
        ]
        + [(*way, BATCHES[name], True) for way in WAYS for name in ("two prompts in turn", "ragged")],
    )
    @pytest.mark.usefixtures("all_in_float64")
    def test_as_each_sequence_alone(self, name: str, implementation: str, batch: Batch, share: bool) -> None:
        model = model_of(name, implementation, torch.float64)
        got = answers_of(unpadded(model, batch, share=share, called=exact(model)), batch)
        expected = oracles.alone(model, batch)
        rounding = {"rtol": 1e-9, "atol": 1e-11}
        for values, should in zip(got, expected, strict=True):
            torch.testing.assert_close(values, should, **rounding)
        if not any(answers.requires_grad for answers in expected):
            return
        gradients, should_be = gradients_of(model, got), gradients_of(model, expected)
        assert gradients.keys() == should_be.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, should_be[parameter], **rounding)


class TestKeptApart:
    """Bit for bit, so that not even a weight of 1e-30 goes from one sequence to another."""

    @pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma3", "eager")])
    def test_another_token_in_one_sequence(self, name: str, implementation: str, share: bool) -> None:
        """Its own answers change from there on, and those of the others do not. Experts' sums would be reordered."""
        batch = BATCHES["two prompts in turn"]
        model = model_of(name, implementation)
        called = unpadded(model, batch, share=share)
        with torch.no_grad():
            expected = answers_of(called, batch)[1]
            for row in range(batch.shape[0]):
                column = batch.prompt_columns
                ids = batch.ids.clone()
                ids[row, column] = (ids[row, column] + 1) % SIZES["vocab_size"]
                got = answers_of(called, batch.with_ids(ids))[1]
                changed = [[bool(value) for value in values] for values in got != expected]
                later = [place > 0 and bool(batch.mask[row, column + place]) for place in range(len(changed[row]))]
                assert changed == [later if other == row else [False] * len(later) for other in range(len(changed))]
