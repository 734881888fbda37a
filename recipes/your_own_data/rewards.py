"""The reward of this recipe. `trl-steady grpo` imports it by the dotted path in the YAML."""

import re
from typing import Any


def is_right(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for an answer that is right and nothing else, 0.5 for one with the right word in it, and 0 otherwise.

    Args:
        completions: For each answer of the model, its messages. Prompts that are plain text give plain text.
        answer: The column `answer` of the data set, a value for each completion. Other columns come in the same way.
    """
    scores = []
    for (message,), right in zip(completions, answer, strict=True):
        words = re.findall(r"\w+", message["content"].lower())
        scores.append(1.0 if words == [right.lower()] else 0.5 if right.lower() in words else 0.0)
    return scores
