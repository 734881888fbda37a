"""The critic's backward pass runs before the policy's forward, so that one graph is in memory at a time."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import trl_steady
from tests.features.critic import tools as critics
from tests.features.critic.tools import KINDS, build, critic_parameters, policy_parameters
from tests.tools import tiny
from trl_steady.features.critic.feature import Critic
from trl_steady.features.scalar_head import model as critic_model

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
BUDGET = {"token_budget": 30, "gradient_accumulation_steps": 2}


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("lora", CHECKPOINTING), ("lora", BUDGET), ("full", {}), ("full", BUDGET), ("nf4", {})],
    ids=str,
)
def test_the_critics_graph_is_gone_when_the_policys_forward_begins(
    model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    of_critic = weakref.WeakSet[Saved]()
    saved: list[int] = []
    left: list[tuple[int, bool]] = []

    def keep(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        of_critic.add(kept)
        return kept

    class Watched(trl_steady.PPOTrainer):
        def values(self, *arguments: Any, **keywords: Any) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
                values = super().values(*arguments, **keywords)
            if torch.is_grad_enabled():
                saved.append(len(of_critic))
            return values

        def _policy_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
            gc.collect()
            gradients = critics.gradients(critic_parameters(self))
            left.append((len(of_critic), any(gradient.any() for gradient in gradients.values())))
            return super()._policy_loss(*arguments, **keywords)

    monkeypatch.setattr(trl_steady, "PPOTrainer", Watched)
    build(model_of(kind), tmp_path, known=True, max_steps=2, **KINDS[kind], **options).train()
    assert len(left) == len(saved) > 1 and min(saved) > 5
    assert left == [(0, True)] * len(left)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_loss_that_a_script_changes_changes_the_critics_too(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its backward pass then has both graphs, as that of a loss outside of a training step."""

    class Halved(trl_steady.PPOTrainer):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
            return 0.5 * super().compute_loss(*arguments, **keywords)

    found: list[dict[str, Tensor]] = []
    policies: list[dict[str, Tensor]] = []
    for kind_of_trainer in (trl_steady.PPOTrainer, Halved):
        monkeypatch.setattr(trl_steady, "PPOTrainer", kind_of_trainer)
        trainer = build(models["dense"], tmp_path, known=True, **KINDS[kind])
        trainer.feature(Critic).on_train_begin()
        inputs = trainer._generate_and_score_completions(critics.rows())
        trainer.current_gradient_accumulation_steps = 1
        with trainer.until_backward():
            trainer.compute_loss(trainer.model, inputs).backward()
        found.append(critics.gradients(critic_parameters(trainer)))
        policies.append(critics.gradients(policy_parameters(trainer)))
    assert any(gradient.any() for gradient in found[0].values())
    for whole, half in (found, policies):
        assert critics.same({name: 0.5 * gradient for name, gradient in whole.items()}, half)  # exact in binary


def test_a_loss_outside_of_a_training_step_leaves_no_gradient(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = build(models["dense"], tmp_path, known=True, lora=True)
    trainer.feature(Critic).on_train_begin()
    inputs = trainer._generate_and_score_completions(critics.rows())
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    assert not any(gradient.any() for gradient in critics.gradients(critic_parameters(trainer)).values())
    loss.backward()
    assert any(gradient.any() for gradient in critics.gradients(critic_parameters(trainer)).values())


@pytest.mark.parametrize(
    ("more", "in_place"),
    [({}, True), ({"lora_dropout": 0.25}, False), ({"use_dora": True, "init_lora_weights": True}, False)],
    ids=str,
)
def test_an_adapter_reads_its_input_in_place_and_computes_what_pefts_would(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], in_place: bool
) -> None:
    """PEFT copies the input of a float32 adapter in float32. Autocast makes another copy of that, for backward."""
    configs = {"peft_config": LoraConfig(**tiny.LORA), "value_peft_config": LoraConfig(**{**tiny.LORA, **more})}
    options = {"model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": False}
    values: list[Tensor] = []
    updates: list[dict[str, Tensor]] = []
    held: list[int] = []
    for is_ours in (True, False):
        if not is_ours:
            monkeypatch.setattr(critic_model, "_is_linear", lambda *_: False)
        trainer = build(models["dense"], tmp_path, known=True, build=configs, **options)
        trainer.feature(Critic).on_train_begin()
        inputs = trainer._generate_and_score_completions(critics.rows())
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        torch.manual_seed(0)  # of dropout
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu"):
            values.append(trainer.values(trainer.critic, inputs))
        values[-1].sum().backward()
        updates.append(critics.gradients(critic_parameters(trainer)))
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    assert torch.equal(*values) and critics.same(*updates)
    assert (held[0] < held[1]) == in_place
