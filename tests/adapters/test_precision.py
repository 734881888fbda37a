"""What TRL casts for continuous batching comes back bit for bit where the precision is ours to keep."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig

from tests.tools import tiny
from trl_steady.adapters.precision import cast_undone

BATCHED: dict[str, Any] = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
    "bf16": True,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 4,  # a generation falls into the middle of an optimizer step
    "max_steps": 2,
}
MOVING = {"sync_ref_model": True, "beta": 0.04}
HEAD = LoraConfig(**tiny.LORA, modules_to_save=["lm_head"])
KINDS: dict[str, dict[str, Any]] = {
    "adapter and its reference": {"lora": True, "adapter_dtype": "float32", **MOVING},
    "adapter and a head in float32": {
        "build": {"peft_config": HEAD},
        "adapter_dtype": "float32",
        "cast_lm_head_to_fp32": True,
        **MOVING,
    },
    "full model with a moving reference": MOVING,
}


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cast_to_generate_comes_back_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before old log-probs are computed; the optimizer's parameters are still the model's."""
    seen: list[bool] = []
    original = trl.GRPOTrainer._generate_single_turn

    def generate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = original(self, *arguments, **keywords)
        seen.append(any(p.dtype == torch.bfloat16 for p in self.model.parameters()))  # or nothing is shown
        return output

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", generate)
    trainer: Any = tiny.trainer(models["dense"], tmp_path, **{**BATCHED, **KINDS[kind]})
    ours, compared = trainer.generate, []

    def compare(*arguments: Any, **keywords: Any) -> Any:
        before = tensors(trainer.model)
        output = ours(*arguments, **keywords)
        after = tensors(trainer.model)
        assert after.keys() == before.keys()
        compared.append([n for n, t in before.items() if t.dtype != after[n].dtype or not torch.equal(t, after[n])])
        return output

    monkeypatch.setattr(trainer, "generate", compare)
    trainer.train()
    assert seen == [True] * 4 and compared == [[]] * 4
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trained = {id(p) for p in trainer.model.parameters() if p.requires_grad}
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == trained
    assert all(state["exp_avg"].dtype == torch.float32 for state in trainer.optimizer.state.values())


def test_a_gradient_comes_back_with_its_parameter() -> None:
    model = torch.nn.Linear(2, 2)
    model(torch.full((1, 2), 0.1)).sum().backward()
    before = tensors(model)
    with cast_undone(model):
        model.to(torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
