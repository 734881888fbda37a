"""What a reward function may return, and ways to make one that returns it."""

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, Qwen2Config, Qwen2ForTokenClassification

from tests import tiny
from trl_steady import StepRewards, rewards


@pytest.mark.parametrize(
    ("values", "ends", "message"),
    [
        ([1.0], [1, 2], r"has 1 values and 2 ends\. Give one end for each value: where the step ends, in characters"),
        ([1.0, math.nan], [1, 2], r"has values\[1\]=nan\. Give finite numbers"),
        ([math.inf], [1], r"has values\[0\]=inf\. .* return None"),
        ([1.0, 1.0], [2, 2], r"has ends\[1\]=2, which is not after ends\[0\]=2\. Ends are exclusive and increase"),
        ([1.0, 1.0, 1.0], [2, 5, 4], r"has ends\[2\]=4, which is not after ends\[1\]=5"),
        ([1.0], [0], r"has ends\[0\]=0, which is not after 0"),
        ([1.0], [-3], r"has ends\[0\]=-3, which is not after 0"),
    ],
)
def test_bad_input_is_refused_where_it_is_made(values: list[float], ends: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepRewards(values, ends)
    with pytest.raises(ValueError, match=message.replace("characters", "tokens")):
        StepRewards.at_tokens(values, ends)


def test_a_fraction_of_a_character_is_no_end() -> None:
    with pytest.raises(TypeError, match="float"):
        StepRewards([1.0], [1.5])  # type: ignore[list-item]


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
        ["\n\na\n\n\n", "b"],
    ),  # blank pieces: to the step before, the first's after
    (rewards.by_regex(r"Step \d+:"), "Step 1: x Step 2: y", ["Step 1:", " x Step 2:", " y"]),
    (rewards.by_regex(re.compile("end", re.IGNORECASE)), "aEND b", ["aEND", " b"]),
    (rewards.by_regex("x*"), "ab", ["a", "b"]),  # matches of nothing cut, and do not make steps of nothing
    (rewards.by_regex(r"\n"), "", []),
    (rewards.by_regex(r"\n"), " \n \n", []),
    (rewards.by_blank_line(), "a\nb\n\nc", ["a\nb\n\n", "c"]),
    (rewards.by_blank_line(), "a\n \t\n\n\nb\n\n", ["a\n \t\n\n\n", "b\n\n"]),
]


@pytest.mark.parametrize(("splitter", "text", "expected"), SPLIT)
def test_splitters(splitter: Any, text: str, expected: list[str]) -> None:
    steps = splitter(text)
    assert list(steps.texts) == expected
    assert steps == splitter([{"role": "assistant", "content": text}])
    rewarded = steps.rewards([1.0] * len(expected))
    starts = (0, *rewarded.ends)
    assert [text[a:b] for a, b in zip(starts, rewarded.ends, strict=False)] == expected
    with pytest.raises(ValueError, match=f"{len(expected) + 1} rewards for {len(expected)} steps"):
        steps.rewards([1.0] * (len(expected) + 1))


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
    few = rewards.scored_steps(lambda **_: [[1.0]], rewards.by_regex(r"\n"))
    with pytest.raises(ValueError, match="1 rewards for 2 steps"):
        few(prompts=["p"], completions=["a\nb"])


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
    model, tokenizer = prm().train(), tiny.tokenizer()
    reward = rewards.process_reward_model(
        model, tokenizer, rewards.by_blank_line(), separator="\n##", good_label=2, batch_size=batch_size
    )
    texts = ["a = 1\n\nb = 2\n\n", "c\n\nd\n\nthe third step is longer", "", "x"]
    steps = [["a = 1", "b = 2"], ["c", "d", "the third step is longer"], [], ["x"]]
    result = reward(prompts=["p?", "q", "r", "longer?"], completions=texts, trainer_state=None)
    for prompt, row, got in zip(["p?", "q", "r", "longer?"], steps, result, strict=True):
        expected = prm_scores(model, tokenizer(prompt)["input_ids"], row, "\n##", 2)
        assert got.values == pytest.approx(expected, rel=1e-5)
    assert result[0].ends == (7, 14) and result[2] == StepRewards([], [])
    assert not model.training
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
    with pytest.raises(ValueError, match=r"good_label=3 is no label of the model\. Set it to one of them: {0: "):
        rewards.process_reward_model(model, tokenizer, lines, good_label=3)
    with pytest.raises(ValueError, match="separator='' has no token"):
        rewards.process_reward_model(model, tokenizer, lines, separator="")
    reward = rewards.process_reward_model(model, tokenizer, lines)
    with pytest.raises(ValueError, match="has 71 tokens, and the process reward model reads 64"):
        reward(prompts=["p" * 60], completions=["a" * 10])


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
    spans = re.findall(r'<span style="background:#(\w{6})" title="([^"]+)">(.*?)</span>', page, re.DOTALL)
    shown = [html.unescape(text) for *_, text in spans]
    assert shown == ["2 + 2↵\n", "<b>", "∅", "日本"]
    assert [float(title) for _, title, _ in spans] == [0.5, -1.0, 0.25, 0.0]
    colours = [tuple(int(colour[i : i + 2], 16) for i in (0, 2, 4)) for colour, *_ in spans]
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
    assert red / green == pytest.approx(7 / 4, rel=0.25)  # seven characters, the line's end shown, beside four
    rewards.advantages_png([], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
