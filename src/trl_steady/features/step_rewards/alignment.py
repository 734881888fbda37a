"""Map the ends of steps to token indices, exactly, even if a token holds half a character or parts of two steps.

A token belongs to the step in which it begins. A token that begins inside a character belongs to the step of that
character.
"""

import codecs
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_steady.rewards.splitters import Conversation, message_text
from trl_steady.rewards.steps import StepRewards

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback


class Completion(NamedTuple):
    """The data of a completion that is needed to place its steps."""

    name: str
    """Name for error messages."""
    content: str | Conversation
    """The completion as reward functions get it: text, or a list of messages."""
    ids: Sequence[int]
    """(T,) token ids without padding."""
    is_sampled: Sequence[bool]
    """(T,) True = a loss token: the model wrote it, and it is not masked out."""


def text_and_offsets(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Decode `ids` without special tokens, as TRL does, and return the text with its offset mapping.

    The mapping has the character in which each token begins (T + 1,), non-decreasing, followed by the length of the
    text. It is exact for byte-level tokenizers, and for tokenizers like SentencePiece if the text is valid. For other
    tokenizers the function decodes the text before each token. This costs more, and is exact except at characters that
    the decoder has replaced (U+FFFD).
    """
    ids = list(ids)
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    without_text: set[str | None] = {None}  # None: an id without a token
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special:
            without_text.add(token.content)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    for to_bytes in (_byte_level, _sentencepiece):
        pieces: list[bytes] = []
        for token in tokens:
            pieces.append(b"" if token in without_text else to_bytes(token))
        raw = b"".join(pieces)
        decoded = raw.decode(errors="replace")
        if text in (decoded, decoded.removeprefix(" ")):  # SentencePiece decoders remove the first space
            removed = len(decoded) - len(text)
            characters = _characters(raw)
            characters.append(len(decoded))  # of tokens without bytes at the end
            offsets: list[int] = []
            start = 0  # byte in which the token begins
            for piece in pieces:
                offsets.append(max(characters[start] - removed, 0))
                start += len(piece)
            offsets.append(len(text))
            return text, offsets
    return text, _offsets_by_prefixes(tokenizer, ids, text)


def _offsets_by_prefixes(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[int]:
    """Return the offset mapping by decoding the text before each token."""
    offsets: list[int] = []
    start = 0
    for t in range(len(ids)):
        before = str(tokenizer.decode(ids[:t], skip_special_tokens=True))
        shared = 0
        for character, expected in zip(before, text, strict=False):
            if character != expected:
                break
            shared += 1
        # text that ends inside a character decodes to something else, so the maximum keeps the offsets non-decreasing
        start = max(start, shared)
        offsets.append(start)
    offsets.append(len(text))
    return offsets


def _byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()  # an added token is stored as plain text


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


def _characters(raw: bytes) -> list[int]:
    """Return for each byte the character of `raw.decode(errors="replace")` that it belongs to."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    characters: list[int] = []
    count = 0
    for position in range(len(raw)):
        count += len(decoder.decode(raw[position : position + 1]))
        unfinished, _ = decoder.getstate()  # the decoder waits for the other bytes of a character
        characters.append(count + len(unfinished.decode(errors="replace")) - 1)
    return characters


def token_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return for each of the (S,) steps the number of the completion's tokens before its end.

    It raises a ValueError for steps that are not in the completion.
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
    if not any(completion.is_sampled):  # masked out: the others' baseline needs its rewards, but not its true ends
        ends = list(steps.ends)
        if ends:
            ends[-1] = len(completion.ids)
        return ends
    ends: list[int] = []
    for end, (is_sampled, next_is_sampled) in enumerate(pairwise([*completion.is_sampled, False]), start=1):
        if is_sampled and not next_is_sampled:
            ends.append(end)
    if len(steps.values) != len(ends):
        raise ValueError(
            f"StepRewards.per_turn has {len(steps.values)} values, but {completion.name} has {len(ends)} assistant "
            "turns. Give one value for each turn."
        )
    return ends


def _character_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text, offsets = text_and_offsets(tokenizer, completion.ids)
    content, start = _content_in(text, completion)
    _refuse_beyond(steps, completion, len(content))
    ends = [bisect_left(offsets, start + end, hi=len(completion.ids)) for end in steps.ends]
    rest = text[start + steps.ends[-1] :]
    is_all = not rest or (steps.ends[-1] == len(content) and rest.isspace())  # a template may have stripped it
    if is_all and not steps.closed:
        ends[-1] = len(completion.ids)
    return ends


def _content_in(text: str, completion: Completion) -> tuple[str, int]:
    """Return the text that a reward function gets, and where it begins in the text of the tokens."""
    messages = completion.content
    if isinstance(messages, str):
        messages = [{"content": messages}]
    message, *others = messages
    content = message_text(message)
    # a template removes the reasoning, which is before the content, and tool calls, which are after it
    reasoning = str(message.get("reasoning_content") or message.get("thinking") or "")
    if reasoning or message.get("tool_calls"):
        end_of_reasoning = 0
        if reasoning in text:
            end_of_reasoning = text.find(reasoning) + len(reasoning)
        start = text.find(content, end_of_reasoning)
    else:
        start = text.rfind(content)
    if others or start < 0:
        raise ValueError(
            f"StepRewards has ends in characters, but {completion.name} is not one message whose content {content!r} "
            f"is a part of the text of its tokens, {text!r}. Use StepRewards.per_turn or StepRewards.at_tokens."
        )
    return content, start


def _refuse_beyond(steps: StepRewards, completion: Completion, length: int) -> None:
    if steps.ends[-1] > length:
        raise ValueError(
            f"StepRewards has an end at {steps.ends[-1]}, but {completion.name} has {length} {steps.unit}. Give ends "
            "within the completion, StepRewards([], []) for no step, or None for no reward."
        )
