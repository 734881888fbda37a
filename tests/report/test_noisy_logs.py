"""Symptoms in logs that are as noisy as real ones, and what must not be said of them."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.report.simulated import SICK, Row, healthy, level, log, over, rising, shape
from trl_steady.report import History, diagnose
from trl_steady.report.signs.policy import entropy_collapses, policy_collapsed
from trl_steady.report.statistics import chance_of_order
from trl_steady.report.symptoms import Finding, look, verdict

_ALIKE = "frac_reward_zero_std"


def heads(found: dict[str, Finding]) -> set[str]:
    """Return the names of what is said at the head of a verdict."""
    return {name for name, finding in found.items() if not finding.cause and finding.symptom.level != "note"}


def gain(history: History) -> float:
    """Return how much the level without noise has risen, in standard deviations within a group."""
    values = history["simulated/level"].values
    third = len(values) // 3
    rise = values[-third:].mean() - values[:third].mean()
    return float(rise / history["reward_std"].values.mean())


def run(count: int, of: Callable[[int, np.random.Generator], Row], every: int = 1, **settings: Any) -> History:
    """Return the log of a run. `of` returns metrics of a log from its number, 1 for the first."""
    random = np.random.default_rng(0)
    usual = {"loss": 0.01, "grad_norm": 0.3, "reward_std": 0.3, "frac_reward_zero_std": 0.2, "entropy": 0.5}
    rows = [{"step": every * number, **usual, **of(number, random)} for number in range(1, count + 1)]
    return History(rows, {"settings": {"max_steps": every * count, **settings}})


# Simulated runs.


def test_runs_that_learn_have_no_symptom() -> None:
    """A reward is called flat only if it rises by less than half of the spread of a group, as the sign promises."""
    rises = 0
    for seed in range(60):
        history = healthy(seed)
        found = heads(look(history)[0]) - {"groups-all-right"}
        if gain(history) >= 0.5:
            rises += 1
            assert found == set(), (seed, found)
        assert found <= {"reward-flat"}, (seed, found)
    assert rises >= 20


def test_no_look_at_a_run_that_learns_finds_something_critical() -> None:
    for seed in range(100, 116):
        findings = diagnose(healthy(seed))[0]
        assert [finding.symptom.name for finding in findings if finding.symptom.level == "critical"] == [], seed


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("make", SICK, ids=lambda make: make.__name__)
def test_faults_are_found_in_noise(make: Callable[[np.random.Generator], list[Row]]) -> None:
    """In 200 runs of each kind that were not used to choose limits, at least 80 % were found."""
    found = [SICK[make] & look(over(make(np.random.default_rng(seed))))[0].keys() for seed in range(20)]
    assert sum(bool(names) for names in found) >= 14  # a rate of 80 % gives fewer once in 30 times


# The reward.


@pytest.mark.parametrize("scale", [(0.0, 1.0), (-1.0, 2.0), (0.0, 5.0)], ids=["0 to 1", "-1 to 1", "0 to 5"])
def test_a_reward_that_is_destroyed_is_the_cause_of_all_that_follows(scale: tuple[float, float]) -> None:
    """The step is that of the fall, and the advice is about the update."""
    low, size = scale

    def broken(number: int, random: np.random.Generator) -> Row:
        is_lost = number > 25
        right = 0.03 if is_lost else 0.85
        row = {"reward": low + size * (right + 0.03 * random.standard_normal()), "reward_std": 0.2 * size}
        row |= {"entropy": 0.2 + 5.0 * is_lost, "frac_reward_zero_std": 0.98 if is_lost else 0.7}
        row |= {"completions/mean_length": 512.0 if is_lost else 200.0, "completions/clipped_ratio": float(is_lost)}
        return row | {"sampling/sampling_logp_difference/mean": 0.3 if number > 27 else 0.007}

    findings = diagnose(run(40, broken, every=5))[0]
    first, *others = [finding for finding in findings if finding.passed is None]
    assert first.symptom.name == "reward-falls" and first.since == 130 and "learning_rate" in first.advice
    assert {finding.cause for finding in others} == {"reward-falls"}
    names = {finding.symptom.name for finding in others}
    assert {"entropy-explodes", "answers-cut-off", "engine-falls-behind"} <= names
    assert "easier problems" not in verdict(findings) and "max_completion_length" not in verdict(findings)


def test_an_engine_that_came_apart_before_the_reward_fell_is_the_cause() -> None:
    def broken(number: int, random: np.random.Generator) -> Row:
        reward = (0.05 if number > 25 else 0.8) + 0.03 * random.standard_normal()
        return {"reward": reward, "sampling/sampling_logp_difference/mean": 0.3 if number > 10 else 0.007}

    found = look(run(40, broken))[0]
    assert heads(found) == {"engine-falls-behind"} and found["reward-falls"].cause == "engine-falls-behind"


def test_a_dip_from_which_the_reward_recovers_is_no_fall() -> None:
    def dips(number: int, random: np.random.Generator) -> Row:
        level = 0.5 if 12 <= number <= 22 else 0.9  # real runs that learn have had such dips
        return {"reward": level + 0.08 * random.standard_normal(), "entropy": 0.15 * math.exp(-0.03 * number)}

    findings = diagnose(run(40, dips, every=5))[0]
    assert not [str(each) for each in findings if each.symptom.level == "critical" or each.passed is None]


def test_of_two_parts_the_lost_one_is_named() -> None:
    def traded(number: int, random: np.random.Generator) -> Row:
        done = number / 40
        right = 0.4 * math.exp(-4 * done) + 0.01 * random.standard_normal()
        form = 0.3 + 0.6 * done + 0.02 * random.standard_normal()
        return {"reward": right + form, "rewards/accuracy/mean": right, "rewards/format/mean": form}

    found = look(run(40, traded))[0]["reward-part-falls"]
    assert found.metric == "rewards/accuracy/mean" and "rewards/format/mean rises" in found.evidence


@pytest.mark.parametrize(
    ("name", "value", "is_flat", "said"),
    [
        ("strict_format", 0.0, False, True),
        ("tool_use", -0.5, False, True),
        ("overlong_penalty", 0.0, False, False),  # no answer gets it
        ("format", 1.0, False, False),  # all answers earn it, and the run learns
        ("format", 1.0, True, True),
    ],
)
def test_a_function_that_never_varies_is_named_if_that_is_a_fault(
    name: str, value: float, is_flat: bool, said: bool
) -> None:
    def varied(number: int, random: np.random.Generator) -> Row:
        judged = 0.3 + (0.0 if is_flat else 0.01 * number) + 0.03 * random.standard_normal()
        row = {"reward": judged + value, "rewards/judge/mean": judged}
        return row | {f"rewards/{name}/mean": value, f"rewards/{name}/std": 0.0}

    found = look(run(40, varied))[0]
    assert ("reward-part-constant" in found) == said
    assert not said or found["reward-part-constant"].metric == f"rewards/{name}/mean"


@pytest.mark.parametrize(
    ("kl", "reward", "part"),
    [
        (lambda done: 0.004 * done, lambda done: 0.4, "raise learning_rate"),
        (lambda done: 0.4 * done, lambda done: 0.4, "num_generations"),
        (lambda done: 0.4 * done, lambda done: 0.4 - 0.15 * done, "lower learning_rate"),
    ],
    ids=["still", "moves", "sinks"],
)
def test_advice_on_a_flat_reward_depends_on_what_the_policy_does(
    kl: Callable[[float], float], reward: Callable[[float], float], part: str
) -> None:
    def flat(number: int, random: np.random.Generator) -> Row:
        done = number / 100
        return {"reward": reward(done) + 0.1 * random.standard_normal(), "kl": kl(done)}

    found = look(run(100, flat))[0]["reward-flat"]
    assert part in found.advice
    assert ("raise learning_rate" in found.advice) + ("lower learning_rate" in found.advice) <= 1


@pytest.mark.parametrize("decays", [True, False])
def test_a_reward_is_flat_after_half_of_the_learning_rate_not_of_the_steps(decays: bool) -> None:
    """With a rate that falls to 0, a third of the steps is more than half of the training."""

    def flat(number: int, random: np.random.Generator) -> Row:
        rate = 1e-6 * (1 - number / 300) if decays else 1e-6
        return {"reward": 0.4 + 0.05 * random.standard_normal(), "learning_rate": rate}

    assert ("reward-flat" in look(run(100, flat, max_steps=300))[0]) == decays


def test_a_reward_that_starts_near_its_top_has_no_room() -> None:
    """No collapse is said of an entropy that falls beside it, on any scale whose top is known."""

    def good(number: int, random: np.random.Generator) -> Row:
        reward = min(0.9 + 0.06 * random.standard_normal(), 1.0)
        return {"reward": low + size * reward, "entropy": 0.2 * math.exp(-0.1 * number)}

    for low, size in ((0, 1), (-1, 2), (0, 5)):
        assert heads(look(run(60, good))[0]) == set(), (low, size)


def test_one_log_cannot_show_that_a_reward_never_changes() -> None:
    same = {"reward": 3.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    found = [look(run(count, lambda number, random: same))[0] for count in (1, 2)]
    assert ["reward-constant" in names for names in found] == [False, True]


# Groups and gradient.


def test_zeros_that_chance_gives_are_no_lost_gradient() -> None:
    """With 80 % of the groups alike, half of the logged updates have no gradient."""

    def chance(number: int, random: np.random.Generator) -> Row:
        gradient = 0.3 if random.random() < 0.5 else 0.0
        return {"reward": 0.7 + 0.05 * random.standard_normal(), "frac_reward_zero_std": 0.8, "grad_norm": gradient}

    def lost(number: int, random: np.random.Generator) -> Row:
        return chance(number, random) | {"frac_reward_zero_std": 0.3, "grad_norm": 0.0}

    for count in (10, 20, 40):
        names = {finding.symptom.name for finding in diagnose(run(count, chance, every=5))[0]}
        assert "gradient-zero" not in names, count
    found = look(run(20, lost, every=5))[0]["gradient-zero"]
    assert "70% of the last groups the rewards differ" in found.evidence and "lost on its way" in found.advice


@pytest.mark.parametrize(("share", "said"), [(0.59, False), (0.97, True)])
def test_a_share_of_zeros_and_ones_is_a_mean(share: float, said: bool) -> None:
    """With one group in a step, the median of 59 % is 100 %."""

    def single(number: int, random: np.random.Generator) -> Row:
        return {"reward": random.random(), "frac_reward_zero_std": float(random.random() < share)}

    assert ("groups-alike" in look(run(1000, single))[0]) == said


@pytest.mark.parametrize(
    ("start", "cut_off", "name"),
    [
        (0.92, 0.02, "groups-all-right"),
        (0.3, 0.02, "groups-all-right"),  # it has risen there
        (0.8, 0.02, "groups-alike"),  # it was there from the start: the prompt decides
        (0.92, 1.0, ""),  # no answer ends: nothing is solved
    ],
)
def test_groups_are_all_right_at_the_top_or_after_a_rise(start: float, cut_off: float, name: str) -> None:
    def same(number: int, random: np.random.Generator) -> Row:
        reward = start + (max(start, 0.8) - start) * number / 40 + 0.01 * random.standard_normal()
        return {"reward": reward, "frac_reward_zero_std": 0.97, "completions/clipped_ratio": cut_off}

    names = {each for each in look(run(40, same))[0] if each.startswith("groups")}
    assert names == ({name} if name else set())


@pytest.mark.parametrize(("first", "said"), [(0.02, True), (0.5, False)])
def test_groups_are_all_wrong_only_if_the_reward_was_never_higher(first: float, said: bool) -> None:
    def wrong(number: int, random: np.random.Generator) -> Row:
        reward = (first if number <= 20 else 0.02) + 0.01 * random.random()
        return {"reward": reward, "frac_reward_zero_std": 0.97}

    assert ("groups-all-wrong" in look(run(40, wrong))[0]) == said


@pytest.mark.parametrize(("answers", "said"), [(1, True), (4, False)])
def test_groups_of_one_have_their_scores_as_advantages(answers: int, said: bool) -> None:
    def row(number: int, random: np.random.Generator) -> Row:
        scores = random.random((16, answers))
        advantages = scores
        if answers > 1:
            advantages = (scores - scores.mean(axis=1, keepdims=True)) / scores.std(axis=1, keepdims=True)
        logged: Row = {"reward": float(scores.mean())}
        for kind, values in (("score", scores), ("advantages", advantages)):
            logged |= {f"verl:critic/{kind}/max": values.max(), f"verl:critic/{kind}/min": values.min()}
        return logged

    assert ("groups-of-one" in look(run(20, row))[0]) == said


# Levels, sums and what is not a number.


def test_a_mean_of_kept_groups_shows_no_level() -> None:
    def solved(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.5 + 0.02 * (-1) ** number, "frac_reward_zero_std": 0.97}

    given = run(60, solved)
    assert {"groups-alike", "reward-flat"} <= look(given)[0].keys()
    given.flags = {key: frozenset({"kept_only"}) for key in ("reward", "frac_reward_zero_std")}
    found, missing = look(given)
    assert found == {}
    assert missing["reward-flat"] == missing["reward-falls"] == "reward of all groups"
    assert missing["groups-all-right"] == "frac_reward_zero_std of all groups"


def test_a_sum_is_compared_with_no_limit_of_a_mean() -> None:
    def large(number: int, random: np.random.Generator) -> Row:
        row = {"reward": 0.2 + 0.01 * number, "kl": 40.0, "entropy": 90.0, "mismatch/kl": 3.0}
        return row | {"kl": 40.0 + random.random()}

    given = run(60, large)
    means = {"kl-explodes", "entropy-high", "engine-other-policy"}
    assert means <= look(given)[0].keys()
    given.flags = {key: frozenset({"sum"}) for key in ("kl", "entropy", "mismatch/kl")}
    found, missing = look(given)
    assert not means & found.keys() and means <= missing.keys()


@pytest.mark.parametrize(
    ("key", "name", "good", "said"),
    [
        ("kl", "kl-nan", 0, True),
        ("entropy", "metric-nan", 0, True),
        ("entropy", "metric-nan", 1, False),
        ("reward_std", "metric-nan", 0, True),
        ("reward_std", "metric-nan", 1, False),
    ],
)
def test_a_metric_that_is_never_a_number_is_named(key: str, name: str, good: int, said: bool) -> None:
    def row(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.2 + 0.02 * number, "kl": 0.01, key: None if number > good else 0.1}

    found = look(run(20, row))[0]
    assert (name in found and found[name].metric == key) == said


@pytest.mark.parametrize(("lost", "said"), [((3,), False), ((1, 9), True), ((3, 9, 17), True)])
def test_a_kl_that_is_nan_in_some_logs_is_named(lost: tuple[int, ...], said: bool) -> None:
    """One log in twenty can be a rollout with an empty answer."""

    def row(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.2 + 0.02 * number, "kl": None if number in lost else 0.01}

    found = look(run(20, row))[0]
    assert ("kl-nan" in found) == said
    if said:
        assert found["kl-nan"].since == lost[0] and f"NaN in {len(lost)} of 20 logs" in found["kl-nan"].evidence


def test_a_row_without_a_reward_need_not_have_a_kl() -> None:
    """Rows of an export have null for metrics that were logged elsewhere."""
    rows: list[Row] = [{"step": step, "reward": 0.2 + 0.02 * step, "kl": 0.01} for step in range(1, 41)]
    for row in rows[::2]:
        row |= {"reward": None, "kl": None, "eval_loss": 0.1}
    assert "kl-nan" not in look(History(rows, {"settings": {"max_steps": 40}}))[0]


@pytest.mark.parametrize(("norm", "flags", "said"), [(3e9, (), True), (300.0, (), False), (3e9, ("sum",), False)])
@pytest.mark.parametrize("count", [2, 40])
def test_a_gradient_that_is_always_huge_is_named(norm: float, flags: tuple[str, ...], said: bool, count: int) -> None:
    """A log of the trainer alone: it has no reward, and no step stands out."""
    random = np.random.default_rng(0)
    rows = [{"step": step, "loss": 0.1, "grad_norm": norm * random.uniform(0.7, 1.0)} for step in range(1, count + 1)]
    history = History(rows, flags={"grad_norm": frozenset(flags)})
    assert ("gradient-huge" in look(history)[0]) == said


def test_a_kl_of_thousandths_does_not_rise() -> None:
    """It quadruples, and is nothing: the advice must not be a lower rate."""

    def still(number: int, random: np.random.Generator) -> Row:
        return {"reward": -0.2 + 0.4 * random.standard_normal(), "reward_std": 1.0, "kl": 0.001 + 3e-5 * number / 4}

    found = look(run(400, still))[0]
    assert heads(found) == {"reward-flat"} and "ower learning_rate" not in found["reward-flat"].advice


def test_what_stays_beyond_its_limit_has_not_passed() -> None:
    """The entropy has no trend any more, at 7 nats."""

    def stays(number: int, random: np.random.Generator) -> Row:
        entropy = 0.16 + min(max(number - 5, 0), 5) * 1.4 + 0.1 * random.standard_normal()
        return {"reward": 0.3 + 0.02 * random.standard_normal(), "entropy": entropy}

    (found,) = [each for each in diagnose(run(200, stays))[0] if each.symptom.name == "entropy-explodes"]
    assert found.passed is None


def test_a_rate_that_warms_up_moves_the_policy() -> None:
    def warm(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.2 + 0.01 * number, "learning_rate": min(number - 1, 10) * 1e-6}

    assert not [each for each in diagnose(run(60, warm))[0] if each.symptom.name == "policy-still"]
    assert "policy-still" in look(run(60, lambda number, random: {"reward": 0.2, "learning_rate": 0.0}))[0]


@pytest.mark.parametrize(
    ("sync", "asked", "kl", "said"),
    [
        (True, 1.0, 0.3, "engine-other-policy"),  # the default counts as 0.1 for an adapter alone
        (False, 1.0, 0.3, "engine-differs"),
        (True, 2.0, 0.3, "engine-differs"),
        (True, 2.0, 1.5, "engine-differs"),
        (False, None, 1.5, "engine-other-policy"),
    ],
)
def test_an_engine_serves_another_policy_beyond_the_limit_of_its_check(
    sync: bool, asked: float | None, kl: float, said: str
) -> None:
    def row(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.2 + 0.01 * number, "mismatch/kl": kl}

    settings = {"use_vllm": True, "vllm_adapter_sync": sync, "engine_check": asked}
    assert [*look(run(30, row, **settings))[0]] == [said]


@pytest.mark.parametrize(("good", "said"), [(0, "engine-differs"), (10, "engine-falls-behind")])
@pytest.mark.parametrize("has_sum", [False, True])
def test_an_engine_is_judged_by_its_sample_size_alone(good: int, said: str, has_sum: bool) -> None:
    """The log lacks what tells another policy apart, or has it as a sum, which no limit is used on."""

    def row(number: int, random: np.random.Generator) -> Row:
        size = 0.99 if number <= good else 0.5
        found: Row = {"reward": 0.2 + 0.01 * number, "mismatch/effective_sample_size": size}
        if has_sum:
            found["mismatch/kl"] = 3.0
        return found

    history = run(30, row)
    history.flags = {"mismatch/kl": frozenset({"sum"})}
    found, missing = look(history)
    assert [*found] == [said] and "engine-other-policy" in missing


# The length.


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("full", [12, 40, 80])
def test_a_reward_for_length_is_told_while_lengths_stand_at_the_limit(full: int) -> None:
    def paid(number: int, random: np.random.Generator) -> Row:
        noise = random.uniform(-20, 20) if number < full else random.uniform(-6, 0)
        length = min(1000.0, 100 + 900 * (number - 1) / full) + noise
        row = {"reward": 0.002 * length + random.uniform(-0.01, 0.01), "completions/mean_length": length}
        return row | {"completions/clipped_ratio": 0.0 if number < full else 0.98}

    for count in (full + 10, 120, 300):
        findings = diagnose(run(count, paid))[0]
        (found,) = [each for each in findings if each.symptom.name == "length-rewarded"]
        assert found.passed is None, count
        assert "raise max_completion_length" not in "".join(each.advice for each in findings)


@pytest.mark.parametrize(
    ("begins", "slope", "part"),
    [
        (0, 0.0, "Raise max_completion_length"),
        (20, 0.0, "lower learning_rate"),
        (20, 0.01, "raise max_completion_length"),
    ],
    ids=["from the start", "grown", "grown with the reward"],
)
def test_a_higher_limit_is_advised_if_answers_need_it(begins: int, slope: float, part: str) -> None:
    def cut(number: int, random: np.random.Generator) -> Row:
        reward = 0.3 + slope * number + 0.02 * random.standard_normal()
        return {"reward": reward, "completions/clipped_ratio": 0.9 if number > begins else 0.02}

    assert part in look(run(40, cut))[0]["answers-cut-off"].advice


def test_answers_of_one_length_are_cut_off_where_no_share_is_logged() -> None:
    def row(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.02 + 0.02 * random.random(), "completions/mean_length": 128.0}

    found = look(run(100, row))[0]["answers-cut-off"]
    assert "128 tokens" in found.evidence and "Raise max_completion_length" in found.advice


def test_a_collapse_that_is_stuck_is_no_reward_that_rises() -> None:
    """A learning rate of 0.5: the reward goes from 0.12 to 0, and then stays at 0.51 by luck."""

    def stuck(number: int, random: np.random.Generator) -> Row:
        is_stuck = number > 17
        reward = 0.51 + 0.02 * random.standard_normal() if is_stuck else 0.2
        row = {"reward": (0.12, 0.0)[number - 1] if number < 3 else reward, "reward_std": 0.3 * (not is_stuck)}
        row |= {"frac_reward_zero_std": float(is_stuck), "grad_norm": float(not is_stuck)}
        return row | {"entropy": 3.04 * max(0.0, 1 - (number - 1) / 15)}

    found = look(run(40, stuck))[0]
    assert heads(found) == {"policy-collapsed"} and found["groups-alike"].cause == "policy-collapsed"


@pytest.mark.parametrize(("far", "said"), [(0.05, False), (1.0, True), (6.0, True)])
def test_a_kl_that_goes_on_after_the_reward_is_named(far: float, said: bool) -> None:
    def drifts(number: int, random: np.random.Generator) -> Row:
        reward = 0.2 + 0.3 * min(1.0, number / 30) + 0.02 * random.standard_normal()
        return {"reward": reward, "kl": far * number / 150}

    assert ("kl-rises" in look(run(150, drifts))[0]) == said


def test_a_shape_is_as_noisy_as_it_says() -> None:
    """The level without noise is that of the rewards, for a run of many groups."""
    of = shape(np.random.default_rng(0))._replace(logs=20, every=5, groups=200, answers=8, drift=0.0)
    for curve in (level(0.4), rising(0.2, 0.8, 2.0)):
        rows = log(of, curve, np.random.default_rng(1))
        off = [row["reward"] - row["simulated/level"] for row in rows]
        # 8,000 answers in a log, of 1,000 prompts: an error of 0.013 of the range at most, and 5 of them
        assert max(map(abs, off)) < 5 * 0.013 * (of.high - of.low)


def test_a_share_that_few_groups_give_by_chance_is_hardly_said() -> None:
    """Three of four groups are alike, two groups a step. Short stretches of 1 come by themselves at some look."""
    said = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        shares = random.binomial(2, 0.75, size=300) / 2
        rewards = random.binomial(4, 0.6, size=300) / 4
        history = run(300, lambda number, _, s=shares, r=rewards: {"reward": r[number - 1], _ALIKE: s[number - 1]})
        looks = [history.until(step) for step in range(5, 300, 10)]
        said += any("groups-alike" in look(early)[0] for early in looks)
    assert said <= 3  # one in a hundred at a look, and looks have most of their logs in common


@pytest.mark.parametrize(
    "calm", [0.7, pytest.param(0.5, marks=pytest.mark.slow), pytest.param(0.85, marks=pytest.mark.slow)]
)
def test_an_entropy_of_few_answers_hardly_collapses_by_chance(calm: float) -> None:
    """One group of four a step: its entropy is 0.04 nats if the prompt is known, or anything up to 2.5."""
    said = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        entropy = np.where(random.random(120) < calm, 0.04, random.uniform(0.1, 2.5, 120))
        rewards = random.binomial(4, 0.5, 120) / 4
        history = run(120, lambda n, _, e=entropy, r=rewards: {"reward": r[n - 1], "entropy": e[n - 1]})
        looks = [*(history.until(step) for step in range(5, 120, 5)), history]
        said += any(entropy_collapses(early) or policy_collapsed(early) for early in looks)
    assert said <= 1  # one in a hundred at the end, one in a thousand at a look


@pytest.mark.parametrize(("end", "said"), [(0.2, True), (0.5, False)])
def test_an_entropy_that_fell_at_first_has_collapsed_if_little_is_left_at_the_end(end: float, said: bool) -> None:
    """In the last third, it hardly falls. As fast as in the whole run, a fifth would soon be a tenth."""

    def falls(number: int, random: np.random.Generator) -> Row:
        level = end + (1 - end) * math.exp(-number / 12)
        return {"reward": 0.5 + 0.05 * (-1) ** number, "entropy": 3 * level * random.uniform(0.95, 1.05)}

    history = run(80, falls)
    assert ("entropy-collapses" in look(history)[0]) == said
    # while it trains, only the last third counts
    assert not [step for step in (60, 70, 75) if "entropy-collapses" in look(history.until(step))[0]]


@pytest.mark.parametrize("values", ["000101111", "010110110", "110001", "0111"])
def test_the_chance_of_an_order_is_that_of_all_orders(values: str) -> None:
    def late(order: Sequence[bool]) -> float:
        """Return by how many bad values an order is behind at most."""
        share = sum(order) / len(order)
        return max(count * share - sum(order[:count]) for count in range(1, len(order) + 1))

    given = [value == "1" for value in values]
    places = range(len(given))
    orders = [[place in bad for place in places] for bad in itertools.combinations(places, sum(given))]
    as_late = sum(late(order) >= late(given) - 1e-9 for order in orders)
    assert chance_of_order(np.array(given)) == pytest.approx(as_late / len(orders), rel=1e-9)


def test_a_rare_success_that_ends_is_no_fall() -> None:
    """Two of the first logs have one right answer of eight. Their groups differ by 0.35."""

    def rare(number: int, _: np.random.Generator) -> Row:
        reward = 0.125 if number in (48, 50) else 0.0
        return {"reward": reward, "reward_std": 0.35 * (reward > 0), "frac_reward_zero_std": float(reward == 0)}

    assert "reward-falls" not in {finding.symptom.name for finding in diagnose(run(100, rare))[0]}


def test_held_out_accuracy_that_falls_from_its_first_value_is_compared() -> None:
    """The first evaluation comes before the first log of ten steps."""

    def hacked(number: int, random: np.random.Generator) -> Row:
        return {"reward": 0.3 + 0.05 * number + 0.01 * random.normal(), "eval_reward": 0.9 - 0.05 * number}

    history = run(8, hacked, every=10)
    rows = [{"step": 10 * number - 5, "eval_reward": 0.9 - 0.05 * number} for number in range(1, 9)]
    kept = [{"step": int(step), "reward": value} for step, value in zip(*history["reward"], strict=True)]
    ordered = sorted([*rows, *kept], key=lambda row: row["step"])
    assert "held-out-falls" in look(History(ordered, {"settings": {"max_steps": 80}}))[0]
