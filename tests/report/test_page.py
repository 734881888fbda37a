"""`report.html`: what is drawn, that users' text stays text, and that any log gives a page."""

import json
import math
import re
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.report.runs import healthy, history
from trl_steady.cli import main as cli
from trl_steady.features.training_report import MOST_BYTES, chosen, limited
from trl_steady.report import History, compare, diagnose
from trl_steady.report.history import Series
from trl_steady.report.page import write, write_comparison
from trl_steady.report.plots import MOST_FUNCTIONS, POINTS, draw, pictures, thinned
from trl_steady.report.symptoms import SYMPTOMS, Finding

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &amp; \x00\x1b\ud800 \N{RIGHT-TO-LEFT OVERRIDE}"


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def page(folder: Path, run: History, name: str = "run") -> str:
    write(folder / "report.html", name, run)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_text_of_users_stays_text(tmp_path: Path) -> None:
    answer = {"place": "best", "reward": 1.0, "text": EVIL, "tokens": None}
    coloured = {**answer, "tokens": [(EVIL, 0.5), ("b", -1.0)]}
    rollout = {"step": 4, "groups": [{"prompt": EVIL, "answers": [answer, coloured]}]}
    notes = [f"{EVIL} has no effect"]
    run = history(healthy(0), answers=[rollout], notes=notes, settings={"run_name": EVIL}, versions={"trl": EVIL})
    html = page(tmp_path, run, EVIL)
    found = Page(html)
    assert not found.tags & {"script", "img", "iframe", "link", "object"}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "script-src" not in html and "default-src 'none'" in html  # nor would a browser run one
    shown = re.sub("[\x00\x1b\ud800\N{RIGHT-TO-LEFT OVERRIDE}]", "\ufffd", EVIL)
    assert found.text.count(shown) == 7  # title, heading, version, evidence, prompt, two answers
    comparison = tmp_path / "comparison.html"
    write_comparison(comparison, {EVIL: run, "other": run})
    assert not Page(comparison.read_text()).tags & {"script", "img"}


def test_a_page_needs_nothing_from_elsewhere_and_has_no_fixed_colours(tmp_path: Path) -> None:
    html = page(tmp_path, history(healthy(0)))
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert {*re.findall(r"https?://[^\"' <]*", html)} <= namespaces
    drawn = html[html.index("<svg") :]
    assert not re.search(r"#[0-9a-f]{6}\b", drawn)  # light and dark take colours from the style sheet
    ids = re.findall(r' id="([^"]*)"', drawn)
    assert all(f"#{name}" in drawn for name in ids)
    assert {"var(--c1)", "var(--ink)"} <= {*re.findall(r"var\(--\w+\)", drawn)}


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    assert page(tmp_path, history(healthy(0))) == page(tmp_path, history(healthy(0)))


@pytest.mark.fast_rows(3)
@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("reward", "Reward"),
        ("kl/k3", "KL to the reference"),
        ("ratio/sequence_mean", "Ratio to the policy of the rollout"),
        ("dropped/veto", "Clipped and dropped"),
        ("mismatch/log_ratio_q50", "Trainer and engine"),
        ("mismatch/effective_sample_size", "Effective sample size"),
        ("frac_reward_zero_std", "Wasted"),
        ("completions/clipped_ratio", "Wasted"),
        ("completions/mean_length", "Length"),
        ("entropy", "Entropy"),
        ("grad_norm", "Norm of the gradient"),
        ("learning_rate", "Learning rate"),
        ("routing/changed", "Routes that change"),
        ("sampling_mask/kept_mass", "Kept tokens"),
        ("value/explained_variance", "Critic"),
        ("reward_model/new/held_out/accuracy", "Reward model"),
        ("time/generation", "Time of a step"),
    ],
)
def test_a_metric_has_a_picture_and_no_other(key: str, title: str) -> None:
    run = History([{"step": step, key: float(step)} for step in range(1, 9)])
    assert [*dict(pictures({"run": [run]}))] == [title]


def with_functions(*names: str) -> History:
    rows: list[dict[str, float]] = []
    for step in range(1, 21):
        row = {"step": step, "reward": step / 20}
        for name in names:
            row[f"rewards/{name}/mean"] = step / 40
            row[f"rewards/{name}/std"] = 0.25
        rows.append(row)
    return History(rows)


def test_each_of_several_reward_functions_has_a_picture() -> None:
    run = with_functions("right", "form")
    drawn = dict(pictures({"run": [run]}))
    assert [*drawn] == ["Reward", "Reward function form", "Reward function right"]
    assert (
        "mean 0.5" in drawn["Reward function form"] and "spread of the answers 0.25" in drawn["Reward function form"]
    )
    assert [*dict(pictures({"a": [run], "b": [run]}))] == [*drawn]
    assert [*dict(pictures({"run": [with_functions("right")]}))] == ["Reward"]


def test_a_symptom_of_a_reward_function_marks_its_own_picture() -> None:
    finding = Finding(SYMPTOMS[0], since=7, metric="rewards/form/mean", evidence="", advice="")
    drawn = dict(pictures({"run": [with_functions("right", "form", "length")]}, [finding]))
    assert [title for title, svg in drawn.items() if SYMPTOMS[0].name in svg] == ["Reward function form"]


def test_the_page_names_reward_functions_that_are_too_many_for_a_picture(tmp_path: Path) -> None:
    names = [f"function_{number}" for number in range(10, 10 + MOST_FUNCTIONS + 2)]
    html = page(tmp_path, with_functions(*names))
    assert html.count("<h3>Reward function function_") == MOST_FUNCTIONS
    assert f"Reward functions without a picture: {names[-2]}, {names[-1]}." in html


def test_a_stack_adds_up_and_what_was_not_logged_is_0() -> None:
    rows = [{"step": 2, "a": 1.0, "b": 10.0}, {"step": 4, "b": 20.0}, {"step": 6, "a": 3.0, "b": math.nan}]
    axis = Figure().subplots()
    assert draw(axis, {"stack": {"a": "A", "b": "B", "missing": "C"}}, History(rows)) == {"a", "b"}
    first, second = (patch.get_data() for patch in axis.patches)
    assert first.edges.tolist() == second.edges.tolist() == [0, 2, 4, 6]
    assert first.values.tolist() == second.baseline.tolist() == [1, 0, 3]
    assert second.values.tolist() == [11, 20, 3]


def test_a_stack_of_zeros_is_no_picture_and_a_single_log_is_a_dot() -> None:
    zeros = [{**row, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0} for row in healthy(0, 8)]
    kept = [{key: value for key, value in row.items() if not key.startswith("dropped/")} for row in zeros]
    assert "Clipped and dropped" not in dict(pictures({"run": [History(kept)]}))
    axis = Figure().subplots()
    draw(axis, {"lines": {"reward": "rollouts"}}, History([{"step": 1, "reward": 0.5}]))
    assert [line.get_marker() for line in axis.lines] == ["o"]


def test_what_follows_is_in_the_card_of_its_cause_and_what_passed_is_below(tmp_path: Path) -> None:
    rows = [{"step": i, "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0} for i in range(1, 30)]
    for row in rows[5:15]:
        row["routing/changed"] = 0.5
    for row in rows[15:]:
        row["routing/changed"] = 0.0
    html = page(tmp_path, History(rows))
    assert html.count("<div class='card ") == 1 and "the reward never changes, since step 1." in html
    assert re.search(
        r"<summary>What follows from it</summary><p class=soft>so also: nearly all groups are all wrong", html
    )
    assert re.search(r"passed at step (19|2\d): many tokens take other experts", html)
    (href,) = [value for name, value in Page(html).attributes if name == "href"]
    assert href and href.endswith("docs/troubleshooting.md#the-reward-is-flat")


def test_a_link_leads_to_the_site_if_the_package_knows_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = Message()
    about["Project-URL"] = "Documentation, https://docs.example/"
    monkeypatch.setattr("trl_steady.report.page.metadata", lambda _: about)
    html = page(tmp_path, History([{"step": i, "reward": 0.0, "reward_std": 0.0} for i in range(9)]))
    assert "<a href='https://docs.example/troubleshooting/#the-reward-is-flat'>" in html


def test_a_long_curve_keeps_its_extremes() -> None:
    values = np.zeros(10 * POINTS)
    values[1234] = 7.0
    steps, (low, middle, high) = thinned(Series(np.arange(1, len(values) + 1), values))
    assert len(steps) == POINTS and steps[-1] == len(values)
    assert high[123] == high.max() == 7.0 and not middle.any() and not low.any()


def test_a_picture_marks_where_its_symptom_began() -> None:
    rows = [{"step": step, "dropped/veto": float(step > 20), "reward": step / 40} for step in range(1, 41)]
    run = History(rows)
    (finding,) = diagnose(run)[0]
    found = dict(pictures({"run": [run]}, [finding]))
    assert finding.since == 21
    assert "everything-dropped" in found["Clipped and dropped"] and "everything-dropped" not in found["Reward"]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "logged",
    [
        pytest.param([], id="nothing"),
        pytest.param(healthy(0, 1), id="one step"),
        pytest.param(
            [{**row, "reward": math.nan, "kl": math.inf, "entropy": -math.inf} for row in healthy(0, 40)],
            id="not numbers",
        ),
        pytest.param([*healthy(0, 40), *healthy(1, 60)[20:]], id="overlap"),
        pytest.param([*healthy(0, 40), *healthy(1, 40)], id="two trainers"),
        pytest.param(
            [{"step": step, "kl": 1.7e308 * (-1) ** step, "grad_norm": 1e-300} for step in range(1, 20)], id="huge"
        ),
        pytest.param([{"step": -1, "reward": 1.0}, {"step": 0, "reward": 1.0}], id="negative step"),
    ],
)
def test_any_log_gives_a_page(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    assert "</html>" in page(tmp_path, History(logged, {"settings": {}, "notes": []}))


def test_a_setting_too_large_for_a_picture_gives_a_page(tmp_path: Path) -> None:
    settings = {"epsilon": 1e308, "max_completion_length": 10**400}
    assert "clip range" in page(tmp_path, history(healthy(0, 40), settings=settings))


# answers


def test_the_groups_that_differ_most_give_their_best_median_and_worst_answer() -> None:
    rewards = np.array([0, 0, 0, 0, 1, 5, 3, 2, 0.5, 0.4, 0.3, 0.2, 9, 8, 9.2, 9.1])
    found = chosen(rewards, 4)  # the groups differ by 0, 4, 0.3 and 1.2
    assert [{rewards[row]: place for row, place in group.items()} for group in found] == [
        {5: "best", 2: "median", 1: "worst"},
        {9.2: "best", 9: "median", 8: "worst"},
        {0.5: "best", 0.3: "median", 0.2: "worst"},
    ]
    assert chosen(np.array([0.1, 0.9, 0.5]), 1) == [{1: "best"}, {2: "median"}, {0: "worst"}]
    assert chosen(np.array([0.1, 0.9]), 2) == [{1: "best", 0: "worst"}]
    assert chosen(np.array([0.7]), 8) == [{0: "best"}]


def test_answers_take_at_most_a_megabyte_and_the_oldest_go_first() -> None:
    rollouts = [{"step": step, "groups": ["x" * 20_000 * step]} for step in range(20)]
    kept = limited(rollouts)
    assert [rollout["step"] for rollout in kept] == [18, 19]  # 17, 18 and 19 take 1,080,000 characters
    assert len(json.dumps(kept)) <= MOST_BYTES


def test_an_answer_shows_every_token_in_the_colour_of_its_advantage(tmp_path: Path) -> None:
    tokens = [("2 + 2\n", 0.5), ("<b>", -1.0), ("", 0.25), ("日本", 0.0)]
    answer = {"place": "best", "reward": 1.0, "text": "", "tokens": tokens}
    rollout = {"step": 4, "groups": [{"prompt": "?", "answers": [answer]}]}
    html = page(tmp_path, history(healthy(0, 8), answers=[rollout]))
    spans = re.findall(
        r"<span title='advantage ([^']+)' style='--share:(\d+)%'( class=below)?>(.*?)</span>", html, re.DOTALL
    )
    assert [(float(advantage), int(share), bool(below), text) for advantage, share, below, text in spans] == [
        (0.5, 35, False, "2 + 2\n"),
        (-1.0, 70, True, "&lt;b&gt;"),
        (0.25, 18, False, ""),
        (0.0, 0, False, "日本"),
    ]


# comparisons


def test_runs_are_compared_seed_by_seed() -> None:
    def run(end: float) -> History:
        values = [*[0.0] * 10, end - 0.02, end + 0.02]
        return History([{"step": step, "reward": value} for step, value in enumerate(values, 1)])

    paths = {"a-seed0": 0.5, "a-seed1": 0.1, "b-seed0.json": 0.6, "b-seed1.json": 0.3, "b-seed2.json": 0.9}
    runs = compare.by_name({path: run(end) for path, end in paths.items()})
    assert {name: sorted(seeds) for name, seeds in runs.items()} == {"a": [0, 1], "b": [0, 1, 2]}
    assert [*compare.by_name({"a-seed0": run(0.1), "a/seed0": run(0.2)})] == ["a", "a/seed0"]  # none is lost
    for paths in (["a-seed0", "a"], ["a", "a-seed0"]):
        assert [*compare.by_name({path: run(0.1) for path in paths})] == paths
    figure, found = compare.compared(runs)
    assert figure == "reward" and found["b"].seeds == 3
    assert found["a"].mean == pytest.approx(0.3) and found["b"].mean == pytest.approx(0.6)
    assert found["b"].gains == pytest.approx([0.1, 0.2]) and not len(found["a"].gains)
    assert compare.interval(found["b"].gains) == pytest.approx((0.1, 0.2))  # 1/4 of the resamples are twice the same


def test_each_cell_of_a_wide_table_has_its_heading_for_a_phone(tmp_path: Path) -> None:
    """On a phone, cells stand below each other and the row of headings is hidden."""
    file = tmp_path / "comparison.html"
    write_comparison(file, {f"{arm}-seed{seed}": History(healthy(seed, 40)) for arm in "ab" for seed in (0, 1)})
    html = file.read_text()
    (table,) = re.findall(r"<div class='scroll wide'><table>(.*?)</table>", html)
    headings = re.findall(r"<th>(.*?)</th>", table)
    assert headings == ["run", "seeds", "eval_reward, last sixth", "minus a", "95 % interval"]
    assert re.findall(r"<td data-of='(.*?)'>", table) == 2 * headings
    assert "td::before { content: attr(data-of);" in html and ".wide th { display: none; }" in html


@pytest.mark.slow
def test_the_command_writes_a_page_for_each_run_or_one_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(tmp_path / f"{arm}-seed{seed}.json") for arm in "ab" for seed in (0, 1)]
    for seed, file in enumerate(files):
        Path(file).write_text(json.dumps({"history": healthy(seed, 40)}))
    assert cli.main(["report", files[0]]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out and (tmp_path / "report.html").is_file()
    together = tmp_path / "both.html"
    assert cli.main(["report", "--compare", *files, "--output", str(together)]) == 0
    text = Page(together.read_text()).text
    assert "95 % interval" in text and "held-out" not in text and "eval_reward, last sixth" in text
    assert cli.main(["report", files[0], "--compare", files[1]]) == 2
    (tmp_path / "report.html").unlink()
    monkeypatch.setattr("trl_steady.report.command.find_spec", lambda _: None)
    assert cli.main(["report", files[0]]) == 0
    assert "pip install matplotlib" in capsys.readouterr().err and not (tmp_path / "report.html").exists()
