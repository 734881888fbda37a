"""A stop that the user gives in `generation_kwargs` ends a completion."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.tools import tiny
from trl_steady.trl_bridge.generation import with_own_stops

EOS, *STOPS = tiny.SIZES["eos_token_id"]
PAD = tiny.SIZES["pad_token_id"]
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "RLOO": {},
    "PPO": {"missing_eos_penalty": 100.0},
    "GRPO, kept tokens": {"keep_sampling_mask": True, "top_p": 0.9},
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_after_a_users_stop_is_trained(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """TRL would train the padding after it, and log each such completion as cut off."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    model.generation_config.eos_token_id = EOS
    options = {"generation_kwargs": {"eos_token_id": [EOS, *STOPS]}, "method": method.split(",")[0], "max_steps": 1}
    trainer = tiny.trainer(model, tmp_path, **options, **METHODS[method])
    rollouts, generate = [], trainer._generate_and_score_completions
    vars(trainer)["_generate_and_score_completions"] = lambda inputs: rollouts.append(generate(inputs)) or rollouts[-1]
    trainer.train()
    (samples,) = rollouts
    ids, mask = samples["completion_ids"], samples["completion_mask"].bool()
    lasts = ids.gather(1, mask.sum(1, keepdim=True) - 1).flatten()
    is_stopped = torch.isin(lasts, torch.tensor([EOS, *STOPS]))
    assert is_stopped.sum() > 0 and not (ids[mask] == PAD).any()
    assert torch.equal(mask.sum(1)[~is_stopped], torch.full_like(mask.sum(1)[~is_stopped], 8))
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == (~is_stopped).double().mean()
    if method == "PPO":  # no penalty for an answer that has ended
        returns = samples["returns"].gather(1, mask.sum(1, keepdim=True) - 1).flatten()
        assert torch.equal(returns < -50, ~is_stopped)
    assert model.generation_config.eos_token_id == EOS


def test_the_stops_are_those_of_the_engine() -> None:
    """vLLM has another name for them, and no completion of vLLM's is padded."""
    given: dict[str, Any] = {"eos_token_id": torch.tensor([3, 2]), "stop_token_ids": (5, 2)}
    for engine, stops in ((False, [1, 2, 3]), (True, [1, 2, 5])):
        assert with_own_stops([1, 2], SimpleNamespace(use_vllm=engine, generation_kwargs=given)) == stops
    alone = SimpleNamespace(use_vllm=False, generation_kwargs={"eos_token_id": 7})
    assert with_own_stops([1], alone) == [1, 7]
    for nothing in (None, {}, {"eos_token_id": None}):
        assert with_own_stops([1], SimpleNamespace(use_vllm=False, generation_kwargs=nothing)) == [1]
