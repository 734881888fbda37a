"""From a text to advantages, all that lies between: what stopping after a line is taught where more is worth nothing.

The policy writes a good line or a bad one, at even odds, and then stops or writes one more, worth 1/2 or -1/2 at even
odds. Every outcome of a group of three is counted, so that nothing here is noise.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tests import tiny
from trl_steady.functional import advantages
from trl_steady.rewards import by_regex
from trl_steady.rewards.placement import Completion, token_ends
from trl_steady.rewards.table import Rewarded, tabulate

WORTH = {"g": 1.0, "b": 0.0, "u": 0.5, "d": -0.5}
DECIDES = 2  # the token behind the first line: the end of the sequence, or the next line's first


class Outcome(NamedTuple):
    text: str
    chance: float
    goes_on: bool
    rewarded: Rewarded


def outcomes(closed: bool | None) -> list[Outcome]:
    """All completions, their steps placed as the trainer places them; `closed` None = as the splitter says."""
    tokenizer, result = tiny.tokenizer(), []
    texts = [(first + "\n" + more, 0.25 if not more else 0.125) for first in "gb" for more in ("", "u\n", "d\n")]
    for text, chance in texts:
        steps = by_regex(r"\n")(text)
        rewards = steps.rewards([WORTH[line[0]] for line in steps.texts])
        if closed is not None:
            rewards = replace(rewards, closed=closed)
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ends = token_ends(rewards, Completion(0, text, ids, [True] * len(ids), ""), tokenizer)
        rewarded = Rewarded(len(ids), len(ids), {0: list(zip(ends, rewards.values, strict=True))})
        result.append(Outcome(text, chance, len(text) > 2, rewarded))
    return result


def gradients(closed: bool | None) -> dict[str, float]:
    """Of going on after a good line and after a bad one, d log π / d logit at even odds."""
    found = {"g": 0.0, "b": 0.0}
    for group in itertools.product(outcomes(closed), repeat=3):
        chance = group[0].chance * group[1].chance * group[2].chance
        sums = torch.tensor([[sum(v for _, v in one.rewarded.steps[0])] for one in group], dtype=torch.float64)
        table = tabulate([one.rewarded for one in group], sums, torch.ones(1), cover=True)
        of_steps = advantages.return_to_go(table.rewards, group_size=3, scale="none")
        on_decision = advantages.per_token(of_steps, table.ends, 5)[:, DECIDES]
        for one, advantage in zip(group, on_decision.tolist(), strict=True):
            found[one.text[0]] += chance * advantage * (0.5 if one.goes_on else -0.5) / 3
    return found


def test_a_line_teaches_nothing_about_what_comes_after_it() -> None:
    assert gradients(None) == pytest.approx({"g": 0.0, "b": 0.0}, abs=1e-15)


def test_a_stop_that_counts_with_the_line_before_it_is_caught() -> None:
    """The end of the sequence would get the line's reward and its baseline, and going on those of the next line."""
    assert gradients(False) == pytest.approx({"g": -1 / 24, "b": 1 / 24})
