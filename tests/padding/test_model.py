"""A model without its padding, against each sequence by itself, and against the padded model."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.oracles import padding as oracles
from tests.oracles.padding import Batch, padded
from tests.tools.headroom import within
from trl_steady.padding import attention
from trl_steady.padding.attention import attending_in, switched
from trl_steady.padding.families import Traits, traits
from trl_steady.padding.packing import Segment
from trl_steady.padding.proxy import UnpaddedModel

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,  # spread logits, and attention that is not flat
    "attention_dropout": 0.0,
}
WINDOW = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
EAGER_ONLY = ("gemma2", "gpt_oss")  # a cap on the logits of attention, and sinks
WAYS = [
    (name, implementation)
    for name in MODELS
    for implementation in ("sdpa", "eager")
    if not (implementation == "sdpa" and name in EAGER_ONLY)
]
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
DENSE = ("llama", "qwen2", "mistral", "gemma2", "gemma3")

BATCHES = {
    "ragged": padded([([5, 6, 7], [8, 3]), ([9], [4, 10, 11, 12, 3, 9, 8]), ([13, 14], [15, 16, 3])], left=2, right=1),
    "one prompt": padded(
        [([5, 6, 7, 8, 9, 4], [8, 3, 4]), ([5, 6, 7, 8, 9, 4], [4, 10, 11, 12, 9, 8]), ([5, 6, 7, 8, 9, 4], [])],
        left=1,
    ),
    "two prompts in turn": padded(
        [([5, 6, 7], [8, 3]), ([7, 7], [4, 10]), ([5, 6, 7], [9, 9, 4, 5, 6]), ([7, 7], [11]), ([6, 7], [12, 13])],
        right=2,
    ),
    "prompts that differ at their end": padded([([5, 6, 7], [8, 3, 4]), ([5, 6, 8], [8, 3]), ([5, 6, 7], [9])]),
    "one row": padded([([5, 6], [7, 8, 9, 10, 11])], left=1, right=2),
    "the pad token in the text": padded([([0, 0, 5], [0, 6, 0]), ([0, 5], [0]), ([0, 0, 5], [0, 0]), ([0, 5], [7])]),
    "answers of no tokens": padded([([5, 6], []), ([7], [])], left=1, right=2),
    "prompts of one token": padded([([5], []), ([7], [8, 9, 3])], right=1),
    "prompts of one token, answers of none": padded([([5], []), ([5], [])], right=2),
}
RAGGED = BATCHES["ragged"]


def _model(
    name: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float32, **changed: Any
) -> PreTrainedModel:
    torch.manual_seed(1)
    config = MODELS[name]()
    for field, value in changed.items():
        setattr(config, field, value)
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=implementation,
        # whose default has no float64
        **({"experts_implementation": "eager"} if name in ("qwen3_moe", "gpt_oss") else {}),
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)  # biases, norms and sinks that tell
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.eval()


def _exact(model: PreTrainedModel) -> Callable[..., Any]:
    """The model with a head that is as exact as the model, where TRL's sums up in float32."""

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool = True, **others: Any) -> Any:
        rows = torch.log_softmax(model(input_ids=input_ids, use_cache=False, **others).logits[:, :-1].double(), -1)
        targets = labels[:, 1:]
        told = rows.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return SimpleNamespace(
            log_probs=told.masked_fill(targets == -100, 0),
            entropy=-(rows.exp() * rows).sum(-1).masked_fill(targets == -100, 0),
            aux_loss=None,
        )

    return forward


@contextlib.contextmanager
def _attending(model: PreTrainedModel, segments: Sequence[Segment]) -> Iterator[None]:
    with switched(model), attending_in(segments):
        yield


def _unpadded(
    model: PreTrainedModel,
    batch: Batch,
    *,
    share: bool = False,
    called: Callable[..., Any] | None = None,
    packs: bool = True,
    attending: Callable[[Sequence[Segment]], contextlib.AbstractContextManager[None]] | None = None,
) -> UnpaddedModel:
    of_model = traits(model)
    assert (of_model.why_not_packed is None) == packs, of_model.why_not_packed
    return UnpaddedModel(
        called or model,
        of_model,
        prompt_width=batch.prompt_columns,
        share_prompts=share,
        attending=attending or functools.partial(_attending, model),
    )


def _answers(called: Callable[..., Any], batch: Batch, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (B, T), as TRL reads them off."""
    outputs = called(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, fused_lm_head=True, **others)
    assert outputs.log_probs.shape == outputs.entropy.shape == (batch.shape[0], batch.shape[1] - 1)
    width = batch.shape[1] - batch.prompt_columns
    return outputs.log_probs[:, -width:], outputs.entropy[:, -width:]


def _gradients(model: PreTrainedModel, answers: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    model.zero_grad()
    weights = [torch.randn(values.shape, generator=draw, dtype=torch.float64) for values in answers]
    sum((w * values).sum() for w, values in zip(weights, answers, strict=True)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=BATCHES.values(), ids=BATCHES.keys())
def batch(request: pytest.FixtureRequest) -> Batch:
    return request.param


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what transformers does in float32 whatever the model's type: norms, rotary angles and "eager" softmaxes."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


class TestValues:
    """Against each sequence by itself, which has no padding and nobody to attend to by mistake."""

    @pytest.mark.parametrize(("name", "implementation"), WAYS)
    @pytest.mark.usefixtures("all_in_float64")
    def test_as_each_sequence_alone(self, name: str, implementation: str, batch: Batch, share: bool) -> None:
        model = _model(name, implementation, torch.float64)
        got = _answers(_unpadded(model, batch, share=share, called=_exact(model)), batch)
        expected = oracles.alone(model, batch)
        rounding = {"rtol": 1e-9, "atol": 1e-11}
        for own, should in zip(got, expected, strict=True):
            torch.testing.assert_close(own, should, **rounding)
        if not any(answers.requires_grad for answers in expected):
            return
        gradients, should_be = _gradients(model, got), _gradients(model, expected)
        assert gradients.keys() == should_be.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, should_be[parameter], **rounding)

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mistral"])
    def test_by_the_head_of_trl(self, name: str, batch: Batch, share: bool) -> None:
        model = _model(name)
        got = _answers(_unpadded(model, batch, share=share), batch)
        expected = oracles.alone(model, batch)
        for own, should in zip(got, expected, strict=True):
            torch.testing.assert_close(own, should.float(), rtol=2e-4, atol=2e-4)
        said = batch.mask[:, batch.prompt_columns :].bool()
        assert bool((got[0][said] < 0).all())
        assert not got[0][~said].any() and not got[1][~said].any()

    @pytest.mark.parametrize(("name", "implementation"), [way for way in WAYS if way[0] in WINDOWED])
    def test_the_window_is_shorter_than_the_sequences(self, name: str, implementation: str) -> None:
        """Or the tests above would see no window."""
        model, wide = (_model(name, implementation, sliding_window=window) for window in (WINDOW, 64))
        with torch.no_grad():
            short, long = (_answers(_unpadded(m, RAGGED), RAGGED)[0] for m in (model, wide))
        assert not within((short[1] - long[1]).abs(), 1e-3)
        assert within((short[0, :1] - long[0, :1]).abs(), 1e-5)  # 3 tokens before it

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_under_autocast(self, name: str, implementation: str, share: bool) -> None:
        """As near to the exact values as the sequences by themselves are."""
        batch = BATCHES["two prompts in turn"]
        model = _model(name, implementation)
        with torch.no_grad():
            exact = oracles.alone(model, batch)[0]
            with torch.autocast("cpu", torch.bfloat16):
                got = _answers(_unpadded(model, batch, share=share), batch)[0]
                alone = oracles.alone(model, batch)[0]
        near, nearest = float((got - exact).square().sum()), float((alone - exact).square().sum())
        assert 0 < near < 4 * nearest

    def test_a_temperature_is_the_heads_affair(self, batch: Batch, share: bool) -> None:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
        add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
        got = _answers(_unpadded(model, batch, share=share), batch)
        for own, should in zip(got, oracles.alone(model, batch, temperature=0.7), strict=True):
            torch.testing.assert_close(own, should.float(), rtol=2e-4, atol=2e-4)

    def test_without_entropies(self, share: bool) -> None:
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
        add_fused_lm_head(model, outputs=("log_probs",))
        outputs = _unpadded(model, RAGGED, share=share)(
            input_ids=RAGGED.ids, attention_mask=RAGGED.mask, labels=RAGGED.labels, fused_lm_head=True
        )
        assert outputs.entropy is None
        width = RAGGED.shape[1] - RAGGED.prompt_columns
        expected = oracles.alone(model, RAGGED)[0].float()
        torch.testing.assert_close(outputs.log_probs[:, -width:], expected, rtol=2e-4, atol=2e-4)

    def test_the_loss_that_balances_experts(self, batch: Batch) -> None:
        """A mean over tokens, which are those of the padded model that are not padding."""
        model = _model("qwen3_moe")
        keywords = {
            "input_ids": batch.ids,
            "attention_mask": batch.mask,
            "labels": batch.labels,
            "fused_lm_head": True,
            "output_router_logits": True,
        }
        got, expected = _unpadded(model, batch)(**keywords).aux_loss, model(**keywords).aux_loss
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert float(expected.detach()) > 0
        model.zero_grad()
        expected.backward()
        should_be = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        got.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == should_be.keys() and "model.layers.0.mlp.gate.weight" in gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, should_be[name], rtol=1e-3, atol=1e-4)


class TestKeptApart:
    """Bit for bit, so that not even a weight of 1e-30 goes from one sequence to another."""

    @pytest.mark.parametrize(("name", "implementation"), WAYS)
    def test_padding_may_hold_any_token(self, name: str, implementation: str, batch: Batch, share: bool) -> None:
        model = _model(name, implementation)
        draw = torch.Generator().manual_seed(6)
        called = _unpadded(model, batch, share=share)
        with torch.no_grad():
            expected = _answers(called, batch)
            for _ in range(2):
                noise = torch.randint(SIZES["vocab_size"], batch.shape, generator=draw)
                got = _answers(called, batch.with_ids(batch.ids.where(batch.mask.bool(), noise)))
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    @pytest.mark.parametrize(("name", "implementation"), [way for way in WAYS if way[0] in DENSE])
    def test_another_token_in_one_sequence(self, name: str, implementation: str, share: bool) -> None:
        """Its own answers change from there on, and those of the others do not. Experts' sums would be reordered."""
        batch = BATCHES["two prompts in turn"]
        model = _model(name, implementation)
        called = _unpadded(model, batch, share=share)
        with torch.no_grad():
            expected = _answers(called, batch)[1]
            for row in range(batch.shape[0]):
                column = batch.prompt_columns
                ids = batch.ids.clone()
                ids[row, column] = (ids[row, column] + 1) % SIZES["vocab_size"]
                got = _answers(called, batch.with_ids(ids))[1]
                changed = [[bool(value) for value in values] for values in got != expected]
                later = [place > 0 and bool(batch.mask[row, column + place]) for place in range(len(changed[row]))]
                assert changed == [later if other == row else [False] * len(later) for other in range(len(changed))]

    @pytest.mark.parametrize(("name", "implementation"), [way for way in WAYS if way[0] in DENSE])
    def test_what_is_left_out_of_a_row_is_left_out_of_its_gradient(
        self, name: str, implementation: str, share: bool
    ) -> None:
        """The answers of one row move with the embeddings of its own tokens and of no others."""
        batch = BATCHES["two prompts in turn"]
        model = _model(name, implementation, tie_word_embeddings=False)
        called = _unpadded(model, batch, share=share)
        for row in range(batch.shape[0]):
            model.zero_grad()
            _answers(called, batch)[0][row].sum().backward()
            moved = model.get_input_embeddings().weight.grad.any(-1).nonzero().squeeze(-1).tolist()
            columns = oracles.real_columns(batch.mask, row)[:-1]  # its last token answers to nothing
            assert moved == sorted(set(batch.ids[row, columns].tolist()))


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

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mistral"])
    def test_a_batch_without_padding_to_the_bit(self, name: str) -> None:
        batch = padded([([5, 6], [7, 8, 9, 3, 4]), ([5, 6], [9, 10, 7, 7, 8])])
        model = _model(name)
        got, expected = _answers(_unpadded(model, batch), batch), _answers(model, batch)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_a_packed_row(self) -> None:
        calls: list[dict[str, Any]] = []
        batch = padded([([5, 6, 7], [8]), ([9], [4, 10])], left=1, right=1)
        called, entered = self._stub(batch, calls)
        self._call(called, batch)
        (given,) = calls
        assert given["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 10]]
        assert given["position_ids"].tolist() == [[1, 2, 3, 4, 3, 4, 5]]  # the columns of the padded batch
        assert given["labels"].tolist() == [[-100, -100, -100, 8, -100, 4, 10]]
        assert given["attention_mask"] is None
        assert [(s.start, s.end, s.prefix) for s in entered[0]] == [(0, 4, None), (4, 7, None)]

    def test_what_is_said_returns_to_its_columns(self) -> None:
        batch = padded([([5, 6, 7], [8]), ([9], [4, 10])], left=1, right=1)
        called, _ = self._stub(batch, [])
        outputs = self._call(called, batch)
        assert outputs.log_probs.tolist() == [[0, 6, 7, 8, 0, 0], [0, 0, 0, 4, 10, 0]]
        # one row's entropies: the segment's first token is told by nobody
        assert outputs.entropy.tolist() == [[0, 106, 107, 108, 0, 0], [0, 0, 0, 104, 110, 0]]
        assert outputs.aux_loss == "from the model"

    @pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 2), (2, 3)])
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

    @pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
    def test_kinds_of_tokens_are_cut_along(self, name: str, share: bool) -> None:
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
        kinds = torch.arange(batch.ids.numel()).view(batch.shape)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share)
        self._call(called, batch, **{name: kinds})
        assert not entered
        assert calls[0]["input_ids"].shape == (2, 4)
        assert torch.equal(calls[0][name], kinds[:, 1:5])

    @pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "image_sizes"])
    def test_images_are_passed_along(self, name: str, share: bool) -> None:
        batch = padded([([5, 6], [7]), ([8], [9, 10])], left=1, right=2)
        images = torch.arange(2 * batch.shape[1]).view(2, -1)
        calls: list[dict[str, Any]] = []
        called, entered = self._stub(batch, calls, share)
        self._call(called, batch, **{name: images})
        assert not entered
        assert calls[0]["attention_mask"].shape == (2, 4)
        assert calls[0][name] is images

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

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_an_answer_to_nothing_is_told_as_the_padded_model_does(
        self, name: str, implementation: str, share: bool
    ) -> None:
        batch = padded([([5, 6, 7], [7, 8, 9, 10, 11]), ([], [8, 9, 3, 4]), ([5, 6, 7], [9])], left=2, right=1)
        model = _model(name, implementation)
        got, expected = _answers(_unpadded(model, batch, share=share), batch), _answers(model, batch)
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


class TestNothingIsLeftBehind:
    @staticmethod
    def _implementations(model: PreTrainedModel) -> set[str | None]:
        return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}

    @pytest.mark.parametrize(("name", "implementation"), WAYS)
    def test_after_a_forward(self, name: str, implementation: str, share: bool) -> None:
        model = _model(name, implementation)
        before = model(RAGGED.ids, attention_mask=RAGGED.mask).logits
        _answers(_unpadded(model, RAGGED, share=share), RAGGED)
        assert self._implementations(model) == {implementation}
        assert attention._forward is None
        assert torch.equal(model(RAGGED.ids, attention_mask=RAGGED.mask).logits, before)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_after_a_forward_that_fails(self, implementation: str, share: bool) -> None:
        model = _model("llama", implementation)
        before = model(RAGGED.ids, attention_mask=RAGGED.mask).logits

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        hook = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            _answers(_unpadded(model, RAGGED, share=share), RAGGED)
        hook.remove()
        assert self._implementations(model) == {implementation}
        assert attention._forward is None
        assert torch.equal(model(RAGGED.ids, attention_mask=RAGGED.mask).logits, before)
        expected = oracles.alone(model, RAGGED)
        got = _answers(_unpadded(model, RAGGED, share=share), RAGGED)
        torch.testing.assert_close(got[0], expected[0].float(), rtol=2e-4, atol=2e-4)

    def test_the_callers_tensors_are_as_they_were(self, batch: Batch, share: bool) -> None:
        model = _model("llama")
        ids, mask, labels = batch.ids.clone(), batch.mask.clone(), batch.labels
        kept = labels.clone()
        _unpadded(model, batch, share=share)(
            input_ids=batch.ids, attention_mask=batch.mask, labels=labels, fused_lm_head=True
        )
        assert torch.equal(batch.ids, ids) and torch.equal(batch.mask, mask) and torch.equal(labels, kept)


class TestGradientCheckpointing:
    """Layers are run again in the backward pass, when the forward's context may have been left."""

    @staticmethod
    def _checkpointed(name: str, implementation: str, reentrant: bool) -> PreTrainedModel:
        model = _model(name, implementation, torch.float64)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()  # without which reentrant checkpoints have no gradient
        return model.train()

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the pass without gradients
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradients_with_the_context_open(
        self, name: str, implementation: str, reentrant: bool, share: bool
    ) -> None:
        """As the trainer keeps it until a micro-batch has gone backward, whatever passes come in between."""
        batch, between = BATCHES["two prompts in turn"], RAGGED
        plain = _model(name, implementation, torch.float64)
        expected = _gradients(plain, _answers(_unpadded(plain, batch, share=share, called=_exact(plain)), batch))
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
                UnpaddedModel, _exact(model), traits(plain), share_prompts=share, attending=attending
            )
            answers = _answers(of_model(prompt_width=batch.prompt_columns), batch)
            with torch.no_grad():
                _answers(of_model(prompt_width=between.prompt_columns), between)
            gradients = _gradients(model, answers)
        assert len(runs) == 3 and runs[0] == runs[2] != runs[1]  # the first is run again
        assert attention._forward is None
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {implementation}
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_no_gradients_with_the_context_closed(self, implementation: str, reentrant: bool, share: bool) -> None:
        """The model's own attention cannot read segments, and does not run on without them."""
        batch = BATCHES["two prompts in turn"]
        model = self._checkpointed("llama", implementation, reentrant)
        answers = _answers(_unpadded(model, batch, share=share, called=_exact(model)), batch)
        with pytest.raises((AttributeError, TypeError), match="Segments"):
            _gradients(model, answers)
