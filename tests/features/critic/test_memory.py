"""The critic's backward pass runs before the policy's forward, so that one graph is in memory at a time."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_steady
from tests.features.critic import tools as critics
from tests.features.critic.tools import KINDS, build, critic_parameters, policy_parameters
from trl_steady.features.critic.feature import Critic

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
