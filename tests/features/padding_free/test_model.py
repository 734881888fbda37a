"""A model without its padding, against each sequence by itself, which has nobody to attend to by mistake."""

import pytest
import torch

from tests.features.padding_free.tools import BATCHES, WAYS, answers_of, exact, gradients_of, model_of, unpadded
from tests.oracles import padding as oracles
from tests.oracles.padding import Batch


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
def test_without_padding_as_each_sequence_alone(name: str, implementation: str, batch: Batch, share: bool) -> None:
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
