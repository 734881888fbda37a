"""The table of names of other frameworks, and excerpts of their logs."""

import dataclasses
import re
from pathlib import Path

import pytest

from trl_steady import GRPOConfig, report
from trl_steady.report import History, diagnose
from trl_steady.report.forms import records
from trl_steady.report.frameworks import AREAS, FRAMEWORKS, TRL, Framework, in_words_of, of_title, recognised
from trl_steady.report.log import read_records
from trl_steady.report.symptoms import SYMPTOMS

LOGS = Path(__file__).parents[1] / "data" / "logs"
# as the excerpt shows them: framework, rows, last step, first reward, and other values of the first row
EXCERPTS: dict[str, tuple[str, int, int, float | None, dict[str, float]]] = {
    "trl-0.14": ("TRL", 10, 200, 0.25, {"completions/mean_length": 237.2, "rewards/reward_fn/mean": 0.25}),
    "transformers-5": ("TRL", 19, 19, 0.9513, {"frac_reward_zero_std": 0.0, "kl": 0.0006671, "step_time": 6.358}),
    "unsloth-notebook": ("TRL", 17, 170, 4.378125, {"loss": 0.0347, "kl": 34.652643}),
    "verl-early-2025": ("verl", 6, 5, 0.012, {"entropy": 0.461, "completions/mean_length": 235.977}),
    "verl-late-2025": ("verl", 3, 3, -0.07993336021900177, {"time/generation": 48.01942690834403}),
    "verl-summer-2025": ("verl", 1, 1, 0.0888671875, {"completions/clipped_ratio": 0.19921875, "learning_rate": 1e-6}),
    "verl-fork": ("verl", 4, 4, 0.094, {"kl": 0.001, "entropy": 0.41, "completions/mean_length": 386.719}),
    "slime": ("slime", 1, 0, 0.20833333333333334, {"completions/mean_length": 1877.1458333333333}),
    "slime-rollout-only": ("slime", 1, 0, None, {"completions/clipped_ratio": 0.46484375}),
    "openrlhf": ("OpenRLHF", 1, 2, 0.13671875, {"completions/clipped_ratio": 1.0, "grad_norm": 0.09470244228379404}),
    "nemo-rl": ("NeMo-RL", 1, 1, 0.0, {"mismatch/kl": 0.001, "completions/mean_length": 201.2197, "step_time": 35.7}),
    "prime-rl-2026": ("prime-rl", 2, 2, 0.5, {"step_time": 22.5}),
    "prime-rl-2025": ("prime-rl", 1, 0, 0.4353, {"mismatch/kl": 0.3523, "entropy": 1.0338, "loss": -0.0036}),
}  # fmt: skip
UNREAD = {
    "verl-early-2025": "learning_rate kl",  # printed as 0.000
    "verl-fork": "learning_rate",
    "slime": "kl entropy mismatch/kl",
    "openrlhf": "reward_std",
    "prime-rl-2025": "completions/mean_length",  # Seq. Length is of prompt and answer
    "nemo-rl": "loss grad_norm time/generation",
}


def excerpt(name: str) -> History:
    return History.read(LOGS / f"{name}.txt")


def test_each_excerpt_is_one_of_the_table() -> None:
    assert {file.stem for file in LOGS.iterdir()} == {*EXCERPTS}


@pytest.mark.parametrize("name", EXCERPTS)
def test_an_excerpt_is_read_as_it_was_by_hand(name: str) -> None:
    title, rows, last, reward, values = EXCERPTS[name]
    history = excerpt(name)
    assert (history.framework, history.last_step) == (title, last)
    assert max(len(history[key].steps) for key in history.keys) == rows
    if reward is None:
        assert "reward" not in history.keys
    else:
        assert len(history["reward"].values) == rows and history["reward"].values[0] == reward
    for key, value in values.items():
        assert history[key].values[0] == value, key
    assert history.keys.isdisjoint(UNREAD.get(name, "").split())


# what is true of an excerpt: a KL of hundreds of nats per token, and groups of one answer
TRUE = {"unsloth-notebook": ["kl-explodes"], "verl-late-2025": ["groups-of-one"]}


@pytest.mark.parametrize("name", EXCERPTS)
def test_nothing_false_heads_the_verdict_on_an_excerpt(name: str) -> None:
    findings = diagnose(excerpt(name))[0]
    heads = {each.symptom.name for each in findings if not each.cause and each.passed is None}
    assert heads - {"too-few-rollouts"} == {*TRUE.get(name, [])}


def test_values_say_what_they_are() -> None:
    assert excerpt("prime-rl-2026").is_flagged("reward", "kept_only")
    assert excerpt("slime").is_flagged("reward", "kept_only")
    assert not excerpt("prime-rl-2025").is_flagged("reward", "kept_only")
    assert excerpt("nemo-rl").is_flagged("mismatch/kl", "sum")
    assert not excerpt("verl-late-2025").flags


@pytest.mark.parametrize(("entropy", "is_sum"), [(0.5, False), (11.0, False), (40.0, True)])
def test_an_entropy_that_no_vocabulary_has_is_a_sum(tmp_path: Path, entropy: float, is_sum: bool) -> None:
    line = "step:{} - actor/entropy:{} - actor/pg_loss:0.1 - actor/kl_loss:0.2 - critic/score/mean:0.5"
    (tmp_path / "log").write_text("\n".join(line.format(step, entropy) for step in range(1, 9)))
    history = History.read(tmp_path / "log")
    assert {history.is_flagged(key, "sum") for key in ("entropy", "kl")} == {is_sum}


def test_a_kl_that_is_negative_is_another_estimate_and_is_not_read(tmp_path: Path) -> None:
    line = "step:{} - actor/pg_loss:0.1 - actor/kl_loss:{} - critic/score/mean:0.5"
    (tmp_path / "log").write_text("\n".join(line.format(step, 0.1 - 0.02 * step) for step in range(1, 9)))
    history = History.read(tmp_path / "log")
    assert "kl" not in history.keys and "k1" in "".join(history.remarks)


def test_rollouts_have_the_steps_of_the_updates() -> None:
    """slime counts updates in `step`, and rollouts in `rollout` and `perf`."""
    lines: list[str] = []
    for rollout in range(3):
        lines.append(f"rollout {rollout}: {{'rollout/raw_reward': 0.{rollout}, 'rollout/rewards': 1e-9}}")
        for update in range(2):
            lines.append(f"step {2 * rollout + update}: {{'train/loss': 0.1, 'train/pg_clipfrac': 0.0}}")
    rows = read_records(records(lines)).rows
    assert [row["step"] for row in rows if "reward" in row] == [0, 2, 4]
    assert [row["step"] for row in rows if "loss" in row] == [*range(6)]


def test_old_names_of_trl_are_todays() -> None:
    rows = [
        {"step": step, "reward": 0.5, "completion_length": 128.0, "rewards/f": 0.5, "clip_ratio": 0.1}
        for step in range(1, 4)
    ]
    assert History(rows).keys == {
        "reward", "completions/mean_length", "rewards/f/mean", "clip_ratio/region_mean",
    }  # fmt: skip
    both = [{**row, "completions/mean_length": 64.0, "clip_ratio/low_mean": 0.2} for row in rows]
    history = History(both)
    assert history["completions/mean_length"].values.tolist() == [64.0] * 3
    assert {"completion_length", "clip_ratio"} <= history.keys


# The table.


def names() -> list[tuple[Framework, str]]:
    return [(framework, raw) for framework in FRAMEWORKS.values() for raw in framework.names]


def test_no_name_has_a_meaning_and_a_reason_why_it_has_none() -> None:
    for framework in FRAMEWORKS.values():
        assert not framework.names.keys() & framework.never.keys()
        for raw in framework.never:
            assert framework.alias(raw) is None and framework.never[raw]


def test_each_alias_says_what_it_is() -> None:
    units = {"reward", "tokens", "nats", "share", "norm", "s", "", "1e-4"}
    for framework, raw in names():
        alias = framework.names[raw]
        assert alias.unit in units and alias.of and alias.since and alias.source, (framework.name, raw)
        assert {*alias.flags} <= {"sum", "kept_only", "k1"}


def test_aliases_lead_to_metrics_that_a_report_reads() -> None:
    """A typing error in one of our names would make it unread."""
    known = {metric for area in AREAS.values() for metric in area}
    folder = Path(report.__file__).parent
    files = [*folder.rglob("sign*.py"), *folder.rglob("signs/*.py"), folder / "symptoms.toml", folder / "plots.toml"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for framework, raw in names():
        ours = framework.names[raw].ours
        stem = ours.replace("*", "")
        assert ours in known or f'"{ours}"' in text or stem.startswith(("rewards/", "time/")) or ours == "step_time"


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if framework.signs])
def test_a_framework_is_recognised_by_its_own_names(name: str) -> None:
    framework = FRAMEWORKS[name]
    own = [raw.replace("*", "f") for raw in (*framework.names, *framework.never)]
    assert recognised(own) is framework
    for other in FRAMEWORKS.values():
        if other is framework or name in ("trl-ppo", "open-instruct"):  # they share names of PPO
            continue
        foreign = [raw for raw in own if any(sign.search(raw) for sign in other.signs)]
        assert len(foreign) < len([raw for raw in own if any(sign.search(raw) for sign in framework.signs)])


def test_of_two_frameworks_the_one_with_most_names_is_meant_and_trl_if_there_is_none() -> None:
    verl = ["actor/pg_loss", "actor/ppo_kl", "critic/score/mean"]
    assert recognised([*verl, "rewards/f/mean", "reward", "loss"]) is FRAMEWORKS["verl"]
    assert recognised(["reward", "loss", "anything"]) is TRL
    assert recognised(["val-core/x"], ["pairs step"]) is TRL  # a row of validation shows nothing that is read


# Advice.

# bf16 and fp16 are precisions too, and each sampler has a temperature
OPTIONS = {field.name for field in dataclasses.fields(GRPOConfig)} - {"bf16", "fp16", "temperature"}
OPTIONS |= {"StepRewards", "reward_funcs", "rollout_func"}


@pytest.mark.parametrize("title", sorted({framework.title for framework in FRAMEWORKS.values()} - {"TRL"}))
def test_advice_for_another_framework_names_its_options_alone(title: str) -> None:
    framework = of_title(title)
    if framework.name == "log-line":
        return
    for symptom in SYMPTOMS:
        for entry in symptom.advice:
            sentence = entry if isinstance(entry, str) else entry[0]
            advice = in_words_of(title, sentence)
            for theirs in sorted(framework.options.values(), key=len, reverse=True):
                advice = advice.replace(theirs, "")
            assert OPTIONS.isdisjoint(re.findall(r"\w+", advice)), (symptom.name, advice)


def test_advice_has_the_words_of_the_framework_and_never_is_empty() -> None:
    rows = [
        {"step": step, "reward": 0.5 - 0.01 * step, "entropy": 0.3, "kl": 0.1 * 1.2**step, "grad_norm": 0.5}
        for step in range(1, 61)
    ]
    found = {
        title: {each.symptom.name: each.advice for each in diagnose(History(rows, framework=title))[0]}
        for title in ("TRL", "verl", "ART")
    }
    assert "learning_rate" in found["TRL"]["kl-rises"]
    assert found["verl"]["kl-rises"].startswith(
        "Lower actor_rollout_ref.actor.optim.lr, raise actor_rollout_ref.actor.kl_loss_coef, or stop."
    )
    assert all(advice for advices in found.values() for advice in advices.values())
