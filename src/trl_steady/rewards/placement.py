"""Where in a completion's tokens a step ends: exact, also where a token holds half a character or parts of two steps.

A token belongs to the step in which it begins; one that begins inside a character, to the step of that character.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_steady.rewards.splitters import message_text
from trl_steady.rewards.steps import StepRewards

__all__ = ["Completion", "Spelling", "spelling", "token_ends"]

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback


class Spelling(NamedTuple):
    """A completion's text, and where its tokens begin in it."""

    text: str
    begins: list[int]
    """(T + 1,) the character in which each token begins, not falling; and the length of the text."""


class Completion(NamedTuple):
    """A completion, as far as steps are concerned."""

    index: int
    """In the rollout of this process, for messages."""
    content: Any
    """What reward functions see: text, or a list of messages."""
    ids: Sequence[int]
    """(T,) its tokens, without padding."""
    is_own: Sequence[bool]
    """(T,) True = a loss token: written by the model, and not masked out."""
    limit: str
    """'' or that its length is at its limit, for messages."""


def spelling(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Spelling:
    """The text of `ids` without special tokens, as TRL decodes it.

    Exact for byte-level tokenizers, and for those of SentencePiece's kind where the text is valid. Else by decoding
    all that stands before each token, which costs more, and is exact up to characters that the decoder has replaced
    (U+FFFD).
    """
    ids = list(ids)
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    tokens = tokenizer.convert_ids_to_tokens(ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # None: a row of the head without a token
    special = [token is None or (id in added and added[id].special) for id, token in zip(ids, tokens, strict=True)]
    for bytes_of in (_byte_level, _sentencepiece):
        pieces = [b"" if has_no_text else bytes_of(t) for t, has_no_text in zip(tokens, special, strict=True)]
        first = next((i for i, piece in enumerate(pieces) if piece), 0)
        for strip in (b"", b" "):  # SentencePiece's decoders take the first space away
            stripped = [p.removeprefix(strip) if i == first else p for i, p in enumerate(pieces)]
            if b"".join(stripped).decode(errors="replace") == text:
                return Spelling(text, _begins(stripped, text))
    before = (str(tokenizer.decode(ids[:t], skip_special_tokens=True)) for t in range(len(ids)))
    # half a character, with all the bytes beside it, is decoded to something else: no token begins before another
    return Spelling(text, [*accumulate((_agreement(part, text) for part in before), max), len(text)])


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()  # an added token, written out


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _begins(pieces: Sequence[bytes], text: str) -> list[int]:
    """(T + 1,) the character in which each piece of `text` begins."""
    raw = b"".join(pieces)
    starts = _character_starts(raw)
    begins, position, character = [], 0, 0
    for piece in (*pieces, b""):
        while character + 1 < len(starts) and starts[character + 1] <= position:
            character += 1
        begins.append(len(text) if position == len(raw) else character)
        position += len(piece)
    return begins


def _agreement(part: str, text: str) -> int:
    """How many characters `part` and `text` begin with together."""
    pairs = zip(part, text, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(part), len(text)))


def _character_starts(raw: bytes) -> list[int]:
    """The byte at which each character of `raw.decode(errors="replace")` begins."""
    starts, position = [], 0
    while position < len(raw):
        try:
            valid, bad = raw[position:].decode(), None
        except UnicodeDecodeError as error:
            valid, bad = raw[position : position + error.start].decode(), error
        for character in valid:
            starts.append(position)
            position += len(character.encode())
        if bad is not None:
            starts.append(position)  # one U+FFFD for the bytes that cannot go on to a character
            position += bad.end - bad.start
    return starts


def token_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """(S,) how many tokens of the completion lie before the end of each step.

    Raises:
        ValueError: a step ends beyond the completion, or its ends cannot be told.
    """
    if steps.unit == "turns":
        return _turn_ends(steps, completion)
    if not steps.ends:
        return []
    if steps.unit == "characters":
        return _character_ends(steps, completion, tokenizer)
    _refuse_beyond(steps, completion, len(completion.ids))
    return list(steps.ends)


def _turn_ends(steps: StepRewards, completion: Completion) -> list[int]:
    if not any(completion.is_own):  # masked out: its turns count in the others' baseline, wherever they end
        return [*steps.ends[:-1], len(completion.ids)] if steps.ends else []
    position, ends = 0, []
    for own, run in groupby(completion.is_own):
        position += len(list(run))
        if own:
            ends.append(position)
    if len(steps.values) != len(ends):
        raise ValueError(
            f"StepRewards.per_turn has {len(steps.values)} values, and completion {completion.index} has {len(ends)} "
            f"assistant turns{completion.limit}. Give one value for each."
        )
    return ends


def _character_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text, begins = spelling(tokenizer, completion.ids)
    seen, offset = _seen(completion, text)
    _refuse_beyond(steps, completion, len(seen))
    ends = [bisect_left(begins, offset + end, hi=len(completion.ids)) for end in steps.ends]
    rest = text[offset + steps.ends[-1] :]
    is_all = not rest or (steps.ends[-1] == len(seen) and rest.isspace())  # which a template may have stripped
    if is_all and not steps.closed:
        ends[-1] = len(completion.ids)
    return ends


def _seen(completion: Completion, text: str) -> tuple[str, int]:
    """The text that a reward function sees, and where it begins in that of the tokens."""
    plain = isinstance(completion.content, str)
    messages = [{"content": completion.content}] if plain else completion.content
    way_out = "Use StepRewards.per_turn for one reward a turn, or StepRewards.at_tokens."
    if len(messages) != 1:
        raise ValueError(
            f"StepRewards has ends in characters, and completion {completion.index} has {len(messages)} messages. "
            + way_out
        )
    seen = message_text(messages[0])
    # a template takes reasoning out, which stands before the content, and calls of tools, which stand behind it
    reasoning = str(messages[0].get("reasoning_content") or messages[0].get("thinking") or "")
    if reasoning or messages[0].get("tool_calls"):
        offset = text.find(seen, text.find(reasoning) + len(reasoning) if reasoning in text else 0)
    else:
        offset = text.rfind(seen)
    if offset < 0:
        raise ValueError(
            f"StepRewards has ends in characters, and the text of completion {completion.index} cannot be told from "
            f"its tokens: {seen!r} in {text!r}. " + way_out
        )
    return seen, offset


def _refuse_beyond(steps: StepRewards, completion: Completion, length: int) -> None:
    if steps.ends[-1] > length:
        what = f"has {length} {steps.unit}{completion.limit}" if length else "is empty"
        raise ValueError(
            f"StepRewards has ends[{len(steps.ends) - 1}]={steps.ends[-1]}, and completion {completion.index} {what}. "
            "Give ends within what was generated; for a completion without steps return StepRewards([], []), or None "
            "for no verdict."
        )
