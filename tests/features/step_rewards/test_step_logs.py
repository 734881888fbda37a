"""What is logged of step rewards: sums as rewards, and in the table of completions what was trained on."""

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from tests.features.step_rewards.tools import build, ends_of, lines, rows, values_of
from tests.tools import tiny


def test_without_step_rewards_the_advantages_are_trls(models: dict[str, Path], tmp_path: Path) -> None:
    """Also in a rollout between two that have them, of which the last is shown."""
    calls = []

    def sometimes(completions: list[str], **_: Any) -> list[Any]:
        calls.append(None)
        return lines(completions) if len(calls) != 2 else [sum(values_of(text)) for text in completions]

    trainer = build(models, tmp_path, [sometimes], log_completions=True)
    plain = build(models, tmp_path, [lambda completions, **_: [sum(values_of(text)) for text in completions]])
    trls = plain._generate_and_score_completions(rows(16))["advantages"]
    for dimensions in (2, 1, 2):
        output = trainer._generate_and_score_completions(rows(16))
        advantages = output["advantages"]
        assert advantages.dim() == dimensions
        if dimensions == 1:
            assert torch.equal(advantages, trls) and list(trainer._logs["advantages"]) == trls.tolist()
    shown = [value for completion in trainer.last_step_advantages for _, value in completion]
    assert shown == output["advantages"][output["completion_mask"].bool()].tolist() and any(shown)


def test_the_table_shows_what_was_trained_on(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models, tmp_path, [lines], log_completions=True, max_steps=1, step_advantage="process")
    outputs = []
    rollout = trainer._generate_and_score_completions
    vars(trainer)["_generate_and_score_completions"] = lambda inputs: outputs.append(rollout(inputs)) or outputs[-1]
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = pandas.read_parquet(file)
    (output,) = outputs
    assert len(table) == 16
    for i, row in table.iterrows():
        mask = output["completion_mask"][i].bool()
        advantages = output["advantages"][i][mask]
        assert row["lines"] == pytest.approx(sum(values_of(row["completion"])))
        assert row["advantage"] == pytest.approx(advantages.mean().item(), abs=1e-6)
        shown = trainer.last_step_advantages[i]
        assert "".join(text for text, _ in shown) == row["completion"]
        assert [value for _, value in shown] == advantages.tolist()
    counts = [len(ends_of(text)) for text in table["completion"]]
    (logged,) = [row["steps/mean_count"] for row in tiny.history(trainer) if "steps/mean_count" in row]
    assert logged == pytest.approx(sum(counts) / len(counts)) and len(set(counts)) > 2
