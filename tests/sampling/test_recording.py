"""Kept tokens of transformers' `generate` are those that it reports."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tools import tiny
from trl_steady.sampling.kept import KeptTokens
from trl_steady.sampling.recording import SetRecording as Recording

PROMPTS = ["1+2=", "ab", "abab7+8=", "x"]
WIDTH = 8
VOCABULARY = tiny.SIZES["vocab_size"]
ENDS = set(tiny.SIZES["eos_token_id"])
STRATEGIES: list[dict[str, Any]] = [
    {"top_p": 0.7},
    {"top_k": 5, "temperature": 0.8},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 12, "min_p": 0.05, "temperature": 1.3},
    {"temperature": 0.7},
    {"top_p": 0.8, "repetition_penalty": 1.6},
    {"top_k": 9, "min_new_tokens": 3},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tiny.save_model("dense", tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def generate(model: PreTrainedModel, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the completions of left-padded prompts, and the scores (B, V) of each step."""
    tokenizer = tiny.tokenizer()
    batch = {k: v for k, v in tokenizer(PROMPTS, padding=True, return_tensors="pt").items() if k != "token_type_ids"}
    assert batch["attention_mask"][:, 0].tolist() == [0, 0, 1, 0]
    torch.manual_seed(3)
    reports = {"return_dict_in_generate": True, "output_scores": True}
    out = model.generate(**batch, **{"do_sample": True, "max_new_tokens": WIDTH, "top_k": 0, **reports, **options})
    return out.sequences[:, batch["input_ids"].size(1) :], out.scores


def cut(sequences: Tensor) -> list[list[int]]:
    """Up to the first end, with it."""
    completions = []
    for row in sequences.tolist():
        length = next((i + 1 for i, token in enumerate(row) if token in ENDS), len(row))
        completions.append(row[:length])
    return completions


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_recorded_are_the_scores_that_generate_samples_from(model: PreTrainedModel, options: dict[str, Any]) -> None:
    expected = generate(model, **options)[0]
    recording = Recording()
    with recording.listening(model):
        sequences, scores = generate(model, **options)
    assert torch.equal(sequences, expected)
    completions = cut(sequences)
    assert len({len(each) for each in completions}) > 1  # or nothing would be dropped
    finite = [scores[i][row].isfinite() for row, each in enumerate(completions) for i in range(len(each))]
    sets = [[] if mask.all() else mask.nonzero().flatten().tolist() for mask in finite]
    assert [sorted(each) for each in recording.of(completions).lists()] == sets


def test_nothing_is_left_on_the_model(model: PreTrainedModel) -> None:
    before, config = dict(vars(model)), copy.deepcopy(model.generation_config)
    with Recording().listening(model):
        assert vars(model).keys() != before.keys()
        generate(model, top_p=0.7)
    assert vars(model) == before
    with pytest.raises(RuntimeError, match="on purpose"), Recording().listening(model):
        raise RuntimeError("on purpose")
    assert vars(model) == before
    assert model.generation_config == config


def test_each_token_has_the_scores_of_its_own_row_and_step() -> None:
    """Three rows of four steps; row b may have token 10 b + t at step t, and 50."""
    recording = Recording()
    for step in range(4):
        scores = torch.full((3, 60), -torch.inf)
        scores[torch.arange(3), 10 * torch.arange(3) + step] = 1.0
        scores[:, 50] = 2.0
        recording.add(torch.zeros(3, 5 + step, dtype=torch.long), scores)
    expected = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert recording.of([[0], [0] * 4, [0] * 2]).lists() == [[10 * row + step, 50] for row, step in expected]
    assert recording.of([[], [0], []]).lists() == [[10, 50]]


def refused(recording: Recording, completions: list[list[int]]) -> bool:
    try:
        recording.of(completions)
    except ValueError as error:
        assert re.search("keep_sampling_mask=True .*one token after the other.* Leave beam search", str(error))
        return True
    return False


@pytest.mark.parametrize("lengths", [[3, 5], [3, 3], [4, 3]], ids=str)
def test_steps_of_other_than_one_token_are_refused_whatever_the_tokens(lengths: list[int]) -> None:
    recording = Recording()
    for length in lengths:
        recording.add(torch.ones(2, length, dtype=torch.long), torch.tensor([[0.0, 0.0, -torch.inf]] * 2))
    assert refused(recording, [[1, 1], [1]])


def test_other_completions_than_were_drawn_are_refused(model: PreTrainedModel) -> None:
    recording = Recording()
    with recording.listening(model):
        completions = cut(generate(model, top_p=0.9)[0])
    assert isinstance(recording.of(completions), KeptTokens)
    longest = max(range(len(completions)), key=lambda row: len(completions[row]))
    slipped = [[each[0] + 1, *each[1:]] if row == longest else each for row, each in enumerate(completions)]
    for wrong in (completions[:-1], [*completions, [1]], [*completions[:-1], [0] * 99], slipped):
        assert refused(recording, wrong)
    assert refused(Recording(), [[1]])
