"""Checkpoints of another model than the trainer's, and models that transformers saves under other names."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tools import resumable, tiny
from tests.trainers import images

llava = images.llava

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
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "tied": transformers.Qwen2Config(**tiny.SIZES, tie_word_embeddings=True),
    "qwen3_moe": tiny.CONFIGS["moe"],
    "mixtral": transformers.MixtralConfig(**tiny.SIZES, **EXPERTS),
    "gpt_oss": transformers.GptOssConfig(
        **tiny.SIZES, **EXPERTS, head_dim=8, layer_types=["full_attention", "full_attention"]
    ),
}


@pytest.fixture(scope="module")
def whole(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a whole dense model."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.train(tiny.trainer(models["dense"], folder, **SAVING))
    return folder / "checkpoint-4"


def more_layers(models: dict[str, Path]) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**tiny.SIZES, "num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        pytest.param(
            lambda models: models["dense"],
            True,
            r"lacks \d+ of the model's \d+ tensors, .*peft_config",
            id="with LoRA",
        ),
        pytest.param(
            lambda models: models["moe"], False, r"lacks \d+ of the model's \d+ tensors", id="another architecture"
        ),
        pytest.param(
            more_layers,
            False,
            r"lacks 12 of the model's 39 tensors, for example model\.layers\.2\.",
            id="another size",
        ),
    ],
)
def test_a_checkpoint_without_tensors_of_the_model_is_refused(
    models: dict[str, Path], tmp_path: Path, whole: Path, model: Callable[..., Any], lora: bool, message: str
) -> None:
    trainer = tiny.trainer(model(models), tmp_path, lora=lora)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(whole))
    assert trainer.state.global_step == 0


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.generation_config.eos_token_id = tiny.SIZES["eos_token_id"]
    model.save_pretrained(folder)
    return folder


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("name", "lora"), [("qwen3_moe", True), ("gpt_oss", False), ("tied", False)])
def test_a_best_model_that_can_be_loaded_is(tmp_path: Path, name: str, lora: bool) -> None:
    trainer = tiny.train(tiny.trainer(saved(name, tmp_path / "model"), tmp_path, lora=lora, **BEST))
    again = tiny.trainer(tmp_path / "model", tmp_path, lora=lora, **BEST)
    again._load_from_checkpoint(trainer.state.best_model_checkpoint)
    assert resumable.differences(tiny.parameters(again), tiny.parameters(trainer)) == []


RESUMED: dict[str, Any] = {"padded": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def resumed_as_whole(build: Callable[[], Any], checkpoint: Path) -> None:
    """A resumed run ends as the run that was never stopped, and keeps its parameters, which the optimizer knows."""
    whole, resumed = tiny.train(build()), build()
    before = list(resumed.model.parameters())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumable.differences(tiny.parameters(whole), tiny.parameters(resumed)) == []
    assert all(one is other for one, other in zip(before, resumed.model.parameters(), strict=True))


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "tied"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["one file", "several files"])
@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "made"])
def test_a_whole_model_resumes_exactly_that_is_saved_under_other_names(
    tmp_path: Path, name: str, is_sharded: bool, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name, tmp_path / "model")
    if is_sharded:
        save = functools.partialmethod(transformers.PreTrainedModel.save_pretrained, max_shard_size="8KB")
        monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "save_pretrained", save)
        monkeypatch.setattr(transformers.MixtralForCausalLM, "save_pretrained", save)

    def build() -> Any:
        model: Any = folder
        if not is_loaded:
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
            model.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
            model.generation_config.eos_token_id = tiny.SIZES["eos_token_id"]
        return tiny.trainer(model, tmp_path, **RESUMED)

    resumed_as_whole(build, tmp_path / "checkpoint-2")
    files = list((tmp_path / "checkpoint-4").glob("model*.safetensors"))
    assert (len(files) > 1) == (is_sharded and name in ("qwen3_moe", "mixtral"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    whole = build()
    whole._load_from_checkpoint(str(tmp_path / "checkpoint-6"))
    assert resumable.differences(dict(again.named_parameters()), dict(whole.model.named_parameters())) == []


def test_a_whole_model_that_reads_images_resumes_exactly(llava: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = llava
    data = {"train_dataset": images.pictures(16), "processing_class": processor}
    options = {**RESUMED, "gradient_checkpointing": False, "build": data}
    resumed_as_whole(lambda: tiny.trainer(folder, tmp_path, **options), tmp_path / "checkpoint-2")


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_best_whole_mixture_is_loaded(tmp_path: Path, name: str) -> None:
    options = {**BEST, "greater_is_better": False}
    trainer = tiny.train(tiny.trainer(saved(name, tmp_path / "model"), tmp_path, **options))
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")  # not the last
    best = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert resumable.differences(tiny.parameters(trainer), dict(best.named_parameters())) == []


def test_a_mixture_of_another_size_is_refused(tmp_path: Path) -> None:
    """Its tensors have the same names."""
    tiny.train(tiny.trainer(saved("qwen3_moe", tmp_path / "model"), tmp_path, **RESUMED))
    wider = transformers.Qwen3MoeConfig(**{**CONFIGS["qwen3_moe"].to_dict(), "moe_intermediate_size": 8})
    trainer = tiny.trainer(transformers.Qwen3MoeForCausalLM(wider), tmp_path, **RESUMED)
    with pytest.raises(ValueError, match=r"holds model\.layers\..*experts.* of shape .*, and the model's is "):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        (["config.json", "another/adapter_config.json"], True),
        (["config.json", "adapter_config.json"], False),
        (["another/adapter_config.json"], False),
    ],
)
def test_a_checkpoint_of_a_whole_model_is_not_taken_for_one_of_an_adapter(
    models: dict[str, Path], tmp_path: Path, files: list[str], is_whole: bool
) -> None:
    """DeepSpeed and FSDP would load nothing. The reverse is an error of theirs, and of transformers."""
    (tmp_path / "another").mkdir()
    trainer = tiny.trainer(models["dense"], tmp_path, lora=True)
    for file in files:
        (tmp_path / file).touch()
        if file == "adapter_config.json":
            trainer.model.peft_config["default"].save_pretrained(str(tmp_path))
    refused = pytest.raises(ValueError, match=r"holds a whole model, and this run trains an adapter.*peft_config")
    with refused if is_whole else contextlib.nullcontext():
        trainer.checkpoints.load(tmp_path)
