"""NF4 and int8 bases with LoRA on CPU: they train, their bytes stay, and an evaluation does not end the learning."""

import contextlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig

from tests.tools import tiny
from tests.tools.headroom import within
from tests.tools.wide import BASES, load


@pytest.mark.parametrize("base", BASES)
def test_gradients_flow_after_an_evaluation_on_cpu(wide: Path, tmp_path: Path, base: str) -> None:
    """And a model that bitsandbytes has packed before is refused. When that gradient is not gone, the guard can go."""

    def input_gradient(model: Any) -> torch.Tensor:
        """What a training forward passes down to the embeddings."""
        model.train()
        embeddings = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model(inputs_embeds=embeddings).logits.square().sum().backward()
        assert embeddings.grad is not None
        return embeddings.grad

    def error_after_an_evaluation(model: Any) -> float:
        model.eval()
        with torch.no_grad():
            model(torch.arange(40, 48).unsqueeze(0))
        with model.disable_adapter() if isinstance(model, peft.PeftModel) else contextlib.nullcontext():
            return ((input_gradient(model) - expected).norm() / expected.norm()).item()

    model = load(wide, base)
    if base == "nf4" and not any(getattr(own, "support_avx512bf16_for_cpu", False) for own in model.modules()):
        pytest.skip("this CPU has no AVX512-BF16, so that bitsandbytes never packs")
    expected = input_gradient(model)
    trainer = tiny.trainer(model, tmp_path, lora=True, loss_type="gspo")
    assert within(error_after_an_evaluation(trainer.model), 1e-5)
    if base == "nf4":
        packed = load(wide, "nf4")
        assert error_after_an_evaluation(packed) > 0.5  # what the residual stream passes is left
        with pytest.raises(ValueError, match=r"repacked the 4-bit weights of .*q_proj.*Load the model again"):
            tiny.trainer(packed, tmp_path, lora=True, loss_type="gspo")


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_loaded_adapter_is_not_rounded_if_asked(wide: Path, tmp_path: Path, dtype: str | None) -> None:
    peft.get_peft_model(load(wide, "nf4"), LoraConfig(**tiny.LORA)).save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(load(wide, "nf4"), tmp_path / "adapter", is_trainable=True)
    before = trained(model)
    trainer = tiny.trainer(model, tmp_path, adapter_dtype=dtype)
    after = trained(trainer.model)
    assert before.keys() == after.keys() and len(before) == 8
    assert all(torch.equal(after[name], before[name]) == (dtype == "float32") for name in before)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("dtype", "moved"), [(None, 0.05), ("float32", 1.0)])
def test_a_learning_rate_of_1e_6_is_lost_on_bf16_adapters(
    wide: Path, tmp_path: Path, dtype: str | None, moved: float
) -> None:
    """DeepSeekMath's rate, ten updates: the share of the entries that are not where they were."""
    options = {"learning_rate": 1e-6, "max_steps": 10, "adapter_dtype": dtype}
    rounds = r"learning_rate=1e-06 is lost to rounding on 9\d.\d% .*adapter_dtype='float32'"
    with contextlib.nullcontext() if dtype else pytest.warns(UserWarning, match=rounds):
        trainer = tiny.trainer(load(wide, "nf4"), tmp_path, lora=True, **options)
    before = trained(trainer.model)
    trainer.train()
    after = trained(trainer.model)
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    entries = sum(value.numel() for value in before.values())
    assert changed / entries <= moved and (dtype is None or changed / entries > 0.95)


def test_adapter_dtype_without_an_adapter_is_refused(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter_dtype='float32' needs an adapter.*give peft_config"):
        tiny.trainer(wide, tmp_path, adapter_dtype="float32")
