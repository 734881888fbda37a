"""The recipe process_rewards: its task, and its process reward model. The picture of advantages of all recipes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, Qwen2Config, Qwen2ForTokenClassification

from tests.tools import tiny
from trl_steady import StepRewards, rewards


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


def test_a_process_reward_model_reads_a_batch_as_it_was_trained(recipes: Any) -> None:
    model, tokenizer = prm(classifier_dropout=0.9), tiny.tokenizer()
    reward = recipes.prm.process_reward_model(
        model, tokenizer, rewards.by_blank_line(), separator="\n##", good_label=2, batch_size=2
    )
    model.train()  # as a trainer that holds it might set it
    texts = ["a = 1\n\nb = 2\n\n", "c\n\nd\n\nthe third step is longer", "", "x"]
    steps = [["a = 1", "b = 2"], ["c", "d", "the third step is longer"], [], ["x"]]
    result = reward(prompts=["p?", "q", "r", "longer?"], completions=texts, trainer_state=None)
    for prompt, row, got in zip(["p?", "q", "r", "longer?"], steps, result, strict=True):
        expected = prm_scores(model, tokenizer(prompt)["input_ids"], row, "\n##", 2)
        assert got.values == pytest.approx(expected, rel=1e-5)
    assert result[0].ends == (7, 14) and result[2] == StepRewards([], [])
    assert len({round(v, 3) for each in result for v in each.values}) > 4  # or any position would have done
    model.config.name_or_path = "somebody/a-prm"
    assert recipes.prm.process_reward_model(model, tokenizer, rewards.by_blank_line()).__name__ == "a-prm"


def test_a_process_reward_model_reads_a_bos_and_a_conversation(recipes: Any) -> None:
    model, tokenizer = prm(), tiny.tokenizer()
    tokenizer.bos_token = tokenizer.pad_token
    reward = recipes.prm.process_reward_model(model, tokenizer, rewards.by_regex(r"\n"))
    (plain,) = reward(prompts=["p"], completions=["a\nb"])
    bos = [tokenizer.bos_token_id]
    assert plain.values == pytest.approx(prm_scores(model, bos + tokenizer("p")["input_ids"], ["a", "b"], "\n", 1))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}bot:"
    talk = [{"role": "user", "content": "p"}]
    (chat,) = reward(prompts=[talk], completions=[[{"role": "assistant", "content": "a\nb"}]])
    assert chat.values == pytest.approx(prm_scores(model, tokenizer("user:p;bot:")["input_ids"], ["a", "b"], "\n", 1))


def test_padding_does_not_leak_into_an_encoder(recipes: Any) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForTokenClassification(BertConfig(vocab_size=260, num_labels=2, **size))
    reward = recipes.prm.process_reward_model(model, tiny.tokenizer(), rewards.by_regex(r"\n"))
    together = reward(prompts=["p", "a longer prompt"], completions=["a\nb", "c\nd\nee"])
    for i, (prompt, text) in enumerate([("p", "a\nb"), ("a longer prompt", "c\nd\nee")]):
        assert reward(prompts=[prompt], completions=[text])[0].values == pytest.approx(together[i].values, rel=1e-4)


SUM = (17, 25, 28, 14)  # 42, 70, 84
RIGHT = "17+25=42\n42+28=70\n70+14=84"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        pytest.param(RIGHT, [True, True, True], id="right"),
        pytest.param(
            "17+25=41\n41+28=69\n69+14=83", [False, True, True], id="a wrong sum, and the next line goes on from it"
        ),
        pytest.param(
            "17+25=41\n42+28=70\n70+14=84", [False, False, True], id="a wrong sum, and the next line does not"
        ),
        pytest.param("17+25=42\n42+28=70\n70+14=85", [True, True, False], id="a wrong last sum"),
        pytest.param("17+25=42\n42+14=56\n56+28=84", [True, False, False], id="a wrong number"),
        pytest.param(RIGHT + "\n84+10=94", [True, True, False, False], id="an extra line"),
        pytest.param("17+25=42\n17+25=42\n17+25=42", [True, False, False], id="the first line three times"),
        pytest.param("17+25=42\n70+14=84", [True, False], id="a line left out"),
        pytest.param(RIGHT + " done", [True, True, False], id="text at the end"),
        pytest.param("17+25=42\n\n42+28=70\n70+14=84", [True, False, False], id="a blank line"),
        pytest.param("17+25=042\n042+28=70\n70+14=84", [False, True, True], id="a zero before a sum"),
        pytest.param(RIGHT[:-1], [True, True, False], id="cut in the last line"),
        pytest.param("", [], id="none"),
    ],
)
def test_each_line_of_a_sum_is_verified(recipes: Any, text: str, right: list[bool]) -> None:
    assert recipes.sums.right_lines(SUM, text) == right
    whole = text == RIGHT
    task = recipes.sums.Sums("steps", Path())
    for end in ("", recipes.sums.END, recipes.sums.END * 3):
        assert task.is_right(SUM, text + end) is whole
    assert recipes.sums.outcome_reward(SUM, text) == whole
    steps = recipes.sums.step_rewards(SUM, text)
    assert list(steps.values) == [share / 3 for share in right]
    assert list(steps.ends)[-1:] == ([len(text)] if text else [])
    assert steps.total == 1 if whole else steps.total <= 2 / 3  # nothing earns as much as the right answer


def test_no_held_out_sum_has_the_numbers_of_another_problem(recipes: Any) -> None:
    task = recipes.sums.Sums("steps", Path())
    train, test = task.split(200)
    worked = recipes.sums.draw(recipes.sums.WORKED)
    numbers = [tuple(sorted(problem)) for problem in (*worked, *train, *test)]
    assert (len(worked), len(train), len(test)) == (160, 2000, 200) and len(set(numbers)) == len(numbers)
    assert any(problem != tuple(sorted(problem)) for problem in test) and task.split(200) == (train, test)
    # right_answers puts prompts side by side without padding
    assert {len(task.prompt(problem)) for problem in (*train, *test)} == {len(task.prompt(SUM))}
