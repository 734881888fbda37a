"""Checkpoints of another model than the trainer's, and models that transformers saves under other names."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.tools import resumable, tiny
from trl_steady.host.resume import refuse_another_model, saved_otherwise

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
BEST: dict[str, Any] = {
    **SAVING,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 4,
    "metric_for_best_model": "reward",
    "load_best_model_at_end": True,
    "build": {"eval_dataset": tiny.dataset(4)},
}
MOVING = {"sync_ref_model": True, "beta": 0.04}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "dense": tiny.CONFIGS["dense"],
    "tied": transformers.Qwen2Config(**tiny.SIZES, tie_word_embeddings=True),
    "qwen3_moe": tiny.CONFIGS["moe"],
    "mixtral": transformers.MixtralConfig(**tiny.SIZES, **EXPERTS),
    "granitemoe": transformers.GraniteMoeConfig(**tiny.SIZES, **EXPERTS),
    "olmoe": transformers.OlmoeConfig(**tiny.SIZES, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": transformers.GptOssConfig(
        **tiny.SIZES, **EXPERTS, head_dim=8, layer_types=["full_attention", "full_attention"]
    ),
}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of a whole dense model and of an adapter on one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("whole", "adapter")}
    for name, folder in folders.items():
        tiny.train(tiny.trainer(models["dense"], folder, lora=name == "adapter", **SAVING))
    return {name: folder / "checkpoint-4" for name, folder in folders.items()}


def another_model(models: dict[str, Path], folder: Path) -> Any:
    return models["moe"]


def more_layers(models: dict[str, Path], folder: Path) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**tiny.SIZES, "num_hidden_layers": 3}))


CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any] | None, str]] = {
    "whole model, resumed with LoRA": (
        "whole",
        {"lora": True},
        None,
        r"checkpoint-4 holds a whole Qwen2ForCausalLM, but this run trains an adapter on .*peft_config",
    ),
    "whole model, resumed with LoRA and a moving reference": (
        "whole",
        {"lora": True, **MOVING},
        None,
        r"holds a whole Qwen2ForCausalLM, but this run trains an adapter",
    ),
    "adapter, resumed with a whole model": (
        "adapter",
        {},
        None,
        r"checkpoint-4 holds an adapter on Qwen2ForCausalLM, but this run trains a whole Qwen2ForCausalLM",
    ),
    "another architecture": (
        "whole",
        {},
        another_model,
        r"checkpoint-4 holds a whole Qwen2ForCausalLM, but this run trains a whole Qwen3MoeForCausalLM\. Give",
    ),
    "an adapter on another architecture": (
        "adapter",
        {"lora": True},
        another_model,
        r"holds an adapter on Qwen2ForCausalLM, but this run trains an adapter on Qwen3MoeForCausalLM\. Give",
    ),
    "another size": (
        "whole",
        {},
        more_layers,
        r"lacks 12 of the model's 39 tensors, for example model\.layers\.2\..*: it is of a Qwen2ForCausalLM with",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_another_model_is_refused_for_what_it_is(
    models: dict[str, Path], tmp_path: Path, runs: dict[str, Path], case: str
) -> None:
    kind, options, other, message = CASES[case]
    model = other(models, tmp_path) if other else models["dense"]
    trainer = tiny.trainer(model, tmp_path, **options)
    before = tiny.parameters(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(runs[kind]))
    assert trainer.state.global_step == 0
    if case != "another size":  # which torch has loaded in part by then
        assert resumable.differences(before, tiny.parameters(trainer)) == []


@pytest.mark.parametrize(
    ("files", "is_adapter"),
    [
        ({"whole": ".", "adapter": "another"}, False),
        ({"whole": ".", "adapter": "."}, True),
        ({"adapter": "another"}, True),
    ],
)
def test_an_adapter_in_a_folder_counts_if_nothing_else_is_there(
    models: dict[str, Path], tmp_path: Path, runs: dict[str, Path], files: dict[str, str], is_adapter: bool
) -> None:
    names = {"whole": "config.json", "adapter": "adapter_config.json"}
    for kind, folder in files.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copy(runs[kind] / names[kind], tmp_path / folder)
    model: Any = tiny.trainer(models["dense"], tmp_path, lora=is_adapter).model
    other: Any = tiny.trainer(models["dense"], tmp_path, lora=not is_adapter).model
    refuse_another_model(tmp_path, model)
    with pytest.raises(ValueError, match="holds an adapter" if is_adapter else "holds a whole "):
        refuse_another_model(tmp_path, other)


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.generation_config.eos_token_id = tiny.SIZES["eos_token_id"]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("loaded", [True, False])
def test_the_names_that_a_file_lacks_are_known_before(tmp_path: Path, name: str, loaded: bool) -> None:
    """Of a model from disk and of one from its config."""
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    if loaded:
        model = transformers.AutoModelForCausalLM.from_pretrained(saved(name, tmp_path / "model"))
    expected = model.state_dict().keys()
    model.save_pretrained(tmp_path / "saved")
    found = load_names(tmp_path / "saved")
    tied = {"lm_head.weight"} if name == "tied" else set()
    assert set(saved_otherwise(model)) == expected - found - tied
    assert bool(saved_otherwise(model)) == (name not in ("dense", "tied", "gpt_oss"))


def load_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_best_model_that_could_not_be_loaded_is_refused_when_the_trainer_is_built(tmp_path: Path, name: str) -> None:
    folder = saved(name, tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"load_best_model_at_end=True cannot .*experts.*load_best_model_at_end=False"
    ):
        tiny.trainer(folder, tmp_path, **BEST)


@pytest.mark.parametrize(("name", "lora"), [("qwen3_moe", True), ("gpt_oss", False), ("dense", False)])
def test_a_best_model_that_can_be_loaded_is(tmp_path: Path, name: str, lora: bool) -> None:
    trainer = tiny.train(tiny.trainer(saved(name, tmp_path / "model"), tmp_path, lora=lora, **BEST))
    again = tiny.trainer(tmp_path / "model", tmp_path, lora=lora, **BEST)
    again._load_from_checkpoint(trainer.state.best_model_checkpoint)
    assert resumable.differences(tiny.parameters(again), tiny.parameters(trainer)) == []


def test_the_way_out_finds_the_best_checkpoint(tmp_path: Path) -> None:
    """As the error says: without loading at the end, from the folder that the state names."""
    folder = saved("qwen3_moe", tmp_path / "model")
    trainer = tiny.train(tiny.trainer(folder, tmp_path, **{**BEST, "load_best_model_at_end": False}))
    best = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert best.state_dict().keys() == trainer.model.state_dict().keys()


def test_a_whole_mixture_cannot_be_resumed_and_says_why(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    tiny.train(tiny.trainer(folder, tmp_path, **SAVING))
    again = tiny.trainer(folder, tmp_path, **SAVING)
    with pytest.raises(ValueError, match=r"lacks 4 of the model's 25 tensors, .*: transformers saves models of this"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
