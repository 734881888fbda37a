"""The sign of an evaluation metric that falls while the reward rises, and what it must not be taken for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trl_steady.report.history import History
from trl_steady.report.symptoms import diagnose, look

Row = dict[str, Any]


def run(key: str = "eval_accuracy", *, seed: int = 0, to: float = 0.2, answers: int = 100, **more: Any) -> History:
    """Return 200 steps with 20 evaluations, in which the share of right answers goes from 0.6 to `to`."""
    rises, is_over = more.pop("rises", 0.6), more.pop("is_over", True)
    random = np.random.default_rng(seed)
    rows: list[dict[str, float]] = []
    for step in range(1, 201):
        rows.append({"step": step, "reward": 0.2 + rises * step / 200 + 0.03 * random.standard_normal()})
        if step % 10 == 0:
            share = 0.6 + (to - 0.6) * step / 200
            rows.append({"step": step, key: random.binomial(answers, share) / answers})
    return History(rows, {"notes": [], "settings": more}, is_over=is_over)


def is_found(history: History) -> bool:
    return "evaluation-falls" in look(history)[0]


@pytest.mark.parametrize("key", ["eval_accuracy", "eval_hard_accuracy"])
@pytest.mark.parametrize("is_over", [True, False])
def test_a_falling_share_is_found_by_its_usual_name(key: str, is_over: bool) -> None:
    history = run(key, is_over=is_over)
    finding = look(history)[0]["evaluation-falls"]
    assert finding.metric == key and not finding.cause and finding.since <= 60
    assert "metric_for_best_model" in finding.advice


def test_the_names_of_metrics_are_those_of_the_settings() -> None:
    assert is_found(run("eval_solved", eval_metrics=["solved"]))
    assert is_found(run("eval_hard_solved", eval_metrics=["solved"]))
    assert look(run("eval_solved"))[1]["evaluation-falls"] == "eval_accuracy"  # unknown, so not looked for


@pytest.mark.parametrize("name", ["error_rate", "wrong_format", "refusals", "repetition"])
def test_metrics_of_which_less_is_better_may_fall(name: str) -> None:
    assert not is_found(run(f"eval_{name}", eval_metrics=[name]))


def test_a_reward_that_does_not_rise_is_not_exploited() -> None:
    assert not is_found(run(rises=0.0))


def test_noise_is_no_fall() -> None:
    for seed in range(40):
        assert not is_found(run(seed=seed, to=0.6, answers=32))


def test_a_small_fall_is_none() -> None:
    """Many answers make a fall sure. A fall by 4 % of the level is still less than an exploited reward costs."""
    assert not is_found(run(to=0.576, answers=1_000_000))


def of_sets(**values: Callable[[float], float]) -> History:
    """Return 200 steps with a rising reward, and 20 evaluations."""
    rows: list[dict[str, Any]] = []
    for step in range(1, 201):
        rows.append({"step": step, "reward": step / 200})
        if step % 10 == 0 and values:
            rows.append({"step": step, **{key: value(step / 200) for key, value in values.items()}})
    return History(rows, {"notes": [], "settings": {}})


def test_each_of_several_sets_is_looked_at() -> None:
    """The third falls while the reward rises, one stays and one rises with it."""
    well = {"eval_a_reward": lambda done: 0.5, "eval_code_reward": lambda done: done}
    history = of_sets(**well, eval_math_reward=lambda done: 1 - done / 2)
    assert look(history)[0]["held-out-falls"].metric == "eval_math_reward"
    found, missing = look(of_sets(**well, eval_math_reward=lambda done: 0.5 + done / 2))
    assert "held-out-falls" not in {*found, *missing}
    assert look(of_sets())[1]["held-out-falls"].startswith("eval_reward")


def test_a_reward_without_numbers_is_no_error_of_a_sign() -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 201):
        rows.append({"step": step, "reward": None})
        if step % 10 == 0:
            rows.append({"step": step, "eval_reward": 1 - step / 400})
    found, _ = look(History(rows, {"notes": [], "settings": {}}))
    assert "held-out-falls" not in found


def evaluated(accuracy: Callable[[float], float], reward: Callable[[float], float], **others: float) -> list[Row]:
    """Return a log of 80 steps with an evaluation every five. Functions are of the share that is done."""
    random = np.random.default_rng(5)
    log: list[Row] = []
    for step in range(1, 81):
        row: Row = {"step": step, "reward": float(random.binomial(128, reward(step / 80))) / 128, "reward_std": 0.3}
        if step % 5 == 0:
            row |= {"eval_accuracy": float(random.binomial(200, accuracy(step / 80))) / 200, **others}
        log.append(row)
    return log


# of a script whose reward finds its number anywhere in an answer; its author did not know the report
EXPLOITED = (
    0.275,
    0.445,
    0.255,
    0.14,
    0.085,
    0.07,
    0.06,
    0.065,
    0.05,
    0.05,
    0.075,
    0.09,
    0.055,
    0.06,
    0.06,
    0.06,
    0.08,
)
REWARD = (
    0.395,
    0.645,
    0.79,
    0.86,
    0.915,
    0.925,
    0.885,
    0.955,
    0.94,
    0.95,
    0.945,
    0.975,
    0.965,
    0.96,
    0.98,
    0.96,
    0.975,
)


def test_a_metric_that_has_fallen_to_its_floor_has_not_passed() -> None:
    """The exploit is complete: for most of the run, the metric falls no more."""
    rows: list[Row] = [{"step": 0, "eval_accuracy": EXPLOITED[0], "eval_reward": REWARD[0]}]
    for step in range(1, 81):
        rows.append({"step": step, "reward": float(np.interp(step, [*range(0, 85, 5)], REWARD)), "reward_std": 0.3})
        if step % 5 == 0:
            rows.append({"step": step, "eval_accuracy": EXPLOITED[step // 5], "eval_reward": REWARD[step // 5]})
    (found,) = (each for each in diagnose(History(rows))[0] if each.symptom.name == "evaluation-falls")
    assert found.passed is None and found.symptom.level == "critical"


@pytest.mark.parametrize(("low", "end"), [(0.25, 0.56), (0.25, 0.52), (0.2, 0.45)])
@pytest.mark.parametrize("key", ["eval_accuracy", "eval_reward"])
def test_a_dip_that_recovers_is_no_fall(low: float, end: float, key: str) -> None:
    """From 0.6 to `low` in the second quarter, and back to `end` by the last."""
    times, levels = [0.0, 0.25, 0.4, 0.75, 1.0], [0.6, 0.6, low, end, end]
    for seed in range(10):
        random = np.random.default_rng(seed)
        rows: list[Row] = []
        for step in range(1, 201):
            rows.append({"step": step, "reward": 0.3 + 0.4 * step / 200 + 0.02 * random.standard_normal()})
            if step % 4 == 0:
                rows[-1][key] = float(random.binomial(500, np.interp(step / 200, times, levels))) / 500
        assert not look(History(rows))[0].keys() & {"evaluation-falls", "held-out-falls"}


@pytest.mark.parametrize(
    ("metrics", "is_found"),
    [
        ({"eval_accuracy": 0.95, "eval_hallucinated": 0.03, "eval_rouge": 0.3}, False),  # these are low by nature
        ({"eval_gsm8k_accuracy": 0.93, "eval_aime_accuracy": 0.2}, False),
        ({"eval_gsm8k_reward": 0.93, "eval_aime_reward": 0.2}, False),
        ({"eval_gsm8k_accuracy": 0.2, "eval_aime_accuracy": 0.1}, True),
        ({"eval_accuracy": 0.1, "eval_reward": 0.95}, True),
    ],
)
@pytest.mark.parametrize("every", [1, 5])
def test_of_several_evaluations_all_must_be_wrong(metrics: dict[str, float], is_found: bool, every: int) -> None:
    """Also if the reward is logged as rarely as they are."""
    rows = [
        {"step": step, "reward": 0.97 + 0.01 * (-1) ** step, **metrics} for step in range(every, 30 * every, every)
    ]
    assert ("evaluation-apart" in look(History(rows))[0]) is is_found


def test_a_harder_evaluation_that_rises_is_not_apart() -> None:
    rows = evaluated(lambda done: 0.2 + 0.25 * done, lambda _: 0.97)
    assert "evaluation-apart" not in look(History(rows))[0]


@pytest.mark.parametrize(
    ("accuracy", "reward", "others", "advice"),
    [
        (0.1, 0.97, {"eval_reward": 0.96}, "The reward pays for answers that the metric calls wrong"),
        (0.3, 0.97, {"eval_reward": 0.3}, "are the training data shuffled"),
        (0.1, 0.97, {}, "are the training data shuffled"),
        (0.6, 0.97, {"eval_reward": 0.6}, ""),
        (0.1, 0.7, {"eval_reward": 0.7}, ""),  # there is more to gain
    ],
)
def test_an_evaluation_that_is_far_below_a_full_reward_is_named(
    accuracy: float, reward: float, others: dict[str, float], advice: str
) -> None:
    found = diagnose(History(evaluated(lambda _: accuracy, lambda _: reward, **others)))[0]
    said = [each.advice for each in found if each.symptom.name == "evaluation-apart" and each.passed is None]
    assert len(said) == bool(advice) and all(advice in text for text in said)
