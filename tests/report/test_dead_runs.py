"""Real runs that train nothing, of TRL's trainers and ours, and what the report says of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.report.runs import DEAD
from tests.tools import tiny
from tests.tools.cases import cases
from trl_steady.core.feature import Feature
from trl_steady.report import History, diagnose


def named(folder: Path) -> dict[str, int]:
    return {finding.symptom.name: finding.since for finding in diagnose(History.read(folder))[0]}


@pytest.mark.parametrize("name", cases(DEAD, ("learning rate 5",)))
def test_a_dead_run_of_trls_trainer_is_named(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """tests/features/test_training_report.py has ours."""
    options, expected = DEAD[name]
    steps = {"max_steps": 48, "save_strategy": "steps", "save_steps": 48}
    tiny.train(tiny.trainer(models["dense"], tmp_path, ours=False, **steps, **options))
    found = named(tmp_path)
    assert expected & found.keys(), found
    assert min(found[symptom] for symptom in expected & found.keys()) <= 24  # the first half


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_log_of_trls_trainer_is_read(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, ours=False, method=method, **steps))
    history = History.read(tmp_path)
    assert history.last_step == 4 and {"reward", "entropy", "grad_norm"} <= history.keys
    logged = [row["reward"] for row in trained.state.log_history if "reward" in row]
    assert history["reward"].values.tolist() == logged
    _, skipped = diagnose(history)
    assert "engine-differs" in skipped


def test_a_checkpoint_has_the_settings_and_the_warnings_of_its_run(models: dict[str, Path], tmp_path: Path) -> None:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4, "num_iterations": 2}
    model = models["dense"]
    with pytest.warns(UserWarning, match="sampling leaves tokens out"):
        trained = tiny.trainer(
            model, tmp_path, **steps, top_p=0.5, ref_model_sync_kl=0.1, generation_kwargs={"do_sample": True}
        )
    tiny.train(trained)
    history = History.read(tmp_path)
    assert history.settings["num_iterations"] == 2 and history.settings["top_p"] == 0.5
    assert not [name for name, value in history.settings.items() if isinstance(value, dict)]
    notes = history.run["notes"]
    assert [note for note in notes if note.startswith("ref_model_sync_kl=0.1 has no effect")]
    assert [note for note in notes if note.startswith("sampling leaves tokens out")]
    assert "option-idle" in named(tmp_path)


def test_a_warning_that_each_push_to_an_engine_gives_is_noted_once() -> None:
    feature = Feature(SimpleNamespace(), None)
    with pytest.warns(UserWarning, match="rounding"):
        for _ in range(3):
            feature.warn("each push changes the base by rounding")
    assert feature.notes == ["each push changes the base by rounding"]
