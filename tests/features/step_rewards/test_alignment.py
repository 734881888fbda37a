"""Where steps end in tokens: byte-level BPE with tokens that cut characters, other tokenizers, conversations."""

import codecs
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_steady import StepRewards
from trl_steady.features.step_rewards import alignment as placement
from trl_steady.features.step_rewards.alignment import Completion, text_and_offsets, token_ends

# two, three and four bytes a character
TEXT = "naïve café, Grüße aus Köln; 数学は楽しい。一歩ずつ 🙂🙃 well—done… 1 + 1 = 2\n\nЖ 🧮 "


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges join halves of characters with what stands beside them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # pieces of nine bytes, cut anywhere, so that merges learn nothing of characters
    raw = (TEXT * 20).encode()
    shown = core.pre_tokenizer.pre_tokenize_str(TEXT * 20)[0][0]
    assert len(shown) == len(raw)
    core.pre_tokenizer = None
    core.train_from_iterator(
        [shown[i : i + 9] for i in range(0, len(shown), 5)],
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False),
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_tokens(["<a tool's call>"])  # not special: it is part of the text
    return tokenizer


def completion(content: Any, ids: list[int], runs: str = "") -> Completion:
    """`runs` has "m" for each token of the model; none means that all are."""
    is_own = [letter == "m" for letter in runs] or [True] * len(ids)
    return Completion("completion 0", content, ids, is_own)


def test_every_character_belongs_to_exactly_one_steps_tokens(byte_level: PreTrainedTokenizerFast) -> None:
    def characters(raw: bytes) -> tuple[str, list[tuple[int, int]]]:
        """The text of `raw` and the bytes of each character, by the codec's own account of what it replaces."""
        bad: list[tuple[int, int]] = []

        def note(error: UnicodeError) -> tuple[str, int]:
            assert isinstance(error, UnicodeDecodeError)
            bad.append((error.start, error.end))
            return "�", error.end

        codecs.register_error("note", note)
        text, spans, position = raw.decode(errors="note"), [], 0
        replaced = dict(bad)
        for character in text:
            end = replaced.get(position, position + len(character.encode()))
            spans.append((position, end))
            position = end
        assert position == len(raw)
        return text, spans

    def bytes_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
        """The bytes of each token. ByteLevel's alphabet has most bytes as they are, and others after 255 in order."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        alphabet = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
        pieces = []
        for token in tokenizer.convert_ids_to_tokens(ids):
            if token in ("<eos>", "<pad>"):
                pieces.append(b"")
            elif token == "<a tool's call>":
                pieces.append(token.encode())
            else:
                pieces.append(bytes(alphabet[character] for character in token))
        return pieces

    def completions(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
        """1,000: cuts out of real text, and any tokens at all, which are no text."""
        rng, real = random.Random(0), tokenizer(TEXT * 3, add_special_tokens=False)["input_ids"]
        found = []
        for i in range(1000):
            if i % 2:
                start = rng.randrange(len(real) - 1)
                found.append(real[start : start + rng.randint(1, 40)])
            else:
                found.append([rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 40))])
        return found

    rng, cut, invalid, inside = random.Random(1), 0, 0, 0
    for ids in completions(byte_level):
        pieces = bytes_of(byte_level, ids)
        text, spans = characters(b"".join(pieces))
        assert text == byte_level.decode(ids, skip_special_tokens=True)  # as TRL decodes it
        if not text:
            continue
        first_bytes = [sum(map(len, pieces[:t])) for t in range(len(ids))]
        ends = sorted(rng.sample(range(1, len(text) + 1), rng.randint(1, min(5, len(text)))))
        placed = token_ends(StepRewards([0.0] * len(ends), ends), completion(text, ids), byte_level)
        assert len(placed) == len(ends) and placed == sorted(placed)

        def step_of(position: int, bounds: list[int]) -> int:
            return sum(bound <= position for bound in bounds)

        for t, first in enumerate(first_bytes):
            (holder,) = [c for c, (start, end) in enumerate(spans) if start <= first < end] or [len(text)]
            # past the last end there is no step; an end at the end of the text takes in what has no text
            expected = len(ends) - 1 if holder == len(text) == ends[-1] else step_of(holder, ends)
            assert step_of(t, placed) == expected
        owners = [step_of(next(t for t in reversed(range(len(ids))) if first_bytes[t] <= s), placed) for s, _ in spans]
        assert owners == sorted(owners) and len(owners) == len(text)
        starts = {start for start, _ in spans}
        cut += any(first not in starts and piece for first, piece in zip(first_bytes, pieces, strict=True))
        invalid += "�" in text
        inside += any(spans[end][0] not in first_bytes for end in ends if end < len(text))
    assert cut > 300 and invalid > 300 and inside > 300  # or nothing was tested


def test_by_hand(byte_level: PreTrainedTokenizerFast) -> None:
    """é is two tokens, of which the second begins inside it."""
    ids = [byte_level.convert_tokens_to_ids(token) for token in ("a", "Ã", "©", "b")]
    assert byte_level.decode(ids) == "aéb"
    place = lambda ends: token_ends(StepRewards([1.0] * len(ends), ends), completion("aéb", ids), byte_level)
    assert place([1]) == [1]
    assert place([2]) == [3]
    assert place([1, 2, 3]) == [1, 3, 4]
    eos, beyond = byte_level.eos_token_id, len(byte_level) + 7  # models have more rows than there are tokens
    whole = completion("aéb", [*ids, eos])
    assert token_ends(StepRewards([1.0], [2]), completion("aéb", [beyond, *ids]), byte_level) == [4]
    assert token_ends(StepRewards([1.0], [3]), whole, byte_level) == [5]  # with what has no text
    assert token_ends(StepRewards([1.0], [2]), whole, byte_level) == [3]
    # unless the step was over before: then the decision to stop came after it
    assert token_ends(StepRewards([1.0], [3], closed=True), whole, byte_level) == [4]


@pytest.mark.parametrize("decoder", ["bytes", "prefixes"])
def test_tokens_of_one_byte_begin_where_their_characters_do(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an emoji makes the decoder replace the line break before it too; no token begins before another."""

    def sentencepiece_like() -> PreTrainedTokenizerFast:
        """Spaces as ▁, bytes of unknown characters as tokens of their own: Llama's and Gemma's kind."""
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh", "▁a", "▁ab", "cd", "efg"]
        core = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")

    if decoder == "prefixes":
        monkeypatch.setattr(placement, "_sentencepiece", lambda _: b"?")
    tokenizer = sentencepiece_like()
    text = "ab cd\n😀é ab\n数 ab"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    tokens, begins = tokenizer.convert_ids_to_tokens(ids), text_and_offsets(tokenizer, ids)[1]
    assert begins == sorted(begins) and begins[-1] == len(text)
    raw = text.encode()
    position = 0
    for token, begin in zip(tokens, begins, strict=False):
        spelled = token.replace("▁", " ") if position else token.lstrip("▁")  # the decoder strips the first space
        size = 1 if token.startswith("<0x") else len(spelled.encode())
        held = [i for i in range(len(text)) if len(text[:i].encode()) <= position < len(text[: i + 1].encode())]
        assert [begin] == held, (token, position)
        position += size
    assert position == len(raw)
    assert token_ends(StepRewards([1.0], [6]), completion(text, ids), tokenizer) == [tokens.index("<0x0A>") + 1]


def test_turns_end_with_the_models_own_tokens(byte_level: PreTrainedTokenizerFast) -> None:
    ids = list(range(9))
    place = lambda n, runs: token_ends(StepRewards.per_turn([1.0] * n), completion([], ids, runs), byte_level)
    assert place(1, "mmmmmmmmm") == [9]
    assert place(3, "mmtttmttm") == [2, 6, 9]
    assert place(2, "mmtttmttt") == [2, 6]
    assert place(2, "ttttttttt") == [1, 9]  # masked out: nowhere, but two, of which one ends it
    assert place(0, "ttttttttt") == []
    for n, runs in ((1, "mmtttmttm"), (4, "mmtttmttm"), (2, "mmmmmmmmm")):
        with pytest.raises(ValueError, match=f"{n} values, .* . assistant turns"):
            place(n, runs)


def test_an_end_beyond_the_completion_is_refused(byte_level: PreTrainedTokenizerFast) -> None:
    ids = byte_level("café")["input_ids"]
    place = lambda steps, text, ids: token_ends(steps, completion(text, ids), byte_level)
    assert place(StepRewards.at_tokens([1.0, 2.0], [1, len(ids)]), "?", ids) == [1, len(ids)]
    with pytest.raises(ValueError, match=rf"{len(ids) + 1}, but completion 0 has {len(ids)} tokens"):
        place(StepRewards.at_tokens([1.0, 2.0], [1, len(ids) + 1]), "?", ids)
    with pytest.raises(ValueError, match=r"5, but completion 0 has 4 characters"):
        place(StepRewards([1.0], [5]), "café", ids)
    for nothing in ([], [byte_level.eos_token_id]):
        assert place(StepRewards([], []), "", nothing) == []


def test_a_conversation_with_one_message(byte_level: PreTrainedTokenizerFast) -> None:
    """Its content may lack what the template took out: reasoning before, white space behind."""
    text = "so: 4, 4 = 4.\nSo 4.\n"
    ids = byte_level(text)["input_ids"]
    begins = text_and_offsets(byte_level, ids)[1]
    message: dict[str, Any] = {"role": "assistant", "content": "So 4."}

    def place(end: int, **more: Any) -> int:
        (placed,) = token_ends(StepRewards([1.0], [end]), completion([{**message, **more}], ids), byte_level)
        return placed

    offset = text.index("So 4.")
    assert place(2) == next(t for t, begin in enumerate(begins) if begin >= offset + 2)
    assert place(5) == len(ids)  # with the white space that the template stripped
    assert place(2, content=[{"type": "text", "text": "So 4."}]) == place(2)
    assert begins[place(1, content="4")] >= text.rindex("4") + 1  # the last 4: what the template took out is before it
    # the first 4 where a call stands behind it, and the one after the reasoning that the template has kept apart
    assert begins[place(1, content="4", tool_calls=[{}])] < text.index("4") + 4
    assert text.index("4 =") < begins[place(1, content="4", reasoning_content="so: 4,")] < text.rindex("= 4") + 2
    with pytest.raises(ValueError, match=r"content 'So 5\.' is a part of the text.*StepRewards\.per_turn"):
        place(1, content="So 5.")
    with pytest.raises(ValueError, match=r"not one message.*StepRewards\.per_turn"):
        token_ends(StepRewards([1.0], [1]), completion([message, message], ids), byte_level)
    with pytest.raises(ValueError, match="has 0 characters"):
        place(1, content=None)
    for messages in ([message, message], [{"role": "assistant", "content": None, "tool_calls": [{}]}]):
        assert token_ends(StepRewards([], []), completion(messages, ids), byte_level) == []
