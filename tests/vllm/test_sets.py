"""Kept tokens of a vLLM engine in the trainer's process: what it is asked, and that one on CPU cannot return them."""

import dataclasses
import functools
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config
from trl.generation import vllm_generation

from tests.oracles import sampling as oracle
from tests.sampling.test_sampled_engine import CORRECTED, SETS, TEMPERATURE, ratios, scores, sets_of
from tests.tools import tiny
from tests.tools.routed import build, oracles
from tests.vllm.test_colocate import Colocated
from trl_steady.routing.part import ROUTES
from trl_steady.sampling.part import KEPT_TOKENS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, as `make test-vllm` has it"),
]


def test_a_completion_has_the_fields_that_are_read() -> None:
    from vllm import EngineArgs
    from vllm.config import ModelConfig
    from vllm.outputs import CompletionOutput, SamplingMask

    fields = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {KEPT_TOKENS.field, ROUTES.field, "token_ids"} <= fields
    assert SamplingMask([[5, 7], [3]]).token_ids == [[5, 7], [3]]
    for capture in (KEPT_TOKENS, ROUTES):
        assert capture.flag in inspect.signature(EngineArgs).parameters
        assert capture.flag in {field.name for field in dataclasses.fields(ModelConfig)}  # of /server_info
    assert KEPT_TOKENS.flag in inspect.signature(vllm_generation.LLM).parameters


@pytest.mark.refuses(
    "keep_sampling_mask",
    on="vLLM colocate",
    where="on CPU",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU vLLM can")
@pytest.mark.parametrize("replay", [None, "R3"])
def test_an_engine_on_cpu_says_why_it_cannot(
    mixture: Path, tmp_path: Path, colocated: Colocated, replay: str | None
) -> None:
    with pytest.raises(ValueError, match="sampling distribution replay requires Model Runner V2"):
        colocated(mixture, tmp_path, router_replay=replay, **SETS)
    assert KEPT_TOKENS.flag not in vllm_generation.LLM.keywords  # of the fixture's


TOP_K = 5


@pytest.mark.supports("keep_sampling_mask", on="vLLM colocate")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; not yet run")
@pytest.mark.parametrize("keeps", [True, False])
def test_ratios_to_an_engine_on_a_gpu_are_1_among_kept_tokens_and_the_kept_mass_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Of two rollouts, the second after a sync, in float32, but for how a GPU multiplies it."""
    exact = {"dtype": "float32", "enforce_eager": True}
    monkeypatch.setattr(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, **exact))
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    engine |= {"vllm_max_model_length": 512, "max_completion_length": 40, "use_cpu": False}
    options = {"top_k": TOP_K, "temperature": TEMPERATURE, "keep_sampling_mask": keeps, "max_steps": 5}
    folder = save_model(tmp_path / "model")
    trainer = tiny.train(build(folder, tmp_path, **engine, **options, **CORRECTED))
    assert len(trainer.rollouts) == 2
    policy, masses, same = oracles(folder, trainer), [], []
    for update, row, ratio in ratios(trainer):
        z = scores(policy(trainer.rollouts[update.rollout][0]), row.ids, row.prompt, None)
        left = [oracle.sampled_from(each, top_k=TOP_K) for each in z]
        masses.append(oracle.kept_mass(z, left))
        expected: Tensor = torch.ones_like(masses[-1]) if keeps else masses[-1]
        torch.testing.assert_close(ratio.double().cpu(), expected, rtol=0, atol=0.02)
    assert torch.cat(masses).mean() < 0.9
    if keeps:
        for update in trainer.updates:
            for row, sets in zip(update.rows, sets_of(update.inputs), strict=True):
                z = scores(policy(trainer.rollouts[update.rollout][0]), row.ids, row.prompt, None)
                same += [kept == oracle.sampled_from(each, top_k=TOP_K) for kept, each in zip(sets, z, strict=True)]
        assert sum(same) > 0.95 * len(same)  # two tokens may be too close to tell


def save_model(folder: Path) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(Qwen2Config(**{**tiny.SIZES, **sizes}))
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
