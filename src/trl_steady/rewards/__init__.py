"""Rewards for groups of completions and for steps of one: a wrapper, values to return, and tools to make them."""

from trl_steady.rewards.group import GroupReward
from trl_steady.rewards.scoring import scored_steps
from trl_steady.rewards.splitters import Splitter, Steps, by_blank_line, by_regex, by_turn
from trl_steady.rewards.steps import StepRewards

__all__ = [
    "GroupReward",
    "Splitter",
    "StepRewards",
    "Steps",
    "by_blank_line",
    "by_regex",
    "by_turn",
    "scored_steps",
]
