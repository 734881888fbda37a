"""What a reward function may return, and ways to make one that returns it."""

import asyncio
import functools
import html
import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, Qwen2Config, Qwen2ForTokenClassification

from tests.tools import tiny
from trl_steady import StepRewards, rewards


@pytest.mark.parametrize(
    ("values", "ends", "message"),
    [
        ([1.0], [1, 2], r"has 1 values and 2 ends\. Give one end for each value, in characters"),
        ([1.0, math.nan], [1, 2], r"has values\[1\]=nan\. Give finite numbers"),
        ([math.inf], [1], r"has values\[0\]=inf\. .* return None"),
        ([1.0, 1.0], [2, 2], r"has ends\[1\]=2, which is not after ends\[0\]=2\. Give exclusive ends that increase"),
        ([1.0, 1.0, 1.0], [2, 5, 4], r"has ends\[2\]=4, which is not after ends\[1\]=5"),
        ([1.0], [0], r"has ends\[0\]=0, which is not after 0"),
        ([1.0], [-3], r"has ends\[0\]=-3, which is not after 0"),
        ([1.0], [1.5], r"has ends\[0\]=1\.5\. Give whole numbers"),
        ([1.0], np.array([1.0]), r"has ends\[0\]=.*1\.0.*Give whole numbers"),
        ([None], [1], r"has values\[0\]=None\. Give finite numbers"),
        ([1e39], [1], r"has values\[0\]=1e\+39\. Give finite numbers"),  # more than float32 holds
        ("12", [1, 2], r"has values='12'\. Give a list of numbers"),
        (["1"], [1], r"has values\[0\]='1'\. Give finite numbers"),
        ([1.0], 1, r"has ends=1\. Give a list of numbers"),
    ],
)
def test_bad_input_is_refused_where_it_is_made(values: list[float], ends: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepRewards(values, ends)
    with pytest.raises(ValueError, match=message.replace("characters", "tokens")):
        StepRewards.at_tokens(values, ends)


def test_a_unit_or_a_flag_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unit='turns' and ends=\(99,\)\. Use StepRewards\.per_turn"):
        StepRewards([1.0], [99], unit="turns")
    with pytest.raises(ValueError, match="closed=True with ends in tokens"):
        StepRewards([1.0], [1], unit="tokens", closed=True)
    with pytest.raises(ValueError, match=r"unit='words'\. Use StepRewards\.at_tokens or StepRewards\.per_turn"):
        StepRewards([1.0], [1], unit="words")


def test_numbers_may_be_numpys_or_torchs() -> None:
    steps = StepRewards(torch.tensor([0.5, 1.0]), np.array([3, 7]))  # type: ignore[arg-type]
    assert steps == StepRewards([0.5, 1.0], [3, 7]) and steps.total == 1.5
    assert StepRewards([], []).total == 0.0
    assert StepRewards.per_turn([0.1] * 10).total == 1.0  # not 0.9999999999999999


SPLIT = [
    (rewards.by_regex(r"\n"), "a\nb\nc", ["a\n", "b\n", "c"]),
    (rewards.by_regex(r"\n"), "a\nb\n", ["a\n", "b\n"]),
    (
        rewards.by_regex(r"\n"),
        "\n\na\n\n\nb",
        ["\n\na\n", "\n\nb"],
    ),  # blank pieces: to the step before, the first's after
    (rewards.by_regex(r"Step \d+:"), "Step 1: x Step 2: y", ["Step 1:", " x Step 2:", " y"]),
    (rewards.by_regex(re.compile("end", re.IGNORECASE)), "aEND b", ["aEND", " b"]),
    (rewards.by_regex("x*"), "ab", ["a", "b"]),  # matches of nothing cut, and do not make steps of nothing
    (rewards.by_regex(r"\n"), "", []),
    (rewards.by_regex(r"\n"), " \n \n", []),
    (rewards.by_blank_line(), "a\nb\n\nc", ["a\nb\n\n", "c"]),
    (rewards.by_blank_line(), "a\n \t\n\n\nb\n\n", ["a\n \t\n", "\n\nb\n\n"]),
]


@pytest.mark.parametrize(("splitter", "text", "expected"), SPLIT)
def test_splitters(splitter: Any, text: str, expected: list[str]) -> None:
    steps = splitter(text)
    assert list(steps.texts) == expected
    assert steps == splitter([{"role": "assistant", "content": text}])
    rewarded = steps.rewards([1.0] * len(expected))
    assert rewarded.closed == steps.closed
    starts = (0, *rewarded.ends)
    assert [text[a:b] for a, b in zip(starts, rewarded.ends, strict=False)] == expected
    with pytest.raises(ValueError, match=f"{len(expected) + 1} rewards for {len(expected)} steps"):
        steps.rewards([1.0] * (len(expected) + 1))


@pytest.mark.parametrize(
    ("text", "closed"),
    [("a\nb", False), ("a\nb\n", True), ("a\n", True), ("a", False), ("", False), ("a\n  ", True), ("\na", False)],
)
def test_a_separator_closes_the_last_step(text: str, closed: bool) -> None:
    steps = rewards.by_regex(r"\n")(text)
    assert steps.closed is steps.rewards([1.0] * len(steps.texts)).closed is closed


CONVERSATION = [
    {"role": "assistant", "content": "Let me look.", "tool_calls": [{}]},
    {"role": "tool", "name": "look", "content": "4"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is 4."}]},
]


def test_turns_are_steps() -> None:
    steps = rewards.by_turn()(CONVERSATION)
    assert list(steps.texts) == ["Let me look.", "It is 4."]
    assert steps.rewards([0.0, 1.0]) == StepRewards.per_turn([0.0, 1.0])
    with pytest.raises(ValueError, match=r"by_turn splits conversations.*Use by_regex or by_blank_line"):
        rewards.by_turn()("text")
    with pytest.raises(ValueError, match=r"conversation of 3 messages.*Use by_turn"):
        rewards.by_blank_line()(CONVERSATION)


def test_a_scorer_sees_all_steps_at_once_and_what_trl_gives() -> None:
    seen: dict[str, Any] = {}

    def judge(**given: Any) -> list[list[float]]:
        seen.update(given)
        return [[float(len(step)) for step in row] for row in given["steps"]]

    reward = rewards.scored_steps(judge, rewards.by_regex(r"\n"))
    assert reward(prompts=["p", "q"], completions=["a\nbb", ""], answer=[1, 2]) == [
        StepRewards([2.0, 2.0], [2, 4]),
        StepRewards([], []),
    ]
    assert seen == {
        "prompts": ["p", "q"],
        "steps": [["a\n", "bb"], []],
        "completions": ["a\nbb", ""],
        "answer": [1, 2],
    }
    assert reward.__name__ == "judge"  # under which TRL logs it
    # a column of the same name, as data of process reward models have it
    judged = reward(prompts=["p"], completions=["a\nbb"], steps=[["gold"]])
    assert judged == [StepRewards([2.0, 2.0], [2, 4])] and seen["steps"] == [["a\n", "bb"]]


def test_a_scorer_may_be_async_and_may_be_silent() -> None:
    class Judge:
        async def __call__(self, steps: list[list[str]], **_: Any) -> list[list[float] | None]:
            return [None if len(row) > 1 else [0.5] * len(row) for row in steps]

    async def judge(steps: list[list[str]], **_: Any) -> list[list[float] | None]:
        return await Judge()(steps)

    partly = functools.partial(Judge())
    for scorer, name in ((judge, "judge"), (Judge(), "Judge"), (partly, "partial")):
        reward: Any = rewards.scored_steps(scorer, rewards.by_regex(r"\n"))
        result = asyncio.run(reward(prompts=["p", "q"], completions=["a\nb", "a"]))
        assert result == [None, StepRewards([0.5], [1])]
        assert reward.__name__ == name and inspect.iscoroutinefunction(reward)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[1.0, 1.0]], r"judge returned \[\[1\.0, 1\.0\]\]\. Return 2 lists, one for each completion"),
        (None, r"judge returned None\. Return 2 lists"),
        (
            [[1.0, 1.0], [1.0, 1.0]],
            r"judge returned \[1\.0, 1\.0\] for the 1 steps of completion 1\. Return a list",
        ),
        ([0.5, 0.5], r"judge returned 0\.5 for the 2 steps of completion 0\. Return a list"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores: list[list[float]], message: str) -> None:
    reward = rewards.scored_steps(lambda **_: scores, rewards.by_regex(r"\n"), name="judge")
    with pytest.raises(ValueError, match=message):
        reward(prompts=["p", "q"], completions=["a\nb", "c"])


def prm(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(**{**tiny.SIZES, "num_labels": 3, "max_position_embeddings": 64, **changes})
    return Qwen2ForTokenClassification(config)


def prm_scores(model: Any, prompt_ids: list[int], steps: Sequence[str], separator: str, label: int) -> list[float]:
    """One solution, one forward a step: the probability at the last token read so far (a causal model)."""
    tokenizer, ids, scores = tiny.tokenizer(), list(prompt_ids), []
    for step in steps:
        ids += tokenizer(step)["input_ids"] + tokenizer(separator)["input_ids"]
        logits = model.eval()(torch.tensor([ids])).logits[0, -1]
        scores.append(logits.softmax(-1)[label].item())
    return scores


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_process_reward_model_reads_as_it_was_trained(batch_size: int) -> None:
    model, tokenizer = prm(classifier_dropout=0.9), tiny.tokenizer()
    reward = rewards.process_reward_model(
        model, tokenizer, rewards.by_blank_line(), separator="\n##", good_label=2, batch_size=batch_size
    )
    model.train()  # as a trainer that holds it might set it
    texts = ["a = 1\n\nb = 2\n\n", "c\n\nd\n\nthe third step is longer", "", "x"]
    steps = [["a = 1", "b = 2"], ["c", "d", "the third step is longer"], [], ["x"]]
    result = reward(prompts=["p?", "q", "r", "longer?"], completions=texts, trainer_state=None)
    for prompt, row, got in zip(["p?", "q", "r", "longer?"], steps, result, strict=True):
        expected = prm_scores(model, tokenizer(prompt)["input_ids"], row, "\n##", 2)
        assert got.values == pytest.approx(expected, rel=1e-5)
    assert result[0].ends == (7, 14) and result[2] == StepRewards([], [])
    assert len({round(v, 3) for one in result for v in one.values}) > 4  # or any position would have done


def test_a_process_reward_model_with_a_bos_and_a_conversation() -> None:
    model, tokenizer = prm(), tiny.tokenizer()
    tokenizer.bos_token = tokenizer.pad_token
    reward = rewards.process_reward_model(model, tokenizer, rewards.by_regex(r"\n"))
    (plain,) = reward(prompts=["p"], completions=["a\nb"])
    bos = [tokenizer.bos_token_id]
    assert plain.values == pytest.approx(prm_scores(model, bos + tokenizer("p")["input_ids"], ["a", "b"], "\n", 1))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}bot:"
    talk = [{"role": "user", "content": "p"}]
    (chat,) = reward(prompts=[talk], completions=[[{"role": "assistant", "content": "a\nb"}]])
    assert chat.values == pytest.approx(prm_scores(model, tokenizer("user:p;bot:")["input_ids"], ["a", "b"], "\n", 1))


def test_what_a_process_reward_model_cannot_do_is_refused() -> None:
    model, tokenizer, lines = prm(), tiny.tokenizer(), rewards.by_regex(r"\n")
    with pytest.raises(ValueError, match=r"good_label=3 is not a label of the model\. Set it to one of {0: "):
        rewards.process_reward_model(model, tokenizer, lines, good_label=3)
    with pytest.raises(ValueError, match="separator='' has no token"):
        rewards.process_reward_model(model, tokenizer, lines, separator="")
    turns = rewards.process_reward_model(model, tokenizer, rewards.by_turn())
    with pytest.raises(ValueError, match=r"reads one text\. Use by_regex or by_blank_line"):
        turns(prompts=["p"], completions=[CONVERSATION])
    with pytest.raises(ValueError, match="batch_size=0 is below 1"):
        rewards.process_reward_model(model, tokenizer, lines, batch_size=0)
    reward = rewards.process_reward_model(model, tokenizer, lines)
    with pytest.raises(ValueError, match="has 71 tokens, but the process reward model reads at most 64"):
        reward(prompts=["p" * 60], completions=["a" * 10])


def test_process_reward_models_have_names() -> None:
    """Under which TRL logs them, and two would be one."""
    model, lines = prm(), rewards.by_regex(r"\n")
    named = lambda **name: rewards.process_reward_model(model, tiny.tokenizer(), lines, **name).__name__
    assert (named(), named(name="math")) == ("process_reward_model", "math")
    model.config.name_or_path = "somebody/a-prm"
    assert named() == "a-prm"


def test_a_tokenizer_may_allow_less_than_there_are_positions() -> None:
    """RoBERTa's positions begin behind the padding's."""
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 62
    reward = rewards.process_reward_model(prm(), tokenizer, rewards.by_regex(r"\n"))
    with pytest.raises(ValueError, match="has 63 tokens, but the process reward model reads at most 62"):
        reward(prompts=["p" * 60], completions=["aa"])


def test_an_encoder_can_be_a_process_reward_model() -> None:
    """One that reads both ways: padding must not leak into what it sees."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForTokenClassification(BertConfig(vocab_size=260, num_labels=2, **size))
    reward = rewards.process_reward_model(model, tiny.tokenizer(), rewards.by_regex(r"\n"))
    together = reward(prompts=["p", "a longer prompt"], completions=["a\nb", "c\nd\nee"])
    for i, (prompt, text) in enumerate([("p", "a\nb"), ("a longer prompt", "c\nd\nee")]):
        assert reward(prompts=[prompt], completions=[text])[0].values == pytest.approx(together[i].values, rel=1e-4)


COMPLETIONS = [[("2 + 2\n", 0.5), ("<b>", -1.0), ("", 0.25)], [("日本", 0.0)]]


def test_a_page_shows_every_token_in_the_colour_of_its_advantage() -> None:
    page = rewards.advantages_html(COMPLETIONS)
    spans = re.findall(r'<span style="background:rgb\(([\d, ]+)\)" title="([^"]+)">(.*?)</span>', page, re.DOTALL)
    shown = [html.unescape(text) for *_, text in spans]
    assert shown == ["2 + 2↵\n", "<b>", "∅", "日本"]
    assert [float(title) for _, title, _ in spans] == [0.5, -1.0, 0.25, 0.0]
    colours = [tuple(map(int, colour.split(", "))) for colour, *_ in spans]
    (r_up, g_up, _), (r_down, g_down, _), (r_little, g_little, _), nothing = colours
    assert g_up > r_up and r_down > g_down and g_little > r_little and nothing == (255, 255, 255)
    assert r_up < r_little  # more of it, a deeper colour
    assert page.count("<pre>") == 2


def test_a_picture_has_the_colours(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs the recipes extra")
    rewards.advantages_png([[("aaaa", 1.0), ("bbbb\ncc", -1.0)], [("$x_", 0.0)]], tmp_path / "one.png", columns=20)
    pixels = image.imread(tmp_path / "one.png")[..., :3]
    green = (pixels[..., 1] - pixels[..., 0] > 0.3).sum()
    red = (pixels[..., 0] - pixels[..., 1] > 0.3).sum()
    assert green > 400
    assert red / green == pytest.approx(7 / 4, rel=0.3)  # seven characters, the line's end shown, beside four
    rewards.advantages_png([], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
