"""Labels of steps by continuations equal brute force, where all continuations can be listed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.reward_model import tools as rewarding
from tests.tools import engines, tiny
from tests.tools.engines import Engine, Server
from trl_steady import RewardAdapter
from trl_steady.features.reward_model import labelling
from trl_steady.rewards import by_regex

engine, server = engines.engine, engines.server


def test_labels_are_those_of_brute_force(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer has four digits of 0 and 1, each a step. It is right if two digits beside each other are 1.

    A step has no label if a rule has no verdict on any of its continuations.
    """
    length = 4
    zero, one = (tiny.tokenizer()(digit)["input_ids"][0] for digit in "01")

    def all_continuations(trainer: Any, prompt_ids: list[list[int]], chunk: int) -> list[list[int]]:
        """Each of a step's texts gets another of its continuations, of at most 8."""
        found, counts = [], dict[tuple[int, ...], int]()
        for ids in map(tuple, prompt_ids):
            number = counts[ids] = counts.get(ids, -1) + 1
            found.append([one if number >> place & 1 else zero for place in range(length)])
        return found

    def brute_force(answer: str) -> list[float]:
        """1 for a step from whose end any of all completions is right."""
        labels = []
        for end in range(1, length + 1):
            rests = ["".join(rest) for rest in itertools.product("01", repeat=length - end)]
            labels.append(float(any("11" in answer[:end] + rest for rest in rests)))
        return labels

    def labels_of(rule: Any, answers: list[str], known: list[bool | None]) -> list[list[float]]:
        """Each answer has a prompt of its own, so that equal beginnings are counted apart."""
        count = len(answers)
        given = labelling.RolloutCompletions(
            prompts=["?"] * count,
            completions=answers,
            columns={"trainer_state": None, "answer": [*range(count)]},
            prompt_ids=[[10, 20 + number] for number in range(count)],
            completion_ids=[tiny.tokenizer()(answer)["input_ids"] for answer in answers],
            ends=[list(range(1, length + 1))] * count,
        )
        return labelling.label_steps(trainer, rule, given, known, 8)

    def is_right(prompts: Any, completions: list[str], **_: Any) -> list[bool]:
        return ["11" in completion for completion in completions]

    def is_silent_after_0(prompts: Any, completions: list[str], **_: Any) -> list[bool | None]:
        return [None if text.startswith("0") else "11" in text for text in completions]

    monkeypatch.setattr(labelling, "generate_continuations", all_continuations)
    adapter = RewardAdapter(head="steps", splitter=by_regex("[01]"))
    trainer = rewarding.build("lora", models["dense"], tmp_path, adapter=adapter, max_completion_length=length)
    answers = ["".join(digits) for digits in itertools.product("01", repeat=length)]
    found = labels_of(is_right, answers, ["11" in answer for answer in answers])
    assert found == [brute_force(answer) for answer in answers]
    assert sorted({tuple(labels) for labels in found}) == [(1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (1.0,) * 4]
    silent, other = labels_of(is_silent_after_0, ["0110", "1010"], [True, False])
    assert torch.tensor(silent).isnan().tolist() == [True, True, True, False] and silent[-1] == 1.0
    assert other == brute_force("1010")


def test_the_policy_continues_what_it_is_given(models: dict[str, Path], tmp_path: Path) -> None:
    """Texts of unequal lengths, in chunks, by greedy decoding: as each alone."""
    trainer = rewarding.build("lora", models["dense"], tmp_path, generation_kwargs={"do_sample": False})
    trainer.model.train()
    texts = [[10, 11, 12], [60], [61, 62], [13, 14, 15, 16]]
    found = labelling.generate_continuations(trainer, texts, 3)
    alone = [labelling.generate_continuations(trainer, [text], 1)[0] for text in texts]
    assert found == alone and len({tuple(ids) for ids in found}) > 1
    with torch.no_grad():
        policy = trainer.model.generate(torch.tensor([texts[0]]), do_sample=False, max_new_tokens=8)[0, 3:].tolist()
    assert policy[: len(found[0])] == found[0]


@pytest.mark.parametrize(("kind", "mode"), [("GRPO", "colocate"), ("RLOO", "server")])
def test_an_engine_continues_each_text(
    mode: str, kind: str, models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """More texts than a rollout has, none of them in a group: each gets its own continuation."""
    player: Engine = request.getfixturevalue("engine")
    player.spoken = lambda prompt, number: [100 + prompt[0], 200 + number]
    options: dict[str, Any] = {"use_vllm": True, "vllm_mode": mode}
    if mode == "server":
        server: Server = request.getfixturevalue("server")
        options["vllm_server_base_url"] = server.url
    else:
        engines.colocate(player, request.getfixturevalue("monkeypatch"))
    trainer = tiny.trainer(models["dense"], tmp_path, method=kind, **options)
    trainer.model.train()
    texts = [[10 + text // 2, 7] for text in range(20)]  # each twice
    found = labelling.generate_continuations(trainer, texts, 4)
    assert found == [[110 + text // 2, 200 + text % 2] for text in range(20)]
    assert trainer.num_generations == 4


def test_each_iteration_labels_its_steps(models: dict[str, Path], tmp_path: Path) -> None:
    asked: list[int] = []

    def rule(prompts: Any, completions: Any, answer: list[int], **_: Any) -> list[bool]:
        assert len(prompts) == len(completions) == len(answer)
        asked.append(len(completions))
        return rewarding.is_right(prompts, completions)

    refresh: dict[str, Any] = {"label_fn": rule, "continuations": 3}
    data = tiny.dataset().add_column("answer", list(range(16)))
    trainer = rewarding.refreshed(
        "lora", models["dense"], tmp_path, objective="steps", refresh=refresh, build={"train_dataset": data}
    )
    tiny.train(trainer)
    assert asked[0] == 16 and len(asked) == 6 and all(count % 3 == 0 for count in asked[1::2])
    assert [record.samples > 0 for record in trainer.reward_refreshes] == [True, True]
    limit = trainer.max_completion_length
    assert all(len(answer.completion) <= limit for answer in rewarding.refresher(trainer)._completions)
