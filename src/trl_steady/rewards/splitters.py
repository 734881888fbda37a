"""Where the steps of a completion are: by a pattern, by blank lines, by turns.

A splitter takes a completion as reward functions get it, and returns its `Steps`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_steady.rewards.steps import StepRewards

__all__ = ["Splitter", "Steps", "by_blank_line", "by_regex", "by_turn", "message_text"]


@dataclass(frozen=True)
class Steps:
    """A completion in steps.

    Args:
        texts: (S,) the text of each.
        ends: (S,) their exclusive ends in characters; None where steps are assistant turns.
        closed: Whether what ends a step has ended the last one too, before the model decided to stop.
    """

    texts: Sequence[str]
    ends: Sequence[int] | None
    closed: bool = False

    def rewards(self, values: Sequence[float]) -> StepRewards:
        """With a reward for each step.

        Raises:
            ValueError: not one finite value for each step.
        """
        if len(values) != len(self.texts):
            raise ValueError(f"{len(values)} rewards for {len(self.texts)} steps. Give one for each.")
        return (
            StepRewards.per_turn(values) if self.ends is None else StepRewards(values, self.ends, closed=self.closed)
        )


Splitter = Callable[[Any], Steps]
"""From a completion, as reward functions get it, to its steps."""


def by_regex(pattern: str | re.Pattern[str]) -> Splitter:
    """A step ends with each match of `pattern`, and with the completion. A blank piece belongs to the step after it.

    The tokens up to a step's end must tell that it has ended: with a pattern that may match more or less by what comes
    next (`\\s*` at its end, a look-ahead), stopping would be rewarded by itself, or going on.

    Args:
        pattern: Of what ends a step, which is part of it.

    Returns:
        A splitter of texts, and of conversations with one message; it raises ValueError at one with more.

    >>> by_regex(r"\\.")("One. Two. And three")
    Steps(texts=['One.', ' Two.', ' And three'], ends=[4, 9, 19], closed=False)
    """
    compiled = re.compile(pattern)

    def split(completion: Any) -> Steps:
        text = _content(completion)
        ends: list[int] = []
        for match in compiled.finditer(text):
            if text[ends[-1] if ends else 0 : match.end()].strip():
                ends.append(match.end())
        closed = bool(ends)
        if text[ends[-1] if ends else 0 :].strip():
            ends.append(len(text))
            closed = False
        starts = (0, *ends)
        return Steps([text[start:end] for start, end in zip(starts, ends, strict=False)], ends, closed)

    return split


def by_blank_line() -> Splitter:
    """A step ends with a blank line, as the steps of a written-out solution do; more of them belong to the next step.

    >>> by_blank_line()("First.\\n\\nSecond,\\nstill.\\n\\n").texts
    ['First.\\n\\n', 'Second,\\nstill.\\n\\n']
    """
    return by_regex(r"\n[^\S\n]*\n")


def by_turn() -> Splitter:
    """Each message of the assistant is a step: of conversations with tools.

    A step's text is the message's content; calls of tools are in `completions`, which a scorer gets too.

    Raises:
        ValueError: when it is given a completion that is no conversation.

    >>> call, answer = {"role": "assistant", "content": "Let me look."}, {"role": "assistant", "content": "It is 4."}
    >>> by_turn()([call, {"role": "tool", "name": "look", "content": "4"}, answer])
    Steps(texts=['Let me look.', 'It is 4.'], ends=None, closed=False)
    """

    def split(completion: Any) -> Steps:
        if isinstance(completion, str):
            raise ValueError(
                "by_turn splits conversations, and this completion is text. Use by_regex or by_blank_line, or return "
                "StepRewards.per_turn for the turns of a rollout_func."
            )
        return Steps([message_text(m) for m in completion if m["role"] == "assistant"], None)

    return split


def _content(completion: Any) -> str:
    """The text of a completion: its own, or that of its only message."""
    if isinstance(completion, str):
        return completion
    if len(completion) != 1:
        raise ValueError(
            f"a conversation of {len(completion)} messages has no text to be split. Use by_turn for one step a turn."
        )
    return message_text(completion[0])


def message_text(message: Mapping[str, Any]) -> str:
    """What a message says: its content, or the texts in it."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)
