"""Map the ends of steps to token indices, exactly, even if a token holds half a character or parts of two steps.

A token belongs to the step in which it begins. A token that begins inside a character belongs to the step of that
character.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_steady.rewards.splitters import message_text
from trl_steady.rewards.steps import StepRewards

__all__ = ["Completion", "Spelling", "spelling", "token_ends"]

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback


class Spelling(NamedTuple):
    """A completion's text and its offset mapping."""

    text: str
    begins: list[int]
    """(T + 1,) the character in which each token begins, non-decreasing, followed by the length of the text."""


class Completion(NamedTuple):
    """The data of a completion that is needed to place its steps."""

    index: int
    """Index in the rollout of this process, for error messages."""
    content: Any
    """The completion as reward functions get it: text, or a list of messages."""
    ids: Sequence[int]
    """(T,) token ids without padding."""
    is_own: Sequence[bool]
    """(T,) True = a loss token: the model wrote it, and it is not masked out."""
    limit: str
    """Text for error messages if the completion has reached its length limit, otherwise ''."""


def spelling(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Spelling:
    """Decode `ids` without special tokens, as TRL does, and return the text with its offset mapping.

    The mapping is exact for byte-level tokenizers, and for tokenizers like SentencePiece if the text is valid. For
    other tokenizers the function decodes the text before each token. This costs more, and is exact except at
    characters that the decoder has replaced (U+FFFD).
    """
    ids = list(ids)
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    tokens = tokenizer.convert_ids_to_tokens(ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # None: the LM head has a row for this id, but the tokenizer has no token
    special = [token is None or (id in added and added[id].special) for id, token in zip(ids, tokens, strict=True)]
    for bytes_of in (_byte_level, _sentencepiece):
        pieces = [b"" if has_no_text else bytes_of(t) for t, has_no_text in zip(tokens, special, strict=True)]
        first = next((i for i, piece in enumerate(pieces) if piece), 0)
        for strip in (b"", b" "):  # SentencePiece decoders remove the first space
            stripped = [p.removeprefix(strip) if i == first else p for i, p in enumerate(pieces)]
            if b"".join(stripped).decode(errors="replace") == text:
                return Spelling(text, _begins(stripped, text))
    before = (str(tokenizer.decode(ids[:t], skip_special_tokens=True)) for t in range(len(ids)))
    # text that ends inside a character decodes to something else, so the maximum keeps the offsets non-decreasing
    return Spelling(text, [*accumulate((_agreement(part, text) for part in before), max), len(text)])


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()  # an added token is stored as plain text


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _begins(pieces: Sequence[bytes], text: str) -> list[int]:
    """Return the (T + 1,) characters in which the pieces of `text` begin, and the length of the text."""
    raw = b"".join(pieces)
    starts, positions = _character_starts(raw), accumulate(map(len, pieces), initial=0)
    return [len(text) if position == len(raw) else bisect_right(starts, position) - 1 for position in positions]


def _agreement(part: str, text: str) -> int:
    """Return the length of the common prefix of `part` and `text`."""
    pairs = zip(part, text, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(part), len(text)))


def _character_starts(raw: bytes) -> list[int]:
    """Return the byte at which each character of `raw.decode(errors="replace")` begins."""
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
            starts.append(position)  # one U+FFFD replaces the bytes that form no character
            position += bad.end - bad.start
    return starts


def token_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return for each of the (S,) steps the number of the completion's tokens before its end.

    Raises:
        ValueError: a step ends beyond the completion, the number of turns differs, or character offsets cannot be
            mapped to tokens.
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
    if not any(completion.is_own):  # masked out: the others' baseline needs its rewards, but not its true ends
        return [*steps.ends[:-1], len(completion.ids)] if steps.ends else []
    followed = enumerate(pairwise([*completion.is_own, False]), start=1)
    ends = [end for end, (is_own, is_next_own) in followed if is_own and not is_next_own]
    if len(steps.values) != len(ends):
        raise ValueError(
            f"StepRewards.per_turn has {len(steps.values)} values, but completion {completion.index} has {len(ends)} "
            f"assistant turns{completion.limit}. Give one value for each turn."
        )
    return ends


def _character_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text, begins = spelling(tokenizer, completion.ids)
    seen, offset = _seen(completion, text)
    _refuse_beyond(steps, completion, len(seen))
    ends = [bisect_left(begins, offset + end, hi=len(completion.ids)) for end in steps.ends]
    rest = text[offset + steps.ends[-1] :]
    is_all = not rest or (steps.ends[-1] == len(seen) and rest.isspace())  # a template may have stripped it
    if is_all and not steps.closed:
        ends[-1] = len(completion.ids)
    return ends


def _seen(completion: Completion, text: str) -> tuple[str, int]:
    """Return the text that a reward function gets, and its offset in the text of the tokens."""
    plain = isinstance(completion.content, str)
    messages = [{"content": completion.content}] if plain else completion.content
    way_out = "Use StepRewards.per_turn for one reward per turn, or StepRewards.at_tokens."
    if len(messages) != 1:
        raise ValueError(
            f"StepRewards has ends in characters, but completion {completion.index} has {len(messages)} messages. "
            + way_out
        )
    seen = message_text(messages[0])
    # a template removes the reasoning, which is before the content, and tool calls, which are after it
    reasoning = str(messages[0].get("reasoning_content") or messages[0].get("thinking") or "")
    if reasoning or messages[0].get("tool_calls"):
        offset = text.find(seen, text.find(reasoning) + len(reasoning) if reasoning in text else 0)
    else:
        offset = text.rfind(seen)
    if offset < 0:
        raise ValueError(
            f"StepRewards has ends in characters, but the content {seen!r} of completion {completion.index} is not "
            f"part of the text of its tokens, {text!r}. " + way_out
        )
    return seen, offset


def _refuse_beyond(steps: StepRewards, completion: Completion, length: int) -> None:
    if steps.ends[-1] > length:
        what = f"has {length} {steps.unit}{completion.limit}" if length else "is empty"
        raise ValueError(
            f"StepRewards has ends[{len(steps.ends) - 1}]={steps.ends[-1]}, but completion {completion.index} {what}. "
            "Give ends within the completion. For a completion without steps return StepRewards([], []), or None for "
            "no reward."
        )
