"""Short right answers, measured against the shortest right answer of the same question."""

import re
from typing import Any

from trl_steady import GroupReward


@GroupReward
def shortest_right(
    completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """Return for a right answer the length of the group's shortest right one, divided by its own; 0 for a wrong one.

    No length has to be chosen in advance, and wrong answers gain nothing by being short.

    Args:
        completions: Answers of the model to one question, each with its messages.
        completion_ids: Their tokens, which are counted.
        answer: The column `answer` of the question, once for each completion.
    """
    words = [re.findall(r"\w+", message["content"].lower()) for (message,) in completions]
    is_right = [right.lower() in found for found, right in zip(words, answer, strict=True)]
    lengths = [len(ids) for ids in completion_ids]
    least = min([length for length, right in zip(lengths, is_right, strict=True) if right], default=0)
    return [least / length if right else 0.0 for length, right in zip(lengths, is_right, strict=True)]
