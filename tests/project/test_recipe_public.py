"""The public task, its coin, the clock beside TRL, and a small run of each arm."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
import yaml

import trl_steady
from tests.project import recipe

FOLDER = recipe.FOLDER / "public"
PLANS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
RECORDED = json.loads(Path(__file__).with_name("reasoning_gym.json").read_text())
RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))}
FEW = {"max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
MEASURED = {"held_out": 4, "samples": 8, "every": 2}


def entry(expression: str, answer: str) -> dict[str, Any]:
    return {"answer": answer, "metadata": {"expression": expression}}


class Recording:
    """Recorded answers of reasoning-gym to the same arguments. It raises an error for one that was not recorded."""

    def __init__(self, name: str, *, size: int, seed: int, **terms: int) -> None:
        self.entries: list[Any] = []
        if terms:
            (drawn,) = [each for each in RECORDED["drawn"] if each["arguments"] == {"seed": seed, **terms}]
            self.entries = drawn["entries"][:size]
            assert len(self.entries) == size
        assert name == "chain_sum"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (entry(*each) for each in self.entries)

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        (score,) = {score for text, value, score in RECORDED["scores"] if (text, value) == (answer, entry["answer"])}
        return score


@pytest.fixture
def public(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipes, with a small recording in place of reasoning-gym."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Recording))
    monkeypatch.setattr(recipes.chain_sum, "DRAWN", len(RECORDED["drawn"][0]["entries"]))
    return recipes


def nobody_has_read_a_held_out_question(task: Any, held_out: int) -> list[str]:
    """Return the held-out questions of two terms."""
    training, two = task.split(held_out)
    assert (training, two) == type(task)().split(held_out)
    asked = [expression for expression, _ in two]
    three = [expression for expression, _ in task.longer(held_out)]
    read = {expression for expression, _ in (*training, *task.examples)}
    assert len(set(asked)) == len(asked) == len(set(three)) == len(three) == held_out
    assert {len(each.split()) for each in asked} == {3} and {len(each.split()) for each in three} == {5}
    assert {len(each.split()) for each, _ in training} == {1, 3}
    swapped = {" + ".join(reversed(each.split(" + "))) for each in asked}
    assert not read & {*asked, *three, *swapped} and any(" + " in each for each in asked)
    assert not {each for each, _ in training} & {each for each, _ in task.examples}
    return asked


def test_nobody_has_read_a_held_out_question(public: Any) -> None:
    nobody_has_read_a_held_out_question(public.chain_sum.ChainSum(), 12)


def test_the_prompt_is_six_examples_and_the_question(public: Any) -> None:
    task = public.chain_sum.ChainSum()
    beginning, *lines = task.prompt(("3 + 4 - 2", "5")).split("<|endoftext|>")[1].split("\n")
    *examples, question = [beginning, *lines]
    assert len(set(examples)) == 6 and question == "3 + 4 - 2 ="
    for example in examples:
        expression, value = example.split(" = ")
        first, sign, second = expression.split()
        assert int(value) == int(first) + int(second) * {"+": 1, "-": -1}[sign]
    assert task.prompt(("7", "7")).startswith(task.PREAMBLE)


def test_an_answer_is_the_first_line_and_the_package_scores_it(public: Any) -> None:
    """It gives a part of the score for the right number among others, and for text behind it. Both are wrong."""
    task = public.chain_sum.ChainSum()
    right = [" 5\n", " 5", "5\n6", " 5\n3 + 3 = 6\n", " 5<|im_end|>", " 5.0\n", " 5 \n"]
    wrong = [" 15\n", " 5 apples\n", "\n5", "", " 3 + 2\n", " -5\n", "<|im_end|>5"]
    assert [task.is_right(("3 + 2", "5"), text) for text in right] == [True] * len(right)
    assert [task.is_right(("3 + 2", "5"), text) for text in wrong] == [False] * len(wrong)
    assert task.reward([" 5", " 15"], problem=[["3 + 2", "5"]] * 2) == [1.0, 0.0]


def test_without_the_package_the_command_that_installs_it_is_named(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match="pip install reasoning-gym"):
        recipes.public.prepare(recipes.public.Arm({}), tmp_path)
    recipes.public.prepare(recipes.public.Arm({}, task="larger"), tmp_path)


def test_the_recording_is_what_the_package_returns(recipes: Any) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym, as `make demo-public` installs it")
    for drawn in RECORDED["drawn"]:
        made = gym.create_dataset("chain_sum", size=len(drawn["entries"]), **drawn["arguments"])
        assert [[each["metadata"]["expression"], each["answer"]] for each in made] == drawn["entries"]
    scorer = gym.create_dataset("chain_sum", size=1, seed=0)
    for text, value, score in RECORDED["scores"]:
        assert scorer.score_answer(text, {"answer": value}) == pytest.approx(score)
    held_out = PLANS["chain-sum"]["measured"]["held_out"]
    nobody_has_read_a_held_out_question(recipes.chain_sum.ChainSum(), held_out)


def test_the_coin_is_fair_and_does_not_read(recipes: Any) -> None:
    answers = [" 5\n", " 6\n"] * 2000

    def tossed(seed: int, answers: list[str]) -> list[float]:
        reward = recipes.public.coin(seed)
        return [value for start in range(0, 4000, 8) for value in reward(completions=answers[start : start + 8])]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = tossed(0, answers)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(first) == {0.0, 1.0} and abs(np.mean(first) - 0.5) < 4 * 0.5 / 4000**0.5
    assert first == tossed(0, answers[::-1]) != tossed(1, answers)
    assert abs(np.mean(first[::2]) - np.mean(first[1::2])) < 4 / 4000**0.5
    pairs = np.mean(np.array(first[1:]) == np.array(first[:-1]))
    assert abs(pairs - 0.5) < 4 * 0.5 / 4000**0.5  # no toss follows from the one before


class Trainer:
    """A trainer that looks up tokens of its model, and takes a second for it."""

    def __init__(self, seconds: list[float]) -> None:
        self.model, self.seconds = torch.nn.Embedding(8, 2), seconds
        self.args = SimpleNamespace(seed=3)
        self.model.get_input_embeddings = lambda: self.model

    def look_up(self, tokens: int) -> None:
        self.seconds[0] += 1
        self.model(torch.zeros(1, tokens, dtype=torch.long))

    @torch.no_grad()
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        self.look_up(50)
        return [[0]] * 2, [[1, 2, 3], [4]], None


def test_the_clock_stops_during_checks(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: seconds[0])
    monkeypatch.setattr(time, "perf_counter", lambda: 3 * seconds[0])
    trainer = Trainer(seconds)
    clock = recipes.public.Clock(trainer)
    trainer.look_up(1000)  # before the start
    for _ in range(2):
        clock.start()
        assert trainer._generate(["a", "b"])[1] == [[1, 2, 3], [4]]
        trainer.look_up(7)
        clock.stop()
        trainer.look_up(1000)  # a check
    clock.stop()  # once more, after the last check
    expected = {"cpu": 4, "wall": 12, "generation": 2, "generated": 8, "read": 100, "trained": 14}
    assert clock.spent == expected


def test_a_check_by_hand(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 30 of 60 problems have one right sample of eight, and ten others a right greedy answer."""
    asked: list[int] = []

    def right_answers(trainer: Trainer, problems: list[int], *, samples: int, task: Any) -> np.ndarray:
        assert len(problems) * max(samples, 1) <= recipes.small_model.BATCH
        assert torch.initial_seed() == 3 and not checks.clock.is_running
        asked.extend(problems)
        trainer.look_up(torch.randint(1, 9, ()).item())
        if not samples:
            return np.array([[float(problem >= 50)] for problem in problems])
        return np.array([[0.0] * 7 + [float(problem < 30)] for problem in problems])

    monkeypatch.setattr(recipes.small_model, "right_answers", right_answers)
    task = SimpleNamespace(split=lambda held_out: ([], [*range(held_out)]))
    checks = recipes.public.Checks(Trainer([0.0]), task, held_out=60, samples=8, every=5)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    checks.on_train_begin(None, SimpleNamespace(global_step=0), None)
    assert checks.clock.is_running and torch.equal(torch.get_rng_state(), state)
    for step in range(1, 8):
        checks.on_step_end(None, SimpleNamespace(global_step=step), None)
        assert checks.clock.is_running
    checks.on_train_end(None, SimpleNamespace(global_step=7), None)
    checks.on_train_end(None, SimpleNamespace(global_step=7), None)  # not again
    assert asked == [*range(60)] * 6
    shares = {"accuracy": 1 / 16, "greedy": 1 / 6, "pass@8": 1 / 2}
    found = checks.found
    assert found.pop("clock").keys() == {0, 5, 7} and found.keys() == shares.keys()
    for name, share in shares.items():
        assert found[name] == dict.fromkeys((0, 5, 7), pytest.approx(share, abs=1e-6))
    assert checks.clock.spent["read"] == checks.clock.spent["trained"] == 0


def small(plan: str, **options: Any) -> dict[str, Any]:
    return {**PLANS[plan], "options": {**PLANS[plan]["options"], **FEW, **options}}


@pytest.mark.parametrize("plan", PLANS)
def test_the_plans_say_whose_trainer_trains(recipes: Any, tmp_path: Path, plan: str) -> None:
    arms = recipes.experiment.arms(PLANS[plan], recipes.public.Arm)
    assert [arm.trainer for arm in arms.values()] == ["trl", *["ours"] * (len(arms) - 1)]
    assert [name for name, arm in arms.items() if arm.coin] == [name for name in arms if name == "coin"]
    assert recipes.public.KINDS["trl"] == (trl.GRPOConfig, trl.GRPOTrainer)
    assert recipes.public.KINDS["ours"] == (trl_steady.GRPOConfig, trl_steady.GRPOTrainer)
    common = PLANS[plan]["options"]
    trl.GRPOConfig(str(tmp_path), use_cpu=True, **common)  # TRL knows all of them
    assert arms["TRL"].options == arms["ours"].options == common
    faster = {"skip_zero_weight": True, "share_prompts": True, "dynamic_sampling": True}
    assert arms["ours, faster"].options.items() >= {**common, **faster}.items()
    assert set(PLANS[plan]["pictured"]) <= recipes.experiment.SHOWN.keys() and "level" in PLANS[plan]
    with pytest.raises(ValueError, match="trainer='mine'"):
        recipes.public.Arm({}, trainer="mine")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan in PLANS for name in PLANS[plan]["arms"]])
def test_an_arm_runs(
    public: Any, smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, name: str
) -> None:
    """A tiny model is never right, so answers of an even length are."""
    monkeypatch.setattr(public.chain_sum.ChainSum, "is_right", lambda _, problem, text: len(text) % 2 == 0)
    arm = public.experiment.arms(small(plan, num_generations=4), public.public.Arm)[name]
    public.public.prepare(arm, tmp_path)
    built: list[Any] = []
    build = public.public.build
    monkeypatch.setattr(public.public, "build", lambda *given: built.append(build(*given)) or built[-1])
    figures = public.public.train(arm, 0, tmp_path, MEASURED)
    assert isinstance(built[0], trl_steady.GRPOTrainer) == (arm.trainer == "ours")
    assert type(built[0]) is public.public.KINDS[arm.trainer][1]
    assert built[0].reward_func_names == ["coin_reward" if arm.coin else "reward"]
    lengths = ["", "longer/"] if plan == "chain-sum" else [""]
    names = {length + figure for length in lengths for figure in ("accuracy", "greedy", "pass@8")}
    assert figures.keys() >= names and all(list(figures[each]) == [0, 2] for each in names)
    for length in lengths:
        assert figures[f"{length}pass@8"][2] >= figures[f"{length}accuracy"][2]
    start, end = figures["clock"][0], figures["clock"][2]
    assert set(start.values()) == {0.0} and 0 < end["generation"] < end["cpu"]
    assert 2 * 8 <= end["generated"] <= 3 * 2 * 8 * arm.options["max_completion_length"]
    assert len(figures["reward"]) == 2


@pytest.mark.slow
def test_a_check_changes_nothing_of_a_run(
    public: Any, smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public.chain_sum.ChainSum, "is_right", lambda _, problem, text: len(text) % 2 == 0)
    arm = public.experiment.arms(small("chain-sum", max_steps=4), public.public.Arm)["ours"]
    often, seldom = (public.public.train(arm, 0, tmp_path, {**MEASURED, "every": every}) for every in (1, 4))
    assert list(often["greedy"]) == [0, 1, 2, 3, 4] and list(seldom["greedy"]) == [0, 4]
    for name in ("reward", "grad_norm"):
        assert often[name] == seldom[name]
    for name in ("generated", "read", "trained"):
        assert often["clock"][4][name] == seldom["clock"][4][name]


@pytest.mark.slow
def test_the_tokens_of_trl_by_hand(public: Any, smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers have the same length here. Each token is read once with a gradient, with its padded prompt."""
    monkeypatch.setattr(public.chain_sum.ChainSum, "is_right", lambda _, problem, text: len(text) % 2 == 0)
    monkeypatch.setattr(public.chain_sum.ChainSum, "STOP", "")  # and a tiny model has many ends
    plan = small("chain-sum", num_generations=4, max_completion_length=1)
    arms = public.experiment.arms(plan, public.public.Arm)
    found = {name: public.public.train(arms[name], 0, tmp_path, MEASURED)["clock"][2] for name in ("TRL", "ours")}
    preamble = len(public.chain_sum.ChainSum().PREAMBLE)
    for spent in found.values():
        assert spent["generated"] == 16  # two rollouts of eight answers
    # the width of a prompt of one term is padded to one of two: "7 =" and "3 + 4 ="
    widths = {preamble + 3, preamble + 7}
    assert found["TRL"]["trained"] in {8 * (one + other + 2) for one in widths for other in widths}
    assert found["TRL"]["read"] == found["TRL"]["trained"] - 16  # the generation reads the prompts
    assert found["ours"]["trained"] <= found["TRL"]["trained"]


def test_metrics_are_read_from_the_rows_of_updates(recipes: Any) -> None:
    history = [{"loss": 0.1, "kl": 0.123456}, {"eval_loss": 1.0, "kl": 9.0}, {"loss": 0.2, "reward": 1.0}]
    assert recipes.run.logged(history, ("kl", "reward", "none")) == {"kl": [0.1235], "reward": [1.0]}


CURVES = {"TRL": [0.2, 0.5, 0.4, 0.6, 0.7], "ours": [0.2, 0.5, 0.5, 0.6, 0.7], "never": [0.2, 0.9, 0.9, 0.9, 0.4]}
FACTORS = {"TRL": 1.0, "ours": 0.5, "never": 1.0}
PLAN = {"baseline": "TRL", "figure": "greedy", "level": 0.5, "pictured": ["greedy", "pass@8"]}


def runs_by_hand() -> dict[str, dict[int, Any]]:
    """TRL takes a minute between checks, and twice that with seed 1. Ours takes half, and on seed 1 an eighth."""
    runs: dict[str, dict[int, Any]] = {}
    for arm, curve in CURVES.items():
        runs[arm] = {}
        for seed in (0, 1):
            minute = 60 * FACTORS[arm] * (2.0 if seed else 1.0) * (0.25 if seed and arm == "ours" else 1.0)
            clock = {
                str(10 * i): {
                    "cpu": i * minute,
                    "wall": 3 * i * minute,
                    "generation": i * minute / 4,
                    "generated": 100.0 * i,
                    "read": 1000.0 * i,
                    "trained": 2000.0 * i * FACTORS[arm],
                }
                for i in range(len(curve))
            }
            checks = {str(10 * i): value for i, value in enumerate(curve)}
            runs[arm][seed] = {"clock": clock, "accuracy": checks, "greedy": checks, "pass@8": checks}
    return runs


def test_the_level_is_reached_where_the_curve_stays_above_it(recipes: Any) -> None:
    reached = recipes.public.reached
    assert [reached(curve, 0.5) for curve in CURVES.values()] == [3, 1, None]
    assert reached([0.5, 0.5], 0.5) == 0 and reached([0.4, 0.4], 0.5) is None and reached([0.4, 0.5], 0.5) == 1


def test_the_table_of_times_is_paired_by_seed(recipes: Any) -> None:
    """TRL takes 3 and 6 minutes, ours 0.5 and 0.25: ratios of 1/6 and 1/24, whose geometric mean is 1/12."""
    rows = recipes.public.time_table(PLAN, runs_by_hand()).splitlines()[2:]
    assert rows == [
        "| TRL | 2 of 2 | 4.5 |  | 300 / 6,000 |",
        "| ours | 2 of 2 | 0.4 | 0.08 (0.04 to 0.17) | 100 / 1,000 |",
        "| never | 0 of 2 |  |  |  |",
    ]
    one = {arm: {0: own[0]} for arm, own in runs_by_hand().items()}
    assert recipes.public.time_table(PLAN, one).splitlines()[3] == "| ours | 1 of 1 | 0.5 |  | 100 / 1,000 |"
    with pytest.raises(ValueError, match=r"level=0\.2: the starting policy is there"):
        recipes.public.time_table({**PLAN, "level": 0.2}, runs_by_hand())


def test_the_ratio_is_over_seeds_of_which_both_arms_reach_the_level(recipes: Any) -> None:
    """Seed 1 of TRL ends below it, and a third seed has a ratio of 1/2."""
    runs = runs_by_hand()
    runs["TRL"][1] = runs["never"][1]
    runs["TRL"][2], runs["ours"][2] = runs["ours"][0], runs["ours"][1]
    row = recipes.public.time_table(PLAN, runs).splitlines()[3]
    middle = (1 / 6 * 1 / 2) ** 0.5
    assert row.split(" | ")[1:4] == ["3 of 3", "0.3", f"{middle:.2f} (0.17 to 0.50)"]


def test_the_table_of_costs_is_over_whole_runs(recipes: Any) -> None:
    rows = recipes.public.cost_table(runs_by_hand()).splitlines()[2:]
    assert rows[:2] == [
        "| TRL | 6.0 | 1.5 | 400 | 4,000 / 8,000 |",
        "| ours | 1.5 | 0.4 | 400 | 4,000 / 4,000 |",
    ]


def test_the_table_of_gains_has_the_mean_of_the_last_three_checks(recipes: Any) -> None:
    runs = runs_by_hand()
    runs["ours"][1]["pass@8"] = {"0": 0.2, "10": 0.8, "20": 0.8, "30": 0.8, "40": 0.8}
    rows = recipes.public.gains_table(PLAN["pictured"], runs).splitlines()
    assert rows[0] == "| arm | greedy | pass@8 |" and rows[2] == "| before | 20.0% | 20.0% |"
    assert rows[3] == "| TRL | +36.7 (+36.7 to +36.7) | +36.7 (+36.7 to +36.7) |"
    assert rows[4] == "| ours | +40.0 (+40.0 to +40.0) | +50.0 (+40.0 to +60.0) |"


def test_the_picture_has_a_panel_for_each_figure_and_the_line_in_one(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(recipes.public.plt, "close", drawn.append)
    recipes.public.show(tmp_path / "arms.png", PLAN, runs_by_hand())
    assert recipe.is_picture(tmp_path / "arms-minutes.png")
    panels = drawn[0].axes
    dashed = [[line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"] for axis in panels]
    assert dashed == [[0.5], []]
    of_trl = [line for line in panels[0].lines if line.get_label() == "TRL"]
    assert list(of_trl[0].get_xdata()) == [0, 1.5, 3, 4.5, 6] and list(of_trl[0].get_ydata()) == CURVES["TRL"]
    assert drawn[0].get_figwidth() == 3.9  # a phone shows it as it is
    said = capsys.readouterr().out
    assert "| ours | 2 of 2 |" in said
    recipes.public.show(tmp_path / "arms.png", {**PLAN, "level": None}, runs_by_hand())
    said = capsys.readouterr().out
    assert "The plan has no level" in said and "2 of 2" not in said


def test_the_pictures_and_tables_of_recorded_runs(
    recipes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, runs = {**PLANS["chain-sum"], "level": 0.5}, {name: runs_by_hand()[name] for name in ("TRL", "ours")}
    for own in runs.values():
        for figures in own.values():
            figures |= {f"longer/{name}": figures[name] for name in ("accuracy", "greedy", "pass@8")}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    command = [str(tmp_path / "plan.yaml"), "--redraw", str(tmp_path / "results.json")]
    recipes.experiment.main(command, recipes.public.PUBLIC)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"results", "results-differences", "results-minutes"}
    said = capsys.readouterr().out
    for row in ("| TRL | 56.7% |", "| before | 20.0% |", "| TRL | 6.0 | 1.5 | 400 |", "| ours | 2 of 2 | 0.4 |"):
        assert row in said


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_has_the_tables_of_the_recorded_runs(recipes: Any, name: str) -> None:
    plan, recorded = PLANS[name], RESULTS[name]
    assert recorded["settings"] == plan and recorded["versions"].keys() >= {"trl-steady", "trl", "torch"}
    assert recorded["runs"].keys() == plan["arms"].keys()
    assert all([*map(int, own)] == plan["seeds"] for own in recorded["runs"].values())
    assert plan["task"] != "sums" or "reasoning-gym" in recorded["versions"]
    page = (FOLDER / "README.md").read_text()
    for table in recipes.public.tables(plan, recorded["runs"]):
        assert table in page
    for kind in ("", "-differences", "-minutes"):
        assert recipe.is_picture(FOLDER / f"results/{name}{kind}.png") and f"](results/{name}{kind}.png)" in page
