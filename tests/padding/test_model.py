"""A model without its padding, against each sequence by itself, and against the padded model."""

import pytest
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from tests.oracles import padding as oracles
from tests.oracles.padding import Batch
from tests.tools.headroom import within
from tests.tools.packed import (
    BATCHES,
    MODELS,
    RAGGED,
    SIZES,
    WAYS,
    WINDOW,
    WINDOWED,
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
        for own, should in zip(got, expected, strict=True):
            torch.testing.assert_close(own, should, **rounding)
        if not any(answers.requires_grad for answers in expected):
            return
        gradients, should_be = gradients_of(model, got), gradients_of(model, expected)
        assert gradients.keys() == should_be.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, should_be[parameter], **rounding)

    def test_by_the_head_of_trl(self, batch: Batch, share: bool) -> None:
        """With a temperature, which the head applies."""
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
        add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
        got = answers_of(unpadded(model, batch, share=share), batch)
        for own, should in zip(got, oracles.alone(model, batch, temperature=0.7), strict=True):
            torch.testing.assert_close(own, should.float(), rtol=2e-4, atol=2e-4)
        said = batch.mask[:, batch.prompt_columns :].bool()
        assert bool((got[0][said] < 0).all())
        assert not got[0][~said].any() and not got[1][~said].any()

    @pytest.mark.parametrize(("name", "implementation"), [way for way in WAYS if way[0] in WINDOWED])
    def test_the_window_is_shorter_than_the_sequences(self, name: str, implementation: str) -> None:
        """Or the tests above would see no window."""
        model, wide = (model_of(name, implementation, sliding_window=window) for window in (WINDOW, 64))
        with torch.no_grad():
            short, long = (answers_of(unpadded(m, RAGGED), RAGGED)[0] for m in (model, wide))
        assert not within((short[1] - long[1]).abs(), 1e-3)
        assert within((short[0, :1] - long[0, :1]).abs(), 1e-5)  # 3 tokens before it

    @pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("mistral", "eager")])
    def test_under_autocast(self, name: str, implementation: str, share: bool) -> None:
        """As near to the exact values as the sequences by themselves are."""
        batch = BATCHES["two prompts in turn"]
        model = model_of(name, implementation)
        with torch.no_grad():
            exact = oracles.alone(model, batch)[0]
            with torch.autocast("cpu", torch.bfloat16):
                got = answers_of(unpadded(model, batch, share=share), batch)[0]
                alone = oracles.alone(model, batch)[0]
        near, nearest = float((got - exact).square().sum()), float((alone - exact).square().sum())
        assert 0 < near < 4 * nearest

    def test_without_entropies(self, share: bool) -> None:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
        add_fused_lm_head(model, outputs=("log_probs",))
        outputs = unpadded(model, RAGGED, share=share)(
            input_ids=RAGGED.ids, attention_mask=RAGGED.mask, labels=RAGGED.labels, fused_lm_head=True
        )
        assert outputs.entropy is None
        width = RAGGED.shape[1] - RAGGED.prompt_columns
        expected = oracles.alone(model, RAGGED)[0].float()
        torch.testing.assert_close(outputs.log_probs[:, -width:], expected, rtol=2e-4, atol=2e-4)


class TestKeptApart:
    """Bit for bit, so that not even a weight of 1e-30 goes from one sequence to another."""

    @pytest.mark.parametrize(("name", "implementation"), WAYS)
    def test_padding_may_hold_any_token(self, name: str, implementation: str, share: bool) -> None:
        model, batch = model_of(name, implementation), RAGGED
        draw = torch.Generator().manual_seed(6)
        called = unpadded(model, batch, share=share)
        with torch.no_grad():
            expected = answers_of(called, batch)
            for _ in range(2):
                noise = torch.randint(SIZES["vocab_size"], batch.shape, generator=draw)
                got = answers_of(called, batch.with_ids(batch.ids.where(batch.mask.bool(), noise)))
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

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
