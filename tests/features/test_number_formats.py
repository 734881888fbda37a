"""The number formats of engine and trainer: what is printed, warned of, and left for the report."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig

from tests.features.adapters import tools
from tests.features.adapters.tools import LLM
from tests.tools import engines, tiny
from tests.tools import wide as wide_model
from tests.tools.engines import Server
from trl_steady.features.engine_check import different_formats
from trl_steady.report import History, diagnose
from trl_steady.trl_bridge.number_formats import Passes, trainer_format

built = tools.built
mixture, engine, server, over_http = engines.mixture, engines.engine, engines.server, engines.over_http
Built = Callable[..., tuple[Any, LLM]]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def told(trainer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Train, and return the printed lines and the warnings about number formats."""
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trl-steady: engine")]
    return lines, [str(each.message) for each in caught if "the engine computes in" in str(each.message)]


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO"])
def test_two_formats_are_one_line_and_one_warning_with_the_fix(
    built: Built, capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str
) -> None:
    trainer, llm = built(method=method, max_steps=8, engine_check=None, save_strategy="steps", save_steps=4)
    llm.llm_engine.model_config.dtype = BF16
    lines, (warning,) = told(trainer, capsys)
    assert lines == ["trl-steady: engine bfloat16, trainer float32 (weights float32, no autocast)"]
    assert warning.startswith("the engine computes in bfloat16, and the trainer in float32 (weights float32, ")
    assert "a mean k3 of 1e-3 nats per token, and float16 on both sides 3e-5" in warning
    # accelerate refuses fp16 on a CPU
    assert warning.endswith('(docs/corrections.md#one-number-format). Set vllm_engine_kwargs={"dtype": "float32"}.')
    left = json.loads((tmp_path / "checkpoint-8/steady.json").read_text())
    assert left["formats"] == {"engine": "bfloat16", "trainer": "float32", "about": "weights float32, no autocast"}
    assert left["notes"] == [warning]
    (found,) = [each for each in diagnose(History.read(tmp_path))[0] if each.symptom.name == "formats-differ"]
    assert "engine bfloat16, trainer float32" in found.evidence and "the engine to the trainer's dtype" in found.advice


@pytest.mark.parametrize(
    ("dtype", "options", "line"),
    [
        (FP32, {}, "engine float32, trainer float32 (weights float32, no autocast)"),
        # TRL's default
        (BF16, {"bf16": True}, "engine bfloat16, trainer bfloat16 (weights float32, autocast bfloat16)"),
        (
            BF16,
            {"model_init_kwargs": {"dtype": "bfloat16"}},
            "engine bfloat16, trainer bfloat16 (weights bfloat16, no autocast)",
        ),
        # a vLLM that does not say it
        (None, {}, "engine unknown, trainer float32 (weights float32, no autocast)"),
    ],
    ids=["float32", "autocast", "weights", "unknown"],
)
def test_one_format_is_a_line_without_a_warning(
    built: Built, capsys: pytest.CaptureFixture[str], dtype: Any, options: dict[str, Any], line: str
) -> None:
    trainer, llm = built(max_steps=1, engine_check=None, **options)
    if dtype is not None:
        llm.llm_engine.model_config.dtype = dtype
    assert told(trainer, capsys) == ([f"trl-steady: {line}"], [])


def test_each_training_prints_the_line(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = built(max_steps=1)
    assert len(told(trainer, capsys)[0]) == 1 and len(told(trainer, capsys)[0]) == 1


def test_without_an_engine_nothing_is_printed(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(tiny.trainer(models["dense"], tmp_path, max_steps=1), capsys) == ([], [])


@pytest.mark.parametrize(
    ("dtype", "lines", "fix"),
    [
        ("torch.bfloat16", ["engine bfloat16, trainer float32"], "Set --dtype float32 for the server."),
        ("torch.float32", ["engine float32, trainer float32"], ""),
        (None, ["engine unknown, trainer float32"], ""),
    ],
)
def test_a_server_says_its_own(
    server: Server, over_http: Any, capsys: pytest.CaptureFixture[str], dtype: Any, lines: list[str], fix: str
) -> None:
    if dtype is not None:
        server.config = {"model_config": {**server.config["model_config"], "dtype": dtype}}
    printed, caught = told(over_http(max_steps=1), capsys)
    about = "(weights float32, no autocast)"
    assert printed == [f"trl-steady: {line} {about}" for line in lines]
    assert len(caught) == bool(fix) and all(warning.endswith(fix) for warning in caught)


def passes(model: Any, mixed_precision: str = "no") -> Passes:
    """The format of a trainer's passes on a model."""
    accelerator = SimpleNamespace(mixed_precision=mixed_precision, unwrap_model=lambda model, **_: model)
    trainer: Any = SimpleNamespace(model=model, accelerator=accelerator)
    return trainer_format(trainer)


@pytest.mark.parametrize(
    ("computed", "mixed_precision", "dtype"),
    [
        (FP32, "no", "float32"),
        (BF16, "no", "bfloat16"),
        (FP32, "bf16", "bfloat16"),
        (FP32, "fp16", "float16"),
        (FP16, "fp16", "float16"),
        (BF16, "fp16", "bfloat16"),  # the inputs of each product are rounded to it first
    ],
)
def test_of_a_4_bit_base_the_coarser_of_autocast_and_compute_dtype_counts(
    wide: Path, computed: torch.dtype, mixed_precision: str, dtype: str
) -> None:
    """An input that is rounded to the format gives the same product, and one that is rounded more another."""
    nf4 = BitsAndBytesConfig(**{**wide_model.NF4, "bnb_4bit_compute_dtype": computed})
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, quantization_config=nf4, dtype=FP32)
    adapted = get_peft_model(model, LoraConfig(**tiny.LORA)).train()
    found = passes(adapted, mixed_precision)
    assert found.dtype == dtype and found.is_4bit
    assert found.about.startswith(f"4-bit weights computed in {str(computed).removeprefix('torch.')}, ")
    layer = model.model.layers[0].mlp.gate_proj
    hidden = torch.randn(3, layer.in_features)
    autocast = {"no": FP32, "bf16": BF16, "fp16": FP16}[mixed_precision]
    with torch.autocast("cpu", autocast, enabled=mixed_precision != "no"):
        product = layer(hidden)
        assert torch.equal(product, layer(hidden.to(getattr(torch, dtype)).float()))
        assert torch.equal(product, layer(hidden.to(BF16).float())) == (dtype == "bfloat16")


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_of_an_adapter_the_base_counts(wide: Path, dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=dtype)
    adapted = get_peft_model(model, LoraConfig(**tiny.LORA))
    assert {each.dtype for name, each in adapted.named_parameters() if "lora" in name} == {FP32}
    assert passes(adapted).dtype == str(dtype).removeprefix("torch.")


PLAIN = Passes("float32", "weights float32, no autocast")
HALF = Passes("float16", "weights float32, autocast float16")
QUANTISED = Passes("bfloat16", "4-bit weights computed in bfloat16, autocast float16", is_4bit=True)
BOTH = 'fp16=True with vllm_engine_kwargs={"dtype": "float16"}'


@pytest.mark.parametrize(
    ("engine_dtype", "of_trainer", "mode", "fix"),
    [
        ("bfloat16", PLAIN, "colocate", f'Set {BOTH}, or vllm_engine_kwargs={{"dtype": "float32"}}.'),
        ("bfloat16", PLAIN, "server", "Set fp16=True with --dtype float16 for the server, or --dtype float32 for the"),
        ("float16", PLAIN, "colocate", 'Set fp16=True, or vllm_engine_kwargs={"dtype": "float32"}.'),
        ("bfloat16", HALF, "colocate", 'Set vllm_engine_kwargs={"dtype": "float16"}.'),
        ("float16", QUANTISED, "colocate", 'Set fp16=True with bnb_4bit_compute_dtype="float16", or vllm_'),
    ],
)
def test_the_warning_names_both_and_the_settings_that_make_them_one(
    engine_dtype: str, of_trainer: Passes, mode: str, fix: str
) -> None:
    text = different_formats(engine_dtype, of_trainer, mode, can_fp16=True)
    assert f"the engine computes in {engine_dtype}, and the trainer in {of_trainer.dtype}" in text and fix in text
