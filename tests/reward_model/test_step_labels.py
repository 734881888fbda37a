"""Labels of steps by continuations equal brute force, where all continuations can be listed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import rewarding, tiny
from trl_steady import RewardAdapter
from trl_steady.reward_model import labelling
from trl_steady.rewards import by_regex

# An answer has four digits of 0 and 1, each a step. It is right if the digits before its end, in order, hold 1, 1.
LENGTH, N = 4, 8


def is_right(prompts: Any, completions: list[str], **_: Any) -> list[bool]:
    return ["11" in completion for completion in completions]


def brute_force(answer: str) -> list[float]:
    """1 for a step from whose end any of all completions is right."""
    labels = []
    for end in range(1, LENGTH + 1):
        rests = ["".join(rest) for rest in itertools.product("01", repeat=LENGTH - end)]
        labels.append(float(any("11" in answer[:end] + rest for rest in rests)))
    return labels


def all_continuations(trainer: Any, prompt_ids: list[list[int]], chunk: int) -> list[list[int]]:
    """Each of a step's N texts gets another of its continuations, of at most 8."""
    zero, one = (tiny.tokenizer()(digit)["input_ids"][0] for digit in "01")
    found, counts = [], dict[tuple[int, ...], int]()
    for ids in map(tuple, prompt_ids):
        number = counts[ids] = counts.get(ids, -1) + 1
        found.append([one if number >> place & 1 else zero for place in range(LENGTH)])
    return found


def test_labels_are_those_of_brute_force(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "continued", all_continuations)
    adapter = RewardAdapter(head="steps", splitter=by_regex("[01]"))
    trainer = rewarding.build("lora", models["dense"], tmp_path, adapter=adapter, max_completion_length=LENGTH)
    answers = ["".join(digits) for digits in itertools.product("01", repeat=LENGTH)]
    ids = [tiny.tokenizer()(answer)["input_ids"] for answer in answers]
    ends = [list(range(1, LENGTH + 1))] * len(answers)
    # each answer has a prompt of its own, so that equal beginnings are counted apart
    prompts = [[10, 20 + number] for number in range(len(answers))]
    found = labelling.label_steps(
        trainer,
        is_right,
        ["?"] * len(answers),
        answers,
        {"trainer_state": None, "answer": [*range(len(answers))]},
        prompt_ids=prompts,
        completion_ids=ids,
        ends=ends,
        known=is_right(None, answers),
        continuations=N,
    )
    assert found == [brute_force(answer) for answer in answers]
    assert sorted({tuple(labels) for labels in found}) == [(1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (1.0,) * 4]


def test_the_policy_continues_what_it_is_given(models: dict[str, Path], tmp_path: Path) -> None:
    """Texts of unequal lengths, in chunks, by greedy decoding: as each alone."""
    trainer = rewarding.build("lora", models["dense"], tmp_path, generation_kwargs={"do_sample": False})
    trainer.model.train()
    texts = [[10, 11, 12], [60], [61, 62], [13, 14, 15, 16]]
    found = labelling.continued(trainer, texts, 3)
    alone = [labelling.continued(trainer, [text], 1)[0] for text in texts]
    assert found == alone and len({tuple(own) for own in found}) > 1
    with torch.no_grad():
        policy = trainer.model.generate(torch.tensor([texts[0]]), do_sample=False, max_new_tokens=8)[0, 3:].tolist()
    assert policy[: len(found[0])] == found[0]


def test_each_iteration_labels_its_steps(models: dict[str, Path], tmp_path: Path) -> None:
    asked: list[int] = []

    def rule(prompts: Any, completions: Any, answer: list[int], **_: Any) -> list[bool]:
        assert len(prompts) == len(completions) == len(answer)
        asked.append(len(completions))
        return rewarding.is_right(prompts, completions)

    how: dict[str, Any] = {"label_fn": rule, "continuations": 3}
    data = tiny.dataset().add_column("answer", list(range(16)))
    trainer = rewarding.refreshed(
        "lora", models["dense"], tmp_path, objective="steps", refresh=how, build={"train_dataset": data}
    )
    tiny.train(trainer)
    assert asked[0] == 16 and len(asked) == 6 and all(count % 3 == 0 for count in asked[1::2])
    assert [record.samples > 0 for record in trainer.reward_refreshes] == [True, True]
    limit = trainer.max_completion_length
    assert all(len(own.completion) <= limit for own in rewarding.refresher(trainer)._answers)
