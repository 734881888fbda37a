"""Where in a completion's tokens a step ends: exact, also where a token holds half a character or parts of two steps.

A token belongs to the step in which it begins; one that begins inside a character, to the step of that character.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_steady.rewards.steps import StepRewards

__all__ = ["Completion", "Spelling", "spelling", "token_ends"]

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE


class Spelling(NamedTuple):
    """A completion's text, and where its tokens begin in it."""

    text: str
    begin: Callable[[int], int]
    """Token -> the character in which it begins, not falling; the number of tokens -> the length of the text."""


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
    truncated: str
    """'' or that its length is at its limit, for messages."""


def spelling(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Spelling:
    """The text of `ids` without special tokens, as TRL decodes it.

    By bytes where that is the text; else by decoding what stands before a token, which is exact up to characters that
    the decoder has replaced (U+FFFD).
    """
    ids = list(ids)
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    by_bytes = _begins_by_bytes(tokenizer, ids, text)
    if by_bytes is not None:
        return Spelling(text, by_bytes.__getitem__)

    @functools.cache
    def begin(token: int) -> int:
        if token == len(ids):
            return len(text)
        before = str(tokenizer.decode(ids[:token], skip_special_tokens=True))
        # half a character is decoded to something else
        return next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))

    return Spelling(text, begin)


def _begins_by_bytes(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[int] | None:
    """The character in which each token begins, of a byte-level tokenizer; None where bytes do not give the text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    pieces: list[bytes] = []
    for id, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token is None or (id in added and added[id].special):  # None: a row of the head without a token
            pieces.append(b"")
        elif all(character in _BYTES for character in token):
            pieces.append(bytes(_BYTES[character] for character in token))
        else:  # an added token, written out
            pieces.append(token.encode())
    raw = b"".join(pieces)
    starts = _character_starts(raw)
    if raw.decode(errors="replace") != text:
        return None
    begins, position, character = [], 0, 0
    for piece in (*pieces, b""):
        while character + 1 < len(starts) and starts[character + 1] <= position:
            character += 1
        begins.append(len(text) if position == len(raw) else character)
        position += len(piece)
    return begins


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
    place = {"characters": _character_ends, "tokens": _plain_ends, "turns": _turn_ends}[steps.unit]
    return place(steps, completion, tokenizer)


def _plain_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    _refuse_beyond(steps, completion, len(completion.ids))
    return list(steps.ends)


def _turn_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
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
            f"assistant turns{completion.truncated}. Give one value for each."
        )
    return ends


def _character_ends(steps: StepRewards, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text, begin = spelling(tokenizer, completion.ids)
    seen, offset = _seen(completion, text)
    _refuse_beyond(steps, completion, len(seen))
    ends = []
    for end in steps.ends:
        rest = text[offset + end :]
        is_last = not rest or (end == len(seen) and rest.isspace())  # a template may have stripped the message
        tokens = range(len(completion.ids))
        ends.append(len(tokens) if is_last else bisect_left(tokens, offset + end, key=begin))
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
    seen = messages[0].get("content") or ""
    if not isinstance(seen, str):
        seen = "".join(block.get("text", "") for block in seen)
    offset = text.rfind(seen)  # behind reasoning, which a template takes out, but not behind a tool's call
    if offset < 0 or (messages[0].get("tool_calls") and text.find(seen) != offset):
        raise ValueError(
            f"StepRewards has ends in characters, and the text of completion {completion.index} cannot be told from "
            f"its tokens: {seen!r} in {text!r}. " + way_out
        )
    return seen, offset


def _refuse_beyond(steps: StepRewards, completion: Completion, length: int) -> None:
    if steps.ends and steps.ends[-1] > length:
        what = f"has {length} {steps.unit}{completion.truncated}" if length else "is empty"
        raise ValueError(
            f"StepRewards has ends[{len(steps.ends) - 1}]={steps.ends[-1]}, and completion {completion.index} {what}. "
            "Ends lie within what was generated; for a completion without steps return StepRewards([], []), or None "
            "for no verdict."
        )
