"""Rewards for the steps of a completion: the values that a reward function may return, and tools to make them."""

from trl_steady.rewards.pictures import advantages_html, advantages_png
from trl_steady.rewards.scoring import process_reward_model, scored_steps
from trl_steady.rewards.splitters import Splitter, Steps, by_blank_line, by_regex, by_turn
from trl_steady.rewards.steps import StepRewards

__all__ = [
    "Splitter",
    "StepRewards",
    "Steps",
    "advantages_html",
    "advantages_png",
    "by_blank_line",
    "by_regex",
    "by_turn",
    "process_reward_model",
    "scored_steps",
]
