"""What replay of routes cannot do is refused when the trainer is built, and what will do nothing is said."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig

import trl_steady
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
        ({"torch_compile": True}, "router_replay='R2' does not work with torch.compile"),
        (
            {"router_replay": "R3", "build": {"rollout_func": rollout}},
            r"router_replay='R3' does not work with a rollout_func, which returns no routes\. Leave rollout_func",
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


@pytest.mark.parametrize(
    "options",
    [
        {"router_replay": "R2", "build": {"rollout_func": rollout}},
        {"router_replay": "R3", "generation_kwargs": {"num_beams": 1, "use_cache": False}},
    ],
    ids=lambda options: " ".join(options),
)
def test_what_can_be_replayed_is_not_refused(models: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tiny.trainer(models["moe"], tmp_path, **options).args.router_replay == options["router_replay"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"router_replay": "R2", "steps_per_generation": 1},
            r"router_replay='R2' cannot act: every update is on-policy.*Set steps_per_generation=4",
        ),
        (
            {"router_replay_reference": True, "beta": 0.1},
            r"router_replay_reference=True cannot act with router_replay=None",
        ),
        (
            {"router_replay_reference": True, "router_replay": "R2"},
            r"router_replay_reference=True cannot act with has_reference=False",
        ),
    ],
)
def test_what_will_do_nothing_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"router_replay": "R2", "steps_per_generation": 1, "num_iterations": 2},
        {"router_replay": "R3", "steps_per_generation": 1},  # the rollout's experts may be others all the same
        {"router_replay_reference": True, "router_replay": "R2", "beta": 0.1},
    ],
    ids=str,
)
def test_what_acts_is_passed_over_in_silence(tmp_path: Path, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config(tmp_path, **options)


def config(output: Path, **options: Any) -> trl_steady.GRPOConfig:
    """Warnings and all."""
    defaults = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "per_device_train_batch_size": 8}
    return trl_steady.GRPOConfig(str(output), use_cpu=True, bf16=False, report_to="none", **{**defaults, **options})


def test_an_on_policy_run_has_nothing_to_replay(models: dict[str, Path], tmp_path: Path) -> None:
    """Which is what has been said: it trains as without."""
    options = {"steps_per_generation": 1, "max_steps": 2, "beta": 0.1}
    free = tiny.history(tiny.train(tiny.trainer(models["moe"], tmp_path, **options)))
    replay = {"router_replay": "R2", "router_replay_reference": True}
    assert tiny.history(tiny.train(tiny.trainer(models["moe"], tmp_path, **replay, **options))) == free


BLOCKS = {"num_blocks": 64, "max_batch_tokens": 64}


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


def test_trl_has_no_cache_compile_generation(models: dict[str, Path], tmp_path: Path) -> None:
    """Which would trace away the calls that are watched."""
    trainer: Any = tiny.trainer(models["moe"], tmp_path, router_replay="R3", cache_implementation="static")
    assert trainer.generation_config.disable_compile is True


@pytest.mark.parametrize(("value", "tokens"), [("R2", "some"), ("R3", "none"), ("R3", "some")])
def test_a_router_that_leaves_tokens_out_is_refused_in_the_first_rollout(
    models: dict[str, Path], tmp_path: Path, value: str, tokens: str
) -> None:
    """Which the construction cannot tell."""
    trainer: Any = tiny.trainer(models["moe"], tmp_path, router_replay=value)
    layer = trainer.model.model.layers[1].mlp
    forward = layer.forward
    partly = lambda states: torch.cat([forward(states[:, :1]), states[:, 1:]], dim=1)
    layer.forward = partly if tokens == "some" else lambda states: states
    with pytest.raises(ValueError, match=r"router_replay: the router.*layers\.1\.mlp\.gate.*Leave router"):
        tiny.train(trainer)
    assert trainer.state.global_step == 0
