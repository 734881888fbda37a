"""An optimizer that a script gives: one that holds none of the trained weights would leave them as they are."""

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
    with pytest.raises(ValueError, match=r"optimizers=\(AdamW, ...\) has none of the 8 weights .*get_peft_model"):
        build(tmp_path, model, model.parameters(), peft_config=LoraConfig(**tiny.LORA))


def test_an_optimizer_of_another_copy_is_refused(
    model: PreTrainedModel, models: dict[str, Path], tmp_path: Path
) -> None:
    """A path as the model makes the trainer load its own."""
    with pytest.raises(ValueError, match="none of the"):
        build(tmp_path, str(models["dense"]), model.parameters())


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
