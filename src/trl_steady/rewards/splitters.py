"""Split completions into steps: by a pattern, by blank lines or by turns.

A splitter takes a completion in the form that reward functions get, and returns its `Steps`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_steady.rewards.steps import StepRewards


@dataclass(frozen=True)
class Steps:
    """The steps of a completion.

    Args:
        texts: (S,) text of each step.
        ends: (S,) exclusive end of each step in characters, or None if the steps are assistant turns.
        closed: True if the last step also has the text that ends a step, so that it was over before the model decided
            to stop.
    """

    texts: Sequence[str]
    ends: Sequence[int] | None
    closed: bool = False

    def rewards(self, values: Sequence[float]) -> StepRewards:
        """Return these steps as `StepRewards`, with one value for each step."""
        if self.ends is None:
            return StepRewards.per_turn(values)
        return StepRewards(values, self.ends, closed=self.closed)


Conversation = Sequence[Mapping[str, Any]]
Splitter = Callable[[Any], Steps]
"""A function from a completion, in the form that reward functions get, to its steps."""


def by_regex(pattern: str | re.Pattern[str]) -> Splitter:
    """Return a splitter that ends a step after each match of `pattern`, and at the end of the completion.

    The match is part of the step, and a blank piece belongs to the step after it.

    The tokens up to a step's end must show that the step has ended. If a match depends on the text that follows
    (`\\s*` at the end of the pattern, a look-ahead), the rewards favour either stopping or going on.

    The splitter takes texts, and conversations with one message. It raises a ValueError for other conversations.

    >>> by_regex(r"\\.")("One. Two. And three")
    Steps(texts=['One.', ' Two.', ' And three'], ends=[4, 9, 19], closed=False)
    """
    compiled = re.compile(pattern)

    def split(completion: str | Conversation) -> Steps:
        text = _content(completion)
        matches = [match.end() for match in compiled.finditer(text)]
        texts: list[str] = []
        ends: list[int] = []
        start = 0
        for end in [*matches, len(text)]:
            step = text[start:end]
            if step.strip():  # a blank piece goes to the next step
                texts.append(step)
                ends.append(end)
                start = end
        closed = bool(ends) and ends[-1] in matches
        return Steps(texts, ends, closed)

    return split


def by_blank_line() -> Splitter:
    """Return a splitter that ends a step after each blank line, as in a written-out solution.

    If several blank lines follow each other, all but the first belong to the next step.

    >>> by_blank_line()("First.\\n\\nSecond,\\nstill.\\n\\n").texts
    ['First.\\n\\n', 'Second,\\nstill.\\n\\n']
    """
    return by_regex(r"\n[^\S\n]*\n")


def by_turn() -> Splitter:
    """Return a splitter for conversations with tools: each message of the assistant is a step.

    The text of a step is the content of its message. Tool calls are in `completions`, which a scorer also gets.

    >>> call, answer = {"role": "assistant", "content": "Let me look."}, {"role": "assistant", "content": "It is 4."}
    >>> by_turn()([call, {"role": "tool", "name": "look", "content": "4"}, answer])
    Steps(texts=['Let me look.', 'It is 4.'], ends=None, closed=False)
    """

    def split(completion: Conversation) -> Steps:
        texts = [message_text(message) for message in completion if message["role"] == "assistant"]
        return Steps(texts, None)

    return split


def _content(completion: str | Conversation) -> str:
    """Return the text of a completion, or of its only message if it is a conversation."""
    if isinstance(completion, str):
        return completion
    if len(completion) != 1:
        raise ValueError(f"this splitter got a conversation of {len(completion)} messages. Use by_turn to split it.")
    return message_text(completion[0])


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or the joined texts in it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content)
