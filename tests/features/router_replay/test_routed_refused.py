"""What replay of routes cannot do is refused when the trainer is built, and what will do nothing is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig

from tests.tools import tiny


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "dense"},
            r"router_replay: Qwen2ForCausalLM has no routers: it is not a mixture of experts\. Leave",
        ),
        ({"torch_compile": True}, "router_replay='R2' does not work here: the graph of torch.compile"),
        (
            {"router_replay": "R3", "build": {"rollout_func": rollout}},
            "router_replay='R3' does not work here: a rollout_func returns no routes",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_replayed_is_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = models[options.get("model", "moe")]
    options = {"router_replay": "R2", **{name: value for name, value in options.items() if name != "model"}}
    with pytest.raises(ValueError, match=message):
        tiny.trainer(model, tmp_path, **options)


def test_virtual_tokens_are_refused_in_the_first_rollout(models: dict[str, Path], tmp_path: Path) -> None:
    prompts = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    trainer = tiny.trainer(models["moe"], tmp_path, router_replay="R2", build={"peft_config": prompts})
    with pytest.raises(ValueError, match=r"router_replay: the router .* in passes of"):
        tiny.train(trainer)


BLOCKS = {"num_blocks": 64, "max_batch_tokens": 64}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("through", "option"),
    [
        ("generation_kwargs", {"num_beams": 2}),
        ("generation_config", {"guidance_scale": 1.5}),
        ("args", {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": BLOCKS}),
    ],
)
def test_generation_that_does_not_feed_tokens_in_turn_is_refused(
    models: dict[str, Path], tmp_path: Path, through: str, option: dict[str, Any]
) -> None:
    by_options = {"generation_kwargs": {"generation_kwargs": option}, "args": option}.get(through, {})
    trainer = tiny.trainer(models["moe"], tmp_path, router_replay="R3", **by_options)
    if through == "generation_config":
        trainer.model.generation_config.update(**option)
    before = tiny.parameters(trainer)
    with pytest.raises(ValueError, match=r"router_replay='R3'.*Leave beam search.*or set"):
        tiny.train(trainer)
    assert all(torch.equal(before[name], value) for name, value in tiny.parameters(trainer).items())


def test_several_completions_of_one_prompt_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"router_replay": "R3", "generation_kwargs": {"num_return_sequences": 2}}
    trainer = tiny.trainer(models["moe"], tmp_path, **options)
    message = "router_replay='R3': generation returned 32 completions for 16 prompts.* num_return_sequences"
    with pytest.raises(ValueError, match=message):
        trainer.train()
