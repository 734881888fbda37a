"""Evaluations with an engine: they sample with their own options, and the training draws the same answers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tools import tiny
from tests.vllm import sampled
from tests.vllm.tools import needs_vllm

pytestmark = needs_vllm
ROWS, LENGTH = 3, 8


def test_an_evaluation_is_greedy_and_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    """An engine without request seeds draws from the random state of its process."""
    options: dict[str, Any] = {"vllm_request_seeds": False, "max_steps": 4, "save_strategy": "no"}
    options["generation_kwargs"] = {"ignore_eos": True, "temperature": 1.5, "max_tokens": 16}
    build = {"train_dataset": tiny.dataset(8), "eval_dataset": tiny.dataset(ROWS)}
    plain = sampled.run(folder, tmp_path / "plain", build=build, **options)
    options |= {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
    options |= {"eval_metrics": [count], "eval_generation": {"greedy": True, "max_completion_length": LENGTH}}
    judged = sampled.run(folder, tmp_path / "judged", build=build, per_device_eval_batch_size=ROWS, **options)
    assert [rollout for rollout in judged if len(rollout[1]) != ROWS] == plain and len(plain) == 2
    evaluations = [answers for _, answers in judged if len(answers) == ROWS]
    assert len(evaluations) == 5
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(tiny.dataset(ROWS)["prompt"], _in_order(evaluations[0]), strict=True):
        ids = torch.tensor([tiny.tokenizer()(prompt)["input_ids"]])
        settings = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": -1, "pad_token_id": 0}
        assert answer == model.generate(ids, **settings)[0, ids.size(1) :].tolist()


def count(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def _in_order(answers: list[list[int]]) -> list[list[int]]:
    """Return the answers in the order of the data set, which TRL's sampler shuffles with the seed of the run."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(7)).tolist()
    in_order: list[list[int]] = [[]] * ROWS
    for place, row in enumerate(order):
        in_order[row] = answers[place]
    return in_order
