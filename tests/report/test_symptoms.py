"""Each symptom is found in a healthy run in which it was planted, and in no healthy run."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.report.runs import UPDATES, healthy, history, recorded
from trl_steady.report import History, diagnose
from trl_steady.report.signs.common import exceeds
from trl_steady.report.statistics import blocks
from trl_steady.report.symptoms import SYMPTOMS, look, verdict

ROOT = Path(__file__).parents[2]
START = 201  # the first update of a rollout, in the middle of the run
Row = dict[str, float]


def from_start(**values: float | Callable[[Row], float]) -> Callable[[list[Row]], None]:
    """Plant values from START on, in the rows that have the metric. "__" in a name stands for "/"."""

    def plant(rows: list[Row]) -> None:
        for row in rows:
            for key, value in values.items():
                key = key.replace("__", "/")
                if row["step"] >= START and key in row:
                    row[key] = value(row) if callable(value) else value

    return plant


def everywhere(**values: float | Callable[[Row], float]) -> Callable[[list[Row]], None]:
    def plant(rows: list[Row]) -> None:
        for row in rows:
            row |= {
                key.replace("__", "/"): value(row) if callable(value) else value
                for key, value in values.items()
                if key.replace("__", "/") in row
            }

    return plant


def late(row: Row) -> float:
    """Return 0 at START and 1 at the end, step 400."""
    return (row["step"] - START) / 200


def flat(level: float) -> Callable[[Row], float]:
    """Return a level with noise."""
    return lambda row: level + 0.03 * np.random.default_rng(int(row["step"])).standard_normal()


def few(row: Row) -> float:
    """Return 0 or 1 answer of 64 that is right."""
    return float(np.random.default_rng(int(row["step"])).integers(2)) / 64


def spiked(rows: list[Row]) -> None:
    for row in rows:
        if row["step"] >= START and row["step"] % 10 == 1 and "grad_norm" in row:
            row["grad_norm"] = 300.0


def left_out(rows: list[Row]) -> None:
    """Some logs have the number of steps since the log before."""
    for row in rows:
        if row["step"] in (START + 6, START + 20):
            row |= {"steps/nonfinite": 2.0, "grad_norm": math.nan}


def without_reward(rows: list[Row]) -> None:
    for row in rows:
        if row["step"] >= START:
            row.pop("reward", None)


def unmoved(rows: list[Row]) -> None:
    for row in rows:
        for key in [key for key in row if key.startswith("ref/")]:
            row.pop(key)
        row["ref/refreshes"] = 0.0


def exploited(rows: list[Row]) -> None:
    """Fewer and fewer of the 200 answers of an evaluation are right from START on, while the reward rises."""
    random = np.random.default_rng(3)
    for row in rows:
        if row["step"] % 10 == 0:
            level = 0.7 - 0.4 * max(late(row), 0.0)
            row["eval_accuracy"] = float(random.binomial(200, level)) / 200


def apart(rows: list[Row]) -> None:
    """The training problems are solved, and a third of the held-out ones."""
    random = np.random.default_rng(4)
    for row in rows:
        if "reward" in row:
            row["reward"] = float(random.uniform(0.92, 1.0))
            row |= {key: row["reward"] for key in row if key.startswith("rewards/") and key.endswith("/mean")}
        if "eval_reward" in row:
            right = float(random.binomial(200, 0.33)) / 200
            row |= {"eval_reward": right, "eval_accuracy": right}


def silent(rows: list[Row]) -> None:
    for row in rows:
        row["rewards/format/mean"] = math.nan


class Plant(NamedTuple):
    """A fault in a run, and the finding that is expected."""

    rows: Callable[[list[Row]], None]
    since: int = START
    tolerance: int = 2 * UPDATES
    """Two rollouts: noise can hide or add one."""
    option: str = ""
    run: Mapping[str, Any] = {}
    without: tuple[str, ...] = ("value/explained_variance",)


def one_part_lost(rows: list[Row]) -> None:
    """The total stays: one function gains what the other loses."""
    for row in rows:
        lost = 0.4 if row["step"] >= START else 0.0
        noise = 0.02 * np.random.default_rng(int(row["step"])).standard_normal()
        row |= {"rewards/accuracy/mean": 0.45 - lost + noise, "rewards/format/mean": 0.2 + lost - noise}


def never_met(rows: list[Row]) -> None:
    for row in rows:
        row |= {"rewards/format/mean": 0.0, "rewards/format/std": 0.0}


def one_answer(rows: list[Row]) -> None:
    for row in rows:
        for end, score in (("max", 0.9), ("min", -0.4)):
            row |= {f"verl:critic/score/{end}": score, f"verl:critic/advantages/{end}": score * (1 - 1e-6)}


def nothing(rows: list[Row]) -> None:
    """The plant is in the settings."""


def clipped(row: Row) -> float:
    return 0.0 if row["step"] % UPDATES == 1 else 1.0


WORSE = dict.fromkeys(("reward", "rewards__reward_model__mean", "reward_model__true", "eval_reward"), flat(0.5))
STILL = ("value/explained_variance", "ref/refresh_step")  # else the reference moves to what is worse
# halfway between two levels on a straight line is a quarter of the run after START; sixths of the run blur the levels
SLOW = 60
PLANTS = {
    "everything-clipped": Plant(from_start(clip_ratio__region_mean=clipped), option="learning_rate"),
    "generation-slow": Plant(from_start(time__generation=120.0), option="updates"),
    "padding-computed": Plant(nothing, 1, 0, "trim_padding", {"settings": {"trim_padding": False}}),
    "nothing-clips": Plant(
        everywhere(clip_ratio__region_mean=0.0),
        1,
        0,
        "steps_per_generation",
        {"settings": {"steps_per_generation": 1}},
    ),
    "ratio-explodes": Plant(
        from_start(ratio__sequence_max=lambda row: 1.0 + 400 * clipped(row)), option="learning_rate"
    ),
    "kl-rises": Plant(
        from_start(kl=lambda row: 0.05 + 2 * late(row), **WORSE), START + 100, SLOW, "beta", without=STILL
    ),
    "teacher-left": Plant(
        from_start(teacher__kl=lambda row: 0.3 + 2 * late(row), **WORSE),
        START + 100,
        SLOW,
        "teacher_coef",
        without=STILL,
    ),
    # the reward gains 0.38 from the first sixth to the last, and beta * KL is 0.4 of it at a KL of 0.004 * 310 tokens
    # (0.3 * 0.004 * 310 * a spread of 0.4 = 0.15), at step 26
    "kl-holds": Plant(
        everywhere(kl=lambda row: 0.01 * (1 - math.exp(-row["step"] / 50))),
        26,
        2 * UPDATES,
        "beta",
        {"settings": {"beta": 0.3, "sync_ref_model": False}},
        without=(*STILL, "ref/refreshes"),
    ),
    "engine-other-policy": Plant(
        everywhere(mismatch__kl=2.0, mismatch__effective_sample_size=0.1, mismatch__above_2=0.3),
        1,
        0,
        "vllm_adapter_sync",
    ),
    "formats-differ": Plant(
        nothing, 0, 0, "fp16=True", {"formats": {"engine": "bfloat16", "trainer": "float32", "about": "no autocast"}}
    ),
    "engine-falls-behind": Plant(
        from_start(mismatch__kl=0.3, mismatch__effective_sample_size=0.5, mismatch__above_2=0.05),
        option="weights",
    ),
    "engine-differs": Plant(
        everywhere(mismatch__kl=0.3, mismatch__effective_sample_size=0.5), 1, 0, "vllm_importance_sampling_mode"
    ),
    "everything-dropped": Plant(
        from_start(dropped__off_policy=lambda row: 0.9 * clipped(row)), option="off_policy_mask_threshold"
    ),
    "groups-all-right": Plant(from_start(frac_reward_zero_std=1.0, reward=0.99), option="num_generations"),
    "groups-all-wrong": Plant(
        everywhere(frac_reward_zero_std=1.0, **dict.fromkeys(WORSE, few)), 1, 0, option="num_generations"
    ),
    "groups-alike": Plant(from_start(frac_reward_zero_std=1.0, reward=flat(0.5)), option="prompt"),
    "entropy-collapses": Plant(
        from_start(entropy=lambda row: 0.25 * math.exp(-1.2 * late(row)), **WORSE),
        START,
        30,
        "learning_rate",
        without=STILL,
    ),
    "answers-cut-off": Plant(from_start(completions__clipped_ratio=0.8), option="max_completion_length"),
    "answers-grow": Plant(
        from_start(completions__mean_length=lambda row: 330 + 1500 * late(row), **WORSE),
        START + 100,
        SLOW,
        "loss_type",
        without=STILL,
    ),
    "evaluation-falls": Plant(exploited, START, 60, "reward function"),
    "evaluation-apart": Plant(apart, 340, 20, "shuffle_dataset"),
    "held-out-falls": Plant(
        from_start(eval_reward=lambda row: 0.75 - 0.5 * late(row)), START, 2 * 40, "load_best_model_at_end"
    ),
    "reward-model-exploited": Plant(
        from_start(reward_model__true=lambda row: 0.75 - 0.5 * late(row)), START, 40, "ref_model_sync_steps"
    ),
    "gradient-huge": Plant(from_start(grad_norm=3e9), START, UPDATES, "sum"),
    "gradient-spikes": Plant(spiked, START, 0, "learning_rate"),
    "not-a-number": Plant(from_start(grad_norm=math.nan), START, 0, "learning_rate"),
    "steps-left-out": Plant(left_out, START + 6, 0, "learning_rate"),
    "reward-missing": Plant(without_reward, START, UPDATES, "reward_funcs"),
    "reward-constant": Plant(everywhere(reward=0.5, reward_std=0.0), 1, 0, "reward_funcs"),
    "gradient-zero": Plant(from_start(grad_norm=0.0), START, UPDATES, "require a gradient"),
    "reference-never-moves": Plant(unmoved, 1, 0, "ref_model_sync_steps", {"settings": {"ref_model_sync_steps": 512}}),
    "reference-collapsed": Plant(from_start(**WORSE), 256, 0, "ref_model_sync_steps"),
    "routes-missing": Plant(from_start(routing__fallback=0.05), option="router_replay"),
    "routes-change": Plant(from_start(routing__changed=lambda row: 0.3 * clipped(row)), option="learning_rate"),
    "kept-mass-low": Plant(from_start(sampling_mask__kept_mass=0.5), option="top_p"),
    "kept-sets-missing": Plant(from_start(sampling_mask__fallback=0.2), option="top_k"),
    "sampling-truncated": Plant(
        nothing, 1, 0, "keep_sampling_mask", {"settings": {"top_p": 0.7, "keep_sampling_mask": False}}
    ),
    "critic-explains-nothing": Plant(
        from_start(value__explained_variance=-0.3), option="value_learning_rate", without=()
    ),
    "adapter-rounds-away": Plant(
        nothing, 0, 0, "adapter_dtype", {"notes": ["a step of 1e-06 is lost to rounding on 90 % of the adapter"]}
    ),
    "option-idle": Plant(nothing, 0, 0, "", {"notes": ["delta=4.0 has no effect with gspo"]}),
    "reward-part-missing": Plant(silent, 1, 0, "reward_funcs"),
    "answers-masked": Plant(
        from_start(completions__clipped_ratio=1.0, entropy=0.0, grad_norm=0.0),
        option="max_completion_length",
        run={"settings": {"mask_truncated_completions": True}},
    ),
    # the noise of the reward is that of the length
    "length-rewarded": Plant(
        everywhere(completions__mean_length=lambda row: 1000 * row["reward"]), 60, SLOW, "length"
    ),
    "policy-collapsed": Plant(from_start(entropy=0.001, **WORSE), option="learning_rate", without=STILL),
    "entropy-explodes": Plant(
        from_start(entropy=lambda row: 0.2 + 3 * late(row)),
        START + 100,
        SLOW,
        "entropy_coef",
        {"settings": {"entropy_coef": 0.1}},
    ),
    "reward-falls": Plant(from_start(**dict.fromkeys(WORSE, flat(0.05))), option="learning_rate", without=STILL),
    "reward-flat": Plant(everywhere(**dict.fromkeys(WORSE, flat(0.3))), 1, 0, "num_generations", without=STILL),
    "reward-part-constant": Plant(never_met, 1, 0, "reward_funcs"),
    "reward-part-falls": Plant(one_part_lost, option="reward_weights"),
    "groups-of-one": Plant(one_answer, 1, 0, "rollout.n"),
    "kl-nan": Plant(everywhere(kl=math.nan), 1, 0, "beta"),
    "metric-nan": Plant(everywhere(entropy=math.nan), 1, 0, "tokens"),
    "kl-explodes": Plant(from_start(kl=50.0), option="learning_rate"),
    "entropy-high": Plant(everywhere(entropy=8.0), 1, 0, "temperature"),
    "policy-still": Plant(everywhere(learning_rate=1e-10), 1, 0, "learning_rate"),
}


def named(given: History, find: Callable[[History], Any] = look) -> list[str]:
    """Return the names of the symptoms that a run shows; with `diagnose`, of those that have passed too."""
    found = find(given)[0]
    findings = found.values() if isinstance(found, dict) else found
    return [finding.symptom.name for finding in findings if finding.symptom.level != "note"]


def test_each_symptom_has_a_plant() -> None:
    assert {*PLANTS} == {symptom.name for symptom in SYMPTOMS} - {"too-few-rollouts"}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_symptom_is_named_since_it_began_with_what_to_do(name: str) -> None:
    plant = PLANTS[name]
    for seed in range(3):
        rows = healthy(seed)
        plant.rows(rows)
        findings = look(history(rows, plant.without, **dict(plant.run)))[0].values()
        heads = [finding.symptom.name for finding in findings if not finding.cause]
        assert len(heads) <= 2, [*map(str, findings)]
        found = next(finding for finding in findings if finding.symptom.name == name)
        assert abs(found.since - plant.since) <= plant.tolerance, found
        assert plant.option in found.advice
        assert re.search(r"\d", found.evidence) or "NaN" in found.evidence


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("without", [("value/explained_variance",), ("frac_reward_zero_std",)], ids=["grpo", "ppo"])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_found_in_a_healthy_run(seed: int, without: tuple[str, ...]) -> None:
    for steps in (1, 4, 12, 40, 133, 400):
        given = history(healthy(seed, steps), without)
        assert named(given) == []
    assert diagnose(history(healthy(seed), ()))[1] == {}  # the run has all keys


@pytest.mark.parametrize(("left_out", "found"), [(1.0, []), (4.0, ["steps-left-out"])])
def test_single_steps_that_are_left_out_are_no_symptom(left_out: float, found: list[str]) -> None:
    rows = healthy(0)
    rows[100]["steps/nonfinite"] = left_out
    assert named(history(rows, ("value/explained_variance",))) == found


@pytest.mark.parametrize("find", [look, pytest.param(diagnose, marks=pytest.mark.slow)], ids=["now", "passed"])
def test_nothing_is_found_in_the_recorded_runs(find: Callable[[History], Any]) -> None:
    meant_to_fail = (
        "moe/results/twice-the-rate/gspo-seed2",  # held-out accuracy falls from 90 to 74 %, at a rate that is too high
        "sampling_mask/results/top-p-0.7",  # ends below top-p 1, as the README says
    )
    assert len(recorded(ROOT)) >= 70
    found = {name: named(History(*run), find) for name, run in recorded(ROOT).items()}
    assert {
        name: names for name, names in found.items() if names and not any(part in name for part in meant_to_fail)
    } == {}


def single_spike(rows: list[Row]) -> None:
    rows[100]["grad_norm"] = rows[300]["grad_norm"] = 400.0


def one_skipped_step(rows: list[Row]) -> None:
    """A scaler of fp16 skips single steps with an infinite gradient."""
    for row in rows[::50]:
        row["grad_norm"] = math.inf


def wrong_at_first(rows: list[Row]) -> None:
    for row in rows[:40]:
        if "frac_reward_zero_std" in row:
            row["frac_reward_zero_std"] = 1.0


@pytest.mark.parametrize(
    ("name", "edit", "run"),
    [
        (
            "the entropy falls while the reward reaches its top",
            from_start(entropy=lambda row: 0.2 * math.exp(-6 * late(row)), reward=lambda row: 0.85 + 0.1 * late(row)),
            {},
        ),
        ("the KL rises with the reward", everywhere(kl=lambda row: 0.002 * row["step"]), {}),
        ("answers grow with the reward", everywhere(completions__mean_length=lambda row: 100 + 5 * row["step"]), {}),
        ("two spikes", single_spike, {}),
        ("skipped steps", one_skipped_step, {}),
        (
            "on-policy, with TRL's defaults",
            everywhere(clip_ratio__region_mean=0.0, ratio__sequence_max=1.0, ratio__sequence_min=1.0),
            {
                "settings": {
                    "steps_per_generation": 1,
                    "loss_type": "dapo",
                    "epsilon": 0.2,
                    "router_replay": None,
                    "off_policy_mask_threshold": math.inf,
                    "epsilon_high": None,
                }
            },
        ),
        ("the mask's threshold only measures", nothing, {"settings": {"off_policy_mask_threshold": math.inf}}),
        ("a range of tokens on a ratio of tokens", nothing, {"settings": {"loss_type": "grpo", "epsilon": 0.2}}),
        (
            "the first rollouts are all wrong",
            wrong_at_first,
            {},
        ),
        ("no warm-up of the reward", everywhere(reward=flat(0.8)), {}),
    ],
)
def test_what_only_looks_like_a_symptom_is_not_one(
    name: str, edit: Callable[[list[Row]], None], run: dict[str, Any]
) -> None:
    for seed in range(3):
        rows = healthy(seed)
        edit(rows)
        assert named(history(rows, **run)) == [], name


def test_plain_trls_keys_are_enough_for_most() -> None:
    plain = {
        *["reward", "reward_std", "frac_reward_zero_std", "entropy", "kl", "grad_norm", "loss", "step", "eval_reward"]
    }
    groups = ("clip_ratio/", "completions/", "sampling/", "eval_")
    rows = [{key: row[key] for key in row if key in plain or key.startswith(groups)} for row in healthy(0)]
    findings, skipped = diagnose(History(rows))
    assert findings == []
    asked = {symptom.name for symptom in SYMPTOMS} - skipped.keys()
    assert {"everything-clipped", "engine-differs", "entropy-collapses", "answers-cut-off", "held-out-falls"} <= asked
    assert {"groups-all-right", "gradient-spikes", "reward-constant", "kl-rises", "answers-grow"} <= asked
    assert all(skipped.values())


def test_a_reward_of_none_is_missing() -> None:
    rows = healthy(0)
    for row in rows:
        if "reward" in row:
            row |= {"reward": math.nan, "rewards/reward_model/mean": math.nan}
    assert "reward-missing" in named(history(rows))


def test_a_symptom_does_not_change_the_history_and_finds_the_same_twice() -> None:
    rows = healthy(0)
    PLANTS["entropy-collapses"].rows(rows)
    given = history(rows)
    before = {key: given[key].values.copy() for key in given.keys}
    assert diagnose(given) == diagnose(given)
    assert all(np.array_equal(given[key].values, values, equal_nan=True) for key, values in before.items())


@pytest.mark.slow
def test_of_a_hundred_thousand_steps_at_most_200_blocks_are_looked_at() -> None:
    given = history(healthy(0))
    random = np.random.default_rng(0)
    rows = [{"step": i, **{key: random.random() for key in given.keys}} for i in range(2_000)]
    long = history(rows)
    for key in [*long.keys]:  # fifty times as long without the time to make it
        series = long[key]
        long._series[key] = series._replace(steps=np.arange(50 * len(series.steps)), values=np.tile(series.values, 50))
    diagnose(long)
    assert all(len(blocks(long, key).values) <= 200 for key in long.keys)


def test_what_follows_stands_behind_its_cause_without_advice() -> None:
    rows = healthy(0)
    from_start(entropy=0.001, grad_norm=0.0, completions__clipped_ratio=1.0, **WORSE)(rows)
    findings = diagnose(history(rows, STILL))[0]
    first, *others = [each for each in findings if each.passed is None]
    assert first.symptom.name == "policy-collapsed" and len(others) >= 2
    assert {each.cause for each in others} == {"policy-collapsed"}
    lines = verdict(findings).splitlines()
    assert (
        lines[0].startswith("symptoms: 1 (") and "learning_rate" in lines[1] and lines[2].startswith("    so also: ")
    )
    assert "max_completion_length" not in "".join(lines)
    order = {symptom.name: (index, symptom) for index, symptom in enumerate(SYMPTOMS)}
    for index, symptom in order.values():
        for name in symptom.explains:  # of two that explain each other, the earlier is the cause
            assert order[name][0] > index or symptom.name in order[name][1].explains, symptom.name


def test_advice_never_proposes_what_is_set() -> None:
    """A sentence with an option and its value is left out where the option has the value."""
    for symptom in SYMPTOMS:
        for sentence in symptom.advice:
            text, *conditions = [sentence] if isinstance(sentence, str) else sentence
            for name, value in re.findall(r'(?:Set|set|with) (\w+)=(True|"\w+")', text):
                assert {name, f"{name}={value.strip(chr(34))}"} & {*conditions}, text
    rows = healthy(0)
    PLANTS["answers-grow"].rows(rows)
    said = {
        loss: str(look(history(rows, STILL, settings={"loss_type": loss}))[0]["answers-grow"])
        for loss in ("grpo", "dapo")
    }
    assert "loss_type" in said["grpo"] and "loss_type" not in said["dapo"]


@pytest.mark.parametrize(("use_vllm", "part"), [(True, "vllm_adapter_sync"), (False, "rollout_func")])
def test_advice_on_a_sampler_is_for_the_one_in_use(use_vllm: bool, part: str) -> None:
    rows = healthy(0)
    PLANTS["engine-other-policy"].rows(rows)
    found = look(history(rows, settings={"use_vllm": use_vllm}))[0]["engine-other-policy"]
    assert part in found.advice and ("vllm" in found.advice) == use_vllm


@pytest.mark.parametrize(("share", "part"), [(0.0, "0.00% are clipped"), (0.12, "12.00% are clipped")])
def test_a_range_of_tokens_is_named_with_the_share_that_it_clips(share: float, part: str) -> None:
    rows = healthy(0)
    everywhere(clip_ratio__region_mean=share)(rows)
    found = look(history(rows, settings={"epsilon": 0.2}))[0]["nothing-clips"]
    assert "epsilon 0.2 is a range of token ratios; GSPO's are 3e-4" in found.evidence and part in found.evidence
    assert "nothing can be clipped" not in str(found)


@pytest.mark.parametrize(("steps", "is_found"), [(2, True), (3, False), (4, True)])
def test_updates_are_on_policy_where_a_step_has_whole_rollouts(steps: int, is_found: bool) -> None:
    rows = healthy(0)
    everywhere(clip_ratio__region_mean=0.0)(rows)
    settings = {"loss_type": "gmpo", "steps_per_generation": steps, "gradient_accumulation_steps": 4}
    found = look(history(rows, settings={**settings, "num_iterations": 1}))[0]
    assert ("nothing can be clipped" in str(found.get("nothing-clips"))) == is_found


@pytest.mark.parametrize(("share", "is_found"), [(0.3, True), (0.8, False)])
def test_a_share_of_a_rollout_can_be_below_a_limit(share: float, is_found: bool) -> None:
    rows = [{"step": float(step), "reward": 0.5, "kept": share} for step in range(1, 25)]
    assert bool(exceeds(history(rows), "kept", 0.5, below=True, of_rollouts=True)) == is_found


def test_each_symptom_has_its_section_in_the_docs() -> None:
    for symptom in SYMPTOMS:
        page, _, anchor = symptom.page.partition("#")
        headings = re.findall(r"^#{2,} (.+)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings], symptom.name
