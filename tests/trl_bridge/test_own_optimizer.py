"""An optimizer that a script gives: one that holds frozen weights only would change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tools import tiny


def build(folder: Path, model: Any, weights: Any, **keywords: Any) -> Any:
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    return tiny.trainer(model, folder, max_steps=1, build={"optimizers": (optimizer, None), **keywords})


@pytest.fixture
def model(models: dict[str, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(models["dense"])


def test_an_optimizer_made_before_peft_wraps_the_model_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"optimizers=\(AdamW, ...\) has frozen weights only, and none of the 8 that .*get_peft_model"
    ):
        build(tmp_path, model, model.parameters(), peft_config=LoraConfig(**tiny.LORA))


def test_an_optimizer_with_copies_of_the_weights_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    """Such as one that keeps them on the CPU, or in another precision."""
    copies = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    trainer = build(tmp_path, model, copies, peft_config=LoraConfig(**tiny.LORA))
    assert trainer.optimizer is not None


def test_an_optimizer_of_the_adapter_or_of_some_weights_trains_them(model: PreTrainedModel, tmp_path: Path) -> None:
    some = [*model.model.layers[0].parameters()]
    before = [weight.detach().clone() for weight in some]
    build(tmp_path / "some", model, some).train()
    assert any(not torch.equal(old, weight) for old, weight in zip(before, some, strict=True))
    wrapped = get_peft_model(model, LoraConfig(**tiny.LORA))
    adapter = [weight for weight in wrapped.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in adapter]
    build(tmp_path / "adapter", wrapped, adapter).train()
    assert any(not torch.equal(old, weight) for old, weight in zip(before, adapter, strict=True))
