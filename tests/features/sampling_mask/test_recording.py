"""The candidates that are recorded of transformers' `generate` are those that it reports."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tools import tiny
from tests.tools.devices import CUDA, bytes_held, pretended_gpu
from tests.tools.sets import lists
from trl_steady.features.sampling_mask.candidates import CandidateSets
from trl_steady.features.sampling_mask.recording import CandidateRecorder, refuse_other_modes
from trl_steady.trl_bridge.generation import last_logits_processor

PROMPTS = ["1+2=", "ab", "abab7+8=", "x"]
WIDTH = 8
VOCABULARY = tiny.SIZES["vocab_size"]
ENDS = set(tiny.SIZES["eos_token_id"])


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


def recording(
    model: PreTrainedModel, recorder: CandidateRecorder | None = None
) -> contextlib.AbstractContextManager[None]:
    return last_logits_processor(model, recorder or CandidateRecorder(), refuse_other_modes)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.8, "top_k": 12, "min_p": 0.05, "temperature": 1.3},
        {"temperature": 0.7},
        {"top_k": 9, "min_new_tokens": 3, "repetition_penalty": 1.6},
    ],
    ids=str,
)
def test_recorded_are_the_scores_that_generate_samples_from(model: PreTrainedModel, options: dict[str, Any]) -> None:
    expected = generate(model, **options)[0]
    recorder = CandidateRecorder()
    with recording(model, recorder):
        sequences, scores = generate(model, **options)
    assert torch.equal(sequences, expected)
    completions = []
    for row in sequences.tolist():  # up to the first end, with it
        length = next((i + 1 for i, token in enumerate(row) if token in ENDS), len(row))
        completions.append(row[:length])
    assert len({len(each) for each in completions}) > 1  # or nothing would be dropped
    finite = [scores[i][row].isfinite() for row, each in enumerate(completions) for i in range(len(each))]
    sets = [[] if mask.all() else mask.nonzero().flatten().tolist() for mask in finite]
    assert [sorted(each) for each in lists(recorder.candidates(completions))] == sets


def test_nothing_is_left_on_the_model(model: PreTrainedModel) -> None:
    before = dict(vars(model))
    with recording(model):
        assert vars(model).keys() != before.keys()
    with pytest.raises(RuntimeError, match="on purpose"), recording(model):
        raise RuntimeError("on purpose")
    assert vars(model) == before


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": False}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_all_but_plain_sampling_is_refused(model: PreTrainedModel, options: dict[str, Any]) -> None:
    message = "keep_sampling_mask=True needs plain sampling. Leave do_sample=False"
    with pytest.raises(ValueError, match=message), recording(model):
        generate(model, **options)


def test_sets_of_a_gpu_are_those_of_the_cpu_and_all_that_a_recording_holds() -> None:
    """No operation mixes devices. transformers draws token 7 everywhere, each step with tensors of its own."""
    rows, steps, vocabulary = 3, 40, 60
    completions = [[7] * steps, [7] * 3, [7] * 11]
    draws = torch.rand(steps, rows, vocabulary, generator=torch.Generator().manual_seed(0))
    is_kept = draws < torch.linspace(0, 0.15, steps)[:, None, None]  # token 7 and 0 to 9 more
    is_kept[:, :, 7] = True

    def generated(device: torch.device | str) -> CandidateRecorder:
        recorder = CandidateRecorder()
        for step, kept in enumerate(is_kept):
            input_ids = torch.full((rows, 5 + step), 7).to(device)
            recorder(input_ids, torch.zeros(kept.shape).where(kept, -torch.inf).to(device))
        return recorder

    expected = lists(generated("cpu").candidates(completions))
    with pretended_gpu():
        on_gpu = generated(CUDA)
        assert bytes_held(on_gpu) == 8 * (rows + 1) * steps + 4 * int(is_kept.sum())
        sets = on_gpu.candidates(completions)
        assert sets.has(torch.tensor(list(itertools.chain(*completions)))).all()
        assert lists(sets) == expected
        trained = CandidateSets.cat([sets]).to(CUDA).take(torch.tensor([0, -1, 2], device=CUDA))
        assert lists(trained) == [expected[0], [], expected[2]]
    tokens = [(step, row) for row, each in enumerate(completions) for step in range(len(each))]
    assert expected == [is_kept[place].nonzero().flatten().tolist() for place in tokens]
