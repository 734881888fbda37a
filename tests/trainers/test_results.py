"""The block at the end of training says what the logs hold."""

from pathlib import Path

import pytest
from transformers import TrainerState

from tests.tools import tiny
from trl_steady.trainers.results import ResultsCallback, results

LOGS = [
    {"step": 1, "reward": 0.25, "kl": 0.5, "clip_ratio/region_mean": 0.1, "dropped/off_policy": 0.0},
    {"step": 2, "eval_reward": 9.0},
    {"step": 3, "reward": 0.75, "kl": 0.125, "clip_ratio/region_mean": 0.3, "dropped/off_policy": 0.02},
    {"step": 3, "train_runtime": 1.0},
]


def test_first_and_last_reward_last_kl_and_mean_shares() -> None:
    assert results(3, LOGS).splitlines() == [
        "trl-steady: training ended at optimizer step 3",
        "  reward   0.25 in the first log, 0.75 in the last",
        "  KL       0.125 in the last log",
        "  clipped  20.0%, mean of all logs",
        "  dropped  off_policy 1.0%, mean of all logs",
    ]


def test_rewards_that_nobody_gave_are_left_out() -> None:
    """TRL logs None where all of a log's rewards are None."""
    lines = results(2, [{"reward": None}, {"reward": 1.0}, {"reward": None}]).splitlines()
    assert lines[1:] == ["  reward   1 in the first log, 1 in the last"]
    assert results(0, []).splitlines() == ["trl-steady: training ended at optimizer step 0"]


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_main_process_of_all_machines_prints_it(is_main: bool) -> None:
    printed: list[str] = []
    state = TrainerState(global_step=3, is_world_process_zero=is_main, is_local_process_zero=True, log_history=[*LOGS])
    ResultsCallback(lambda text, **_: printed.append(text)).on_train_end(None, state, None)
    assert printed == [results(3, LOGS)] * is_main


def test_a_run_prints_it_once_at_its_end(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tiny.train(
        tiny.trainer(models["dense"], tmp_path, loss_type="gspo", beta=0.1, off_policy_mask_threshold=0.01)
    )
    block = results(6, tiny.history(trained))
    assert [line.split()[0] for line in block.splitlines()[1:]] == ["reward", "KL", "clipped", "dropped"]
    printed = capsys.readouterr().out
    assert printed.count("training ended") == 1 and block in printed
