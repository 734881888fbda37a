"""A run that is killed and resumed ends as the run that was never killed, bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import resumable, tiny

STEPS = 12  # the end of the window after the third checkpoint


@pytest.mark.slow  # tests/features/reward_model/test_checkpoints.py kills a run in `make test`
@pytest.mark.parametrize(("event", "times"), [("open", 4), ("os.rename", 2), ("shutil.rmtree", 8)])
def test_a_run_killed_at_every_file_of_a_checkpoint(
    event: str, times: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of the third one: before each file that Python opens and each move; of all, before what is left is removed."""
    whole = tmp_path / "whole"
    assert resumable.run("lora", models["moe"], whole, max_steps=STEPS) == 0
    expected = torch.load(whole / "state.pt")
    assert [step for step, _, _ in expected["refreshes"]] == [8]
    pattern = "_unfinished" if event == "shutil.rmtree" else "checkpoint-9"
    for count in itertools.count(1):
        output = tmp_path / str(count)
        if resumable.run("lora", models["moe"], output, kill=(event, pattern, count), max_steps=STEPS) == 0:
            break
        assert resumable.run("lora", models["moe"], output, max_steps=STEPS) == 0
        assert resumable.differences(expected, torch.load(output / "state.pt")) == []
    assert count > times


def test_a_resume_keeps_the_learning_rate(models: dict[str, Path], tmp_path: Path) -> None:
    """As docs/iterative.md says, and as the report's advice takes it."""

    def rates(**options: Any) -> list[float]:
        trainer = tiny.trainer(models["dense"], tmp_path, max_steps=6, **options)
        trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
        return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]

    assert rates(learning_rate=1e-2, save_strategy="steps", save_steps=4) == [1e-2] * 6
    assert rates(learning_rate=1e-4, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == [1e-2] * 6
