"""Inputs and attention that a model gets without its padding, and what is left of them after a pass."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.oracles.padding import Batch, padded
from tests.tools.packed import (
    BATCHES,
    RAGGED,
    answers_of,
    exact,
    gradients_of,
    model_of,
    unpadded,
)
from trl_steady.padding import attention
from trl_steady.padding.attention import attending_in, switched
from trl_steady.padding.families import Traits, traits
from trl_steady.padding.packing import Segment
from trl_steady.padding.proxy import UnpaddedModel


class TestWhatTheModelGets:
    """A model that only notes what it is called with."""

    @staticmethod
    def _recorder(calls: list[dict[str, Any]]) -> Callable[..., Any]:
        def forward(**keywords: Any) -> Any:
            calls.append(keywords)
            ids = keywords["input_ids"]
            # says of each token its place, so that what comes back shows from where
            told = ids[:, 1:].float()
            return SimpleNamespace(log_probs=told, entropy=told + 100, aux_loss="from the model")

        return forward

    @staticmethod
    def _stub(
        batch: Batch, calls: list[dict[str, Any]], share: bool = False, **changed: Any
    ) -> tuple[UnpaddedModel, list[Sequence[Segment]]]:
        entered: list[Sequence[Segment]] = []

        @contextlib.contextmanager
        def attending(segments: Sequence[Segment]) -> Iterator[None]:
            entered.append(segments)
            yield

        fields: dict[str, Any] = {
            "implementation": "sdpa",
            "why_not_packed": None,
            "is_shift_invariant": True,
            "width_limit": float("inf"),
        }
        of_model = Traits(**{**fields, **changed})
        called = UnpaddedModel(
            TestWhatTheModelGets._recorder(calls),
            of_model,
            prompt_width=batch.prompt_columns,
            share_prompts=share,
            attending=attending,
        )
        return called, entered

    @staticmethod
    def _call(called: UnpaddedModel, batch: Batch, **others: Any) -> Any:
        return called(
            input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, fused_lm_head=True, **others
        )

    def test_a_batch_without_padding_as_it_came(self) -> None:
        batch = padded([([5, 6], [7, 8]), ([5, 6], [9, 10])])
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls)
        outputs = self._call(called, batch, output_router_logits=True)
        assert not entered
        (given,) = calls
        labels = given.pop("labels")
        assert torch.equal(labels, batch.labels)
        assert torch.equal(given.pop("input_ids"), batch.ids)
        mask = given.pop("attention_mask")
        assert mask.dtype == batch.mask.dtype and torch.equal(mask, batch.mask)
        assert given == {"fused_lm_head": True, "output_router_logits": True}
        assert torch.equal(outputs.log_probs, batch.ids[:, 1:].float())
        assert torch.equal(outputs.entropy, batch.ids[:, 1:].float() + 100)
        assert outputs.aux_loss == "from the model"

    def test_a_packed_row(self) -> None:
        calls: list[dict[str, Any]] = []
        batch = padded([([5, 6, 7], [8]), ([9], [4, 10])], left=1, right=1)
        called, entered = self._stub(batch, calls)
        outputs = self._call(called, batch)
        (given,) = calls
        assert given["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 10]]
        assert given["position_ids"].tolist() == [[1, 2, 3, 4, 3, 4, 5]]  # the columns of the padded batch
        assert given["labels"].tolist() == [[-100, -100, -100, 8, -100, 4, 10]]
        assert given["attention_mask"] is None
        assert [(s.start, s.end, s.prefix) for s in entered[0]] == [(0, 4, None), (4, 7, None)]
        # values return to their columns; no token predicts the first one of a segment
        assert outputs.log_probs.tolist() == [[0, 6, 7, 8, 0, 0], [0, 0, 0, 4, 10, 0]]
        assert outputs.entropy.tolist() == [[0, 106, 107, 108, 0, 0], [0, 0, 0, 104, 110, 0]]
        assert outputs.aux_loss == "from the model"

    @pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 3)])
    def test_columns_that_are_padding_in_every_row(self, left: int, right: int) -> None:
        """Are cut off where sequences cannot be laid end to end, and what is said returns to its columns."""
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=left, right=right, pad=3)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, why_not_packed="a reason")
        outputs = self._call(called, batch)
        assert not entered
        assert calls[0]["input_ids"].tolist() == [[5, 6, 7, 3], [3, 8, 9, 10]]
        assert calls[0]["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
        assert calls[0]["labels"].tolist() == [[-100, -100, 7, -100], [-100, -100, 9, 10]]
        assert "position_ids" not in calls[0]
        zeros = ([0] * left, [0] * right)
        assert outputs.log_probs.tolist() == [[*zeros[0], *told, *zeros[1]] for told in ([6, 7, 3], [8, 9, 10])]

    def test_columns_before_which_positions_count(self) -> None:
        """Where a shift would move the positions, only the right is cut."""
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=2, right=3, pad=3)
        calls: list[dict[str, Any]] = []
        called, _ = self._stub(batch, calls, why_not_packed="a reason", is_shift_invariant=False)
        outputs = self._call(called, batch)
        assert calls[0]["input_ids"].tolist() == [[3, 3, 5, 6, 7, 3], [3, 3, 3, 8, 9, 10]]
        assert outputs.log_probs.tolist() == [[3, 5, 6, 7, 3, 0, 0, 0], [3, 3, 8, 9, 10, 0, 0, 0]]

    @pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids", "pixel_values"])
    def test_other_inputs_are_passed_on_without_packing(self, name: str, share: bool) -> None:
        """Kinds of tokens are cut like the tokens; images are passed on as they are."""
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
        values = torch.arange(batch.ids.numel()).view(batch.shape)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share)
        self._call(called, batch, **{name: values})
        assert not entered
        assert calls[0]["input_ids"].shape == calls[0]["attention_mask"].shape == (2, 4)
        assert torch.equal(calls[0][name], values if name == "pixel_values" else values[:, 1:5])

    def test_wider_than_the_limit_is_left_alone(self, share: bool) -> None:
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
        width = batch.shape[1]
        for limit, whole in ((width - 1, True), (width, False)):
            calls: list[dict[str, Any]] = []
            called, entered = self._stub(batch, calls, share, width_limit=limit)
            outputs = self._call(called, batch)
            assert (calls[0]["input_ids"] is batch.ids) == whole
            assert (calls[0]["attention_mask"] is batch.mask) == whole
            assert bool(entered) != whole
            assert outputs.log_probs.shape == (2, width - 1)

    def test_no_tokens_at_all(self, share: bool) -> None:
        batch = padded([([], []), ([], [])], left=2, right=3)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share)
        outputs = self._call(called, batch)
        assert not entered
        assert calls[0]["input_ids"] is batch.ids
        assert outputs.log_probs.shape == (2, 4)

    @pytest.mark.parametrize(
        ("rows", "first"),
        [
            ([([5, 6], [7]), ([], [8, 9])], 2),
            ([([], [7]), ([], [8, 9])], 1),  # where the first tokens of the answers are told
            ([([5, 6], [7]), ([], [])], 2),
        ],
        ids=["one", "all", "nor an answer"],
    )
    def test_an_answer_to_nothing_is_not_packed(self, rows: Any, first: int, share: bool) -> None:
        """Its first token is told by padding, which a packed row has not."""
        batch = padded(rows, left=2, right=1)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share)
        self._call(called, batch)
        assert not entered
        assert torch.equal(calls[0]["input_ids"], batch.ids[:, first:-1])

    @pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("mistral", "eager")])
    def test_an_answer_to_nothing_is_told_as_the_padded_model_does(
        self, name: str, implementation: str, share: bool
    ) -> None:
        batch = padded([([5, 6, 7], [7, 8, 9, 10, 11]), ([], [8, 9, 3, 4]), ([5, 6, 7], [9])], left=2, right=1)
        model = model_of(name, implementation)
        got, expected = answers_of(unpadded(model, batch, share=share), batch), answers_of(model, batch)
        for own, should in zip(got, expected, strict=True):
            # a token that may see nothing sees an even mix of what is there, and there is less of it when cut
            torch.testing.assert_close(own[[0, 2]], should[[0, 2]], rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(own[1, 1:], should[1, 1:], rtol=2e-4, atol=2e-4)

    def test_shared_without_padding(self) -> None:
        """Where prompts are shared a batch without padding has something to leave out."""
        batch = padded([([5, 6], [7, 8]), ([5, 6], [9, 10])])
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share=True)
        self._call(called, batch)
        assert len(entered) == 1
        assert sorted(calls[0]["input_ids"][0].tolist()) == [5, 6, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("name", BATCHES)
def test_the_callers_tensors_are_as_they_were(name: str, share: bool) -> None:
    model, batch = model_of("llama"), BATCHES[name]
    given = {"input_ids": batch.ids, "attention_mask": batch.mask, "labels": batch.labels}
    before = {field: values.clone() for field, values in given.items()}
    unpadded(model, batch, share=share)(**given, fused_lm_head=True)
    assert all(torch.equal(values, before[field]) for field, values in given.items())


class TestGradientCheckpointing:
    """Layers are run again in the backward pass, when the forward's context may have been left."""

    @staticmethod
    def _checkpointed(name: str, implementation: str, reentrant: bool) -> PreTrainedModel:
        model = model_of(name, implementation, torch.float64)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()  # without which reentrant checkpoints have no gradient
        return model.train()

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the pass without gradients
    @pytest.mark.parametrize(
        ("name", "implementation", "reentrant"),
        [("llama", "sdpa", False), ("gemma3", "eager", False), ("gemma3", "sdpa", True)],
    )
    def test_gradients_with_the_context_open(
        self, name: str, implementation: str, reentrant: bool, share: bool
    ) -> None:
        """As the trainer keeps it until a micro-batch has gone backward, whatever passes come in between."""
        batch, between = BATCHES["two prompts in turn"], RAGGED
        plain = model_of(name, implementation, torch.float64)
        expected = gradients_of(plain, answers_of(unpadded(plain, batch, share=share, called=exact(plain)), batch))
        model = self._checkpointed(name, implementation, reentrant)
        runs: list[int] = []
        model.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: runs.append(output[0].shape[1]))
        with contextlib.ExitStack() as until_backward:

            @contextlib.contextmanager
            def attending(segments: Sequence[Segment]) -> Iterator[None]:
                until_backward.enter_context(switched(model))
                with attending_in(segments):
                    yield

            of_model = functools.partial(
                UnpaddedModel, exact(model), traits(plain), share_prompts=share, attending=attending
            )
            answers = answers_of(of_model(prompt_width=batch.prompt_columns), batch)
            with torch.no_grad():
                answers_of(of_model(prompt_width=between.prompt_columns), between)
            gradients = gradients_of(model, answers)
        assert len(runs) == 3 and runs[0] == runs[2] != runs[1]  # the first is run again
        assert attention._forward is None
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {implementation}
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize(("implementation", "reentrant"), [("sdpa", False), ("eager", True)])
    def test_no_gradients_with_the_context_closed(self, implementation: str, reentrant: bool, share: bool) -> None:
        """The model's own attention cannot read segments, and does not run on without them."""
        batch = BATCHES["two prompts in turn"]
        model = self._checkpointed("llama", implementation, reentrant)
        answers = answers_of(unpadded(model, batch, share=share, called=exact(model)), batch)
        with pytest.raises((AttributeError, TypeError), match="Segments"):
            gradients_of(model, answers)
