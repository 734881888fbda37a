"""The recipe with an exploited reward: each metric chooses its best model, and the report names the exploit."""

from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {"held_out": 100, "max_steps": 40, "eval_steps": 2, "save_steps": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_accuracy_chooses_the_right_model_and_the_reward_the_wrong_one(
    recipes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, tuple[int, float]] = {}
    for metric in ("eval_accuracy", "eval_reward"):
        trainer = recipes.hacked.main(tmp_path, metric, **SMALL, **{"output_dir": str(tmp_path / metric)})
        assert trainer.state.best_model_checkpoint.startswith(str(tmp_path / metric))
        found[metric] = trainer.state.best_global_step, trainer.evaluate()["eval_accuracy"]  # of the loaded model
        assert "the reward rises while an evaluation metric falls" in capsys.readouterr().out
    (right_step, right), (wrong_step, wrong) = found.values()
    assert right_step < wrong_step and right > 2 * wrong
