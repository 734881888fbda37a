"""From a text to advantages, all that lies between: what stopping after a line is taught where more is worth nothing.

The policy writes a good line or a bad one, at even odds, and then stops or writes one more, worth 1/2 or -1/2 at even
odds. Every outcome of a group of three is counted, so that nothing here is noise.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tests.tools import tiny
from trl_steady.features.step_rewards.alignment import Completion, token_ends
from trl_steady.features.step_rewards.table import RewardedCompletion, tabulate
from trl_steady.functional import advantages
from trl_steady.rewards import by_blank_line, by_regex

WORTH = {"g": 1.0, "b": 0.0, "u": 0.5, "d": -0.5}
# what splits, what ends a step, and what may stand before the next one
SPLITTERS = {
    "lines": (by_regex(r"\n"), "\n", ""),
    "lines with a blank one between": (by_regex(r"\n"), "\n", "\n"),
    "paragraphs": (by_blank_line(), "\n\n", ""),
    "paragraphs far apart": (by_blank_line(), "\n\n", "\n \n"),
    "sentences": (by_regex(r"\."), ".", " "),
}


class Outcome(NamedTuple):
    first: str
    goes_on: bool
    chance: float
    scored: RewardedCompletion


def outcomes(separated: str, closed: bool | None) -> list[Outcome]:
    """All completions, their steps placed as the trainer places them; `closed` None = as the splitter says."""
    splitter, end, before = SPLITTERS[separated]
    tokenizer, result = tiny.tokenizer(), []
    for first, more in itertools.product("gb", ("", "u", "d")):
        text = first + end + (before + more + end if more else "")
        steps = splitter(text)
        rewards = steps.rewards([WORTH[step.strip()[0]] for step in steps.texts])
        if closed is not None:
            rewards = replace(rewards, closed=closed)
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ends = token_ends(rewards, Completion("a completion", text, ids, [True] * len(ids)), tokenizer)
        scored = RewardedCompletion(len(ids), len(ids), {0: list(zip(ends, rewards.values, strict=True))})
        result.append(Outcome(first, bool(more), 0.125 if more else 0.25, scored))
    return result


def gradients(separated: str, closed: bool | None = None) -> dict[str, float]:
    """Of going on after a good step and after a bad one, d log π / d logit at even odds."""
    found = {"g": 0.0, "b": 0.0}
    decides = 1 + len(SPLITTERS[separated][1])  # the token behind the first step: a byte is one
    for group in itertools.product(outcomes(separated, closed), repeat=3):
        chance = group[0].chance * group[1].chance * group[2].chance
        sums = torch.tensor([[sum(v for _, v in one.scored.steps[0])] for one in group], dtype=torch.float64)
        table = tabulate([one.scored for one in group], sums, torch.ones(1), cover=True)
        of_steps = advantages.return_to_go(table.rewards, group_size=3, scale="none")
        on_decision = advantages.per_token(of_steps, table.ends, decides + 1)[:, decides]
        for one, advantage in zip(group, on_decision.tolist(), strict=True):
            found[one.first] += chance * advantage * (0.5 if one.goes_on else -0.5) / 3
    return found


@pytest.mark.parametrize("separated", SPLITTERS)
def test_a_step_teaches_nothing_about_what_comes_after_it(separated: str) -> None:
    assert gradients(separated) == pytest.approx({"g": 0.0, "b": 0.0}, abs=1e-15)


def test_an_end_that_waits_for_what_comes_next_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blank would be in the step before it where there is one, and the end of the sequence is not."""
    monkeypatch.setitem(SPLITTERS, "greedy", (by_regex(r"\.\s*"), ".", " "))
    assert gradients("greedy") == pytest.approx({"g": 1 / 24, "b": -1 / 24})


def test_a_stop_that_counts_with_the_line_before_it_is_caught() -> None:
    """The end of the sequence would get the line's reward and its baseline, and going on those of the next line."""
    assert gradients("lines", closed=False) == pytest.approx({"g": -1 / 24, "b": 1 / 24})
