"""Logs that are not like ours: means of many steps, other scales of rewards, fp16, reasoning that grows."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.runs import healthy, history
from trl_steady.cli import main as cli
from trl_steady.report import History, diagnose
from trl_steady.report.symptoms import SYMPTOMS, Finding, look, verdict

Row = dict[str, Any]


def rows(steps: int, of: Callable[[float, np.random.Generator], Row], every: int = 1, seed: int = 0) -> list[Row]:
    """Return a log of a run with one rollout a step. `of` returns its metrics from the share of steps that is done."""
    random = np.random.default_rng(seed)
    usual = {"loss": 0.01, "grad_norm": 0.3, "entropy": 0.3, "reward_std": 0.4}
    return [{"step": step, **usual, **of(step / steps, random)} for step in range(every, steps + 1, every)]


def said(logged: list[Row], **settings: Any) -> dict[str, Finding]:
    return {each.symptom.name: each for each in diagnose(History(logged, {"settings": settings}))[0]}


def reward(done: float, random: np.random.Generator) -> float:
    return 0.2 + 0.5 * done + 0.02 * float(random.standard_normal())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("curve", [lambda x: 1 - math.exp(-4 * x), lambda x: 1 / (1 + math.exp(6 - 12 * x))])
@pytest.mark.parametrize("every", [10, 25, 50])
def test_reasoning_that_grows_with_the_reward_is_no_reward_for_length(
    curve: Callable[[float], float], every: int
) -> None:
    """Both curves have the same form, and few points. Their noise has nothing in common."""

    def grown(done: float, random: np.random.Generator) -> Row:
        length, noise = (300 + 2700 * curve(done)) * (1 + 0.02 * random.standard_normal()), random.standard_normal()
        return {"reward": 0.2 + 0.5 * curve(done) + 0.015 * noise, "completions/mean_length": length}

    for seed in range(4):
        assert not said(rows(500, grown, every, seed))


@pytest.mark.parametrize("every", [1, 10, 50])
def test_an_entropy_that_falls_slowly_with_the_reward_has_not_collapsed(every: int) -> None:
    def learnt(done: float, random: np.random.Generator) -> Row:
        return {"reward": reward(done, random), "entropy": 0.5 * math.exp(-4 * done)}

    assert not said(rows(600, learnt, every))


def test_a_reward_less_the_mean_of_its_group_cannot_rise() -> None:
    def centred(done: float, random: np.random.Generator) -> Row:
        return {"reward": 1e-8 * random.standard_normal(), "reward_std": 1.0, "entropy": 0.3 * math.exp(-2 * done)}

    assert not said(rows(100, centred))


def test_a_symptom_that_comes_back_is_told_since_it_came_back() -> None:
    def cut(done: float, random: np.random.Generator) -> Row:
        is_cut = 0.1 < done <= 0.4 or done > 0.8
        return {"reward": reward(done, random), "completions/clipped_ratio": 0.9 if is_cut else 0.0}

    (found,) = said(rows(300, cut)).values()
    assert found.symptom.name == "answers-cut-off" and found.passed is None and found.since == 241


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (lambda done, random: -1 + 0.06 * random.random(), "alike"),  # 1 for a right answer, -1 for the others
        (lambda done, random: 0.3 + 0.4 * random.random(), "alike"),  # it depends on the prompt alone
        (lambda done, random: min(2 * done, 1) - 0.01 * random.random(), "all-right"),
        (lambda done, random: 2.5 * min(2 * done, 1) - 0.01 * random.random(), "all-right"),
    ],
)
def test_groups_are_all_right_only_if_the_reward_tells_so(of: Callable[..., float], kind: str) -> None:
    def same(done: float, random: np.random.Generator) -> Row:
        return {"reward": of(done, random), "frac_reward_zero_std": float(done > 0.5 or kind == "alike")}

    assert {*said(rows(100, same))} == {f"groups-{kind}"}


@pytest.mark.parametrize(("low", "cause"), [(0.3, "entropy-explodes"), (0.1, "reward-falls")])
def test_an_entropy_that_explodes_heads_the_answers_that_never_end(low: float, cause: str) -> None:
    def explodes(done: float, random: np.random.Generator) -> Row:
        far, noise = max(done - 0.5, 0), 0.01 * random.standard_normal()
        row = {"reward": (low if far else 0.4) + noise, "completions/mean_length": 300 + 2000 * far}
        return row | {"entropy": 0.3 + 6 * far, "completions/clipped_ratio": min(4 * far, 1.0)}

    found = said(rows(300, explodes))
    first, *others = found.values()
    assert first.symptom.name == cause and {each.cause for each in others} == {cause}
    assert {"entropy-explodes", "answers-grow", "answers-cut-off"} <= found.keys()
    assert "max_completion_length" not in verdict([*found.values()])


@pytest.mark.parametrize("skipped", [range(4), range(59, 60), range(5, 60, 20)], ids=["first", "last", "single"])
def test_steps_that_the_scaler_of_fp16_skips_are_no_symptom(skipped: range) -> None:
    logged = rows(60, lambda done, random: {"reward": reward(done, random)})
    for place in skipped:
        logged[place]["grad_norm"] = math.inf
    assert not said(logged, fp16=True)
    for row in logged[30:]:
        row["grad_norm"] = math.nan
    assert "not-a-number" in said(logged, fp16=True)


@pytest.mark.parametrize(
    ("settings", "ratio", "is_advised"),
    [
        ({"fp16": True}, 1.5, True),
        ({"fp16": True}, None, True),
        ({"fp16": True}, 1e6, False),  # the ratio overflows by itself
        ({"fp16": False, "bf16": True}, 1.5, False),
        ({}, 1.5, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("metric", "symptom"), [("grad_norm", "not-a-number"), ("kl", "kl-nan")])
def test_bf16_is_advised_only_in_place_of_fp16(
    metric: str, symptom: str, settings: Row, ratio: float | None, is_advised: bool
) -> None:
    logged = rows(60, lambda done, random: {"reward": reward(done, random)})
    for row in logged[0 if metric == "kl" else 30 :]:
        row[metric] = math.nan
    if ratio is not None:
        for row in logged:
            row["ratio/sequence_max"] = ratio
    if metric == "kl":
        is_advised = settings.get("fp16", False)
    assert ("set bf16=True in place of fp16" in said(logged, **settings)[symptom].advice) == is_advised


@pytest.mark.parametrize(
    ("count", "settings", "is_found"),
    [(18, {"fp16": True}, False), (19, {"fp16": True}, True), (3, {}, True), (2, {}, False)],
)
def test_the_steps_that_find_the_loss_scale_are_no_symptom(count: int, settings: Row, is_found: bool) -> None:
    """The scale falls from 65536 to 1 in 16 of 300 steps. One in a hundred may be left out beside them."""
    logged = rows(300, lambda done, random: {"reward": reward(done, random)})
    places = range(14, 300, 15)[:count] if settings else range(300 - count, 300)
    for place in places:
        logged[place] |= {"steps/nonfinite": 1.0, "grad_norm": math.inf}
    found = said(logged, **settings)
    assert ("steps-left-out" in found) == is_found
    if is_found:
        assert ("bf16=True" in found["steps-left-out"].advice) == ("fp16" in settings)


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        (rows(1, lambda done, random: {"reward": done}), "1 rollout: too few"),
        (rows(500, lambda done, random: {"reward": done}, every=100), "5 logs of the reward: too few"),
        ([{"step": 5, "train_runtime": 1.0}], "0 logs of the reward: too few"),  # logging_steps is 10 by default
        (
            [{"step": i, "reward": i % 3, "grad_norm": math.nan if i < 4 else 1.0} for i in range(1, 6)],
            "5 rollouts: too few to judge, at least 6 are needed\n  passed at step 4: the gradient",
        ),
    ],
)
def test_a_log_of_few_rows_says_what_it_counts(logged: list[Row], words: str) -> None:
    assert verdict(diagnose(History(logged))[0]).startswith(words)


def test_a_run_that_warms_up_is_judged_by_the_steps_that_are_planned(tmp_path: Path) -> None:
    logged = rows(20, lambda done, random: {"reward": reward(done, random), "learning_rate": 2e-8 * done})
    found = []
    for planned in (5000, 20):
        file = tmp_path / "trainer_state.json"
        file.write_text(json.dumps({"global_step": 20, "max_steps": planned, "log_history": logged}))
        found.append([*look(History.read(file))[0]])
    assert found == [[], ["policy-still"]]


@pytest.mark.parametrize("high", [0.008, 0.4])
def test_one_success_in_a_hundred_answers_is_no_reward_to_lose(high: float) -> None:
    logged = rows(49, lambda done, random: {"reward": high if 0.1 < done < 0.3 else 0.0, "grad_norm": 0.0})
    found = said(logged)
    assert ("reward-falls" in found) is (high > 0.05)


def test_without_a_share_of_equal_groups_a_reward_of_0_tells_that_all_are_wrong() -> None:
    logged = rows(49, lambda done, random: {"reward": 0.008 * (0.4 < done < 0.45), "grad_norm": 0.0})
    assert said(logged)["gradient-zero"].cause == "groups-all-wrong"


@pytest.mark.parametrize("first", [5.0, 1e4])
def test_a_kl_that_is_huge_in_the_first_log_heads_the_verdict_although_it_falls(first: float) -> None:
    def broken(done: float, random: np.random.Generator) -> Row:
        return {"reward": 0.0, "kl": first * 1e-4**done, "completions/clipped_ratio": 1.0, "reward_std": 0.0}

    found = said(rows(20, broken))
    assert ("kl-explodes" in found) is (first > 10)
    assert found["answers-cut-off"].cause == ("kl-explodes" if first > 10 else "")


def test_a_kl_that_stays_high_for_nothing_has_not_passed() -> None:
    """It rises in the first fifth, and then a reward that ripples gains nothing."""

    def far(done: float, random: np.random.Generator) -> Row:
        return {"reward": 0.7 + 0.03 * random.standard_normal(), "kl": 2.5 * min(5 * done, 1)}

    findings = diagnose(History(rows(90, far)))[0]
    assert [finding.passed for finding in findings if finding.symptom.name == "kl-rises"] == [None]


@pytest.mark.parametrize(("high", "is_named"), [(2.5, True), (1.5, False)])
def test_a_kl_that_stays_high_after_the_reward_has_risen_with_it_is_named(high: float, is_named: bool) -> None:
    """Both rise in the first fifth, and stay. The reward has no fault, and the KL rises no more."""

    def stays(done: float, random: np.random.Generator) -> Row:
        rise = min(5 * done, 1)
        return {"reward": 0.2 + 0.5 * rise + 0.02 * random.standard_normal(), "kl": high * rise}

    assert ("kl-rises" in said(rows(90, stays))) is is_named


def test_a_gap_in_a_log_is_no_missing_reward() -> None:
    logged = [row for row in rows(400, lambda done, random: {"reward": done}, 10) if not 40 < row["step"] < 370]
    assert "reward-missing" not in said(logged)


def test_a_log_without_a_reward_is_judged_by_what_it_has() -> None:
    logged = rows(20, lambda done, random: {"kl": 50.0, "mismatch/kl": 0.001})
    findings = diagnose(History(logged, framework="slime"))[0]
    assert [finding.symptom.name for finding in findings] == ["kl-explodes"]
    assert "not in this log: reward" in verdict(findings) and "too few" not in verdict(findings)


def test_one_log_of_a_run_that_goes_on_is_too_few() -> None:
    findings = diagnose(History([{"step": 1, "reward": 0.5}], is_over=False))[0]
    assert verdict(findings).startswith("1 rollout: too few")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])
def test_no_function_raises_on_strange_numbers(value: float) -> None:
    keys = {key for row in healthy(0, 200) for key in row} - {"step"}
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 7, 40):
        strange = [{"step": 1 + i // 2, **dict.fromkeys(keys, value)} for i in range(count)]
        sparse = [
            {key: number for key, number in row.items() if key == "step" or random.random() < 0.3} for row in strange
        ]
        mixed = [
            {**row, **({"reward": value, "kl": value} if i % 3 else {})} for i, row in enumerate(healthy(0, count))
        ]
        for given in (strange, sparse, mixed):
            given = history(given)
            for symptom in SYMPTOMS:
                with contextlib.suppress(KeyError):
                    symptom.find(given)  # whatever it says
    diagnose(History([]))


def test_an_evaluation_is_read_as_transformers_sends_it_to_wandb(tmp_path: Path) -> None:
    lines = ["train/global_step,train/reward,train/loss,eval/reward,eval/accuracy"]
    for step in range(1, 61):
        lines.append(f"{step},{0.3 + 0.01 * step},0.1,,")
        if step % 4 == 0:
            lines.append(f"{step},,,{0.7 - 0.01 * step},0.5")
    file = tmp_path / "history.csv"
    file.write_text("\n".join(lines))
    run = History.read(file)
    assert run["eval_reward"].steps.tolist() == [*range(4, 61, 4)] and "eval_accuracy" in run.keys
    assert "held-out accuracy falls" in verdict(diagnose(run)[0])


@pytest.mark.parametrize("each", [1, 3])
def test_rows_that_a_script_sends_to_wandb_itself_are_at_no_step_of_the_run(tmp_path: Path, each: int) -> None:
    """W&B counts their `_step`. They would end the rewards at half of the steps."""
    lines = ["_step,train/global_step,train/reward,train/loss,kl"]
    calls = 0
    for step in range(1, 60):
        lines.append(f"{calls},{step},{0.3 + 0.01 * step},0.1,")
        lines += [f"{calls + own},,,,{own / 100}" for own in range(1, each + 1)]
        calls += each + 1
    file = tmp_path / "history.csv"
    file.write_text("\n".join(lines))
    run = History.read(file)
    assert run["reward"].steps.tolist() == [*range(1, 60)] and run.last_step == 59
    assert not diagnose(run)[0] and run.remarks == [f"records without a step are left out ({59 * each})"]


OWN = "Step {step} | Loss: 0.1 | Reward: 0.{step:02} | KL: {kl} | Grad norm: 3"


@pytest.mark.parametrize("line", [OWN, OWN.lower(), OWN.replace(" |", " | 3.2s |", 1)])
def test_the_log_of_a_loop_that_somebody_has_written_is_no_log_of_prime_rl(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.log"
    file.write_text("\n".join(line.format(step=step, kl=step / 2) for step in range(1, 40)))
    run = History.read(file)
    assert run.framework == "TRL" and run.keys >= {"loss", "reward", "kl", "grad_norm"}
    assert [each.symptom.name for each in diagnose(run)[0]] == ["kl-explodes"]


def tinker_metrics(step: int) -> Row:
    """Return metrics with the names and the order of tinker-cookbook 0.6.1, of a policy that is lost after a while."""
    reward = 0.7 if step < 20 else 0.05
    return {
        "progress/batch": step, "optim/lr": 4e-4, "env/all/ac_tokens_per_turn": 120.0, "env/all/reward/total": reward,
        "env/all/by_group/frac_mixed": 0.75, "env/all/by_group/frac_all_good": 0.25,
        "env/all/by_group/frac_all_bad": 0.0, "kl_policy_base": 0.01 * step - 1e-4, "optim/kl_sample_train_v1": -1e-3,
        "optim/kl_sample_train_v2": 2e-3, "optim/entropy": 0.4, "time/total": 30.0,
    }  # fmt: skip


def tinker_lines(step: int) -> str:
    """A row of `metrics.jsonl`."""
    return json.dumps({"step": step, **tinker_metrics(step)})


def tinker_box(step: int) -> str:
    """The console shows a box for each step. The loop of asynchronous training has no `progress/batch`."""
    values = {name: value for name, value in tinker_metrics(step).items() if name != "progress/batch"}
    lines = [
        f"ml_log:317 [INFO]\n{f'Step {step}':^47}",
        f"┏{'━' * 31}┳{'━' * 13}┓",
        f"┃ {'Metric':29} ┃ Value       ┃",
    ]
    lines.append(f"┡{'━' * 31}╇{'━' * 13}┩")
    lines += [f"│ {name:29} │ {value:<11.6f} │" for name, value in sorted(values.items())]
    return "\n".join([*lines, f"└{'─' * 31}┴{'─' * 13}┘"])


@pytest.mark.parametrize("written", [tinker_lines, tinker_box])
def test_a_log_of_the_tinker_cookbook_is_read(tmp_path: Path, written: Callable[[int], str]) -> None:
    file = tmp_path / "metrics"
    file.write_text("\n".join(written(step) for step in range(60)))
    run = History.read(file)
    assert (run.framework, run.last_step) == ("Tinker cookbook", 59)
    assert run["reward"].steps.tolist() == [*range(60)]
    first = {key: run[key].values[0] for key in ("frac_reward_zero_std", "kl", "mismatch/kl", "step_time")}
    assert first == {"frac_reward_zero_std": 0.25, "kl": -1e-4, "mismatch/kl": 2e-3, "step_time": 30.0}
    finding = diagnose(run)[0][0]
    assert (finding.symptom.name, finding.since) == ("reward-falls", 20)
    assert "kl_penalty_coef" in finding.advice and "beta" not in finding.advice


@pytest.mark.parametrize("columns", ["loss/train,loss/val,lr", "optim/grad_norm,train/CE loss,optim/lr"])
def test_a_log_without_metrics_of_answers_is_none_of_another_framework(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """They have a name of ART or prime-rl."""
    file = tmp_path / "log.csv"
    values = ",".join(["0.5"] * (columns.count(",") + 1))
    file.write_text(f"step,{columns}\n" + "".join(f"{step},{values}\n" for step in range(1, 60)))
    assert cli.main(["report", str(file)]) == 2
    assert "no log of GRPO, RLOO or PPO" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("missing", ["reward", "padding/share", "completions/mean_length", "clip_ratio/region_mean"])
def test_a_metric_that_is_nan_throughout_is_no_warning_of_numpy(missing: str) -> None:
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "loss_type": "gspo", "epsilon": 0.2}
    run = healthy(0)
    for row in run:
        row[missing] = math.nan
    diagnose(History(run, {"settings": {**settings, "beta": 0.1, "trim_padding": False}}))
