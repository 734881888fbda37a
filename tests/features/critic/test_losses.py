"""The losses of policy and critic, their gradients, and the updates of an optimizer step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel

from tests.features.critic import tools as critics
from tests.features.critic.tools import KINDS, Samples, Twin, build, critic_parameters, policy_parameters, snapshot
from tests.tools import tiny
from tests.tools.headroom import within
from trl_steady.features.critic.construction import build_adapter_model
from trl_steady.features.critic.feature import Critic

TOKEN_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def micro_batch(trainer: Any, window: int = 1, count: int = len(critics.ANSWERS)) -> Samples:
    """Known answers, scored by models that have moved since."""
    trainer.feature(Critic).on_train_begin()
    samples = trainer._generate_and_score_completions(critics.rows(count))
    critics.stir(trainer, seed=1, by=0.05)
    trainer.current_gradient_accumulation_steps = window
    return samples


def backward(trainer: Any, inputs: Samples) -> Tensor:
    """Run a micro-batch as `training_step` does, with layers that are recomputed where the option asks for it."""
    with trainer.until_backward():
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    return loss.detach()


# The policy


@pytest.mark.parametrize(("kind", "loss_type"), [*(("lora", name) for name in TOKEN_LOSSES), ("full", "dapo")])
def test_loss_and_gradient_of_the_policy_are_trls(
    models: dict[str, Path], tmp_path: Path, loss_type: str, kind: str
) -> None:
    """Bit for bit: TRL's loss gets the critic's advantages, and the critic adds nothing to the gradient."""
    options = {"loss_type": loss_type, "epsilon": 0.2, **KINDS[kind]}
    if loss_type != "vespo":
        options.update(beta=0.1, kl_coef=0.0)
    trainer = build(models["dense"], tmp_path, known=True, trim_padding=False, **options)
    inputs = micro_batch(trainer, window=2)
    found, of_policy = [], trainer._compute_loss
    trainer._compute_loss = lambda *arguments: found.append(of_policy(*arguments)) or found[-1]
    backward(trainer, inputs)

    options.pop("kl_coef", None)
    theirs = tiny.trainer(models["dense"], tmp_path, ours=False, **options)
    own = policy_parameters(trainer)
    theirs.model.load_state_dict({**theirs.model.state_dict(), **snapshot(own)})
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = 2
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert torch.equal(found[0], expected) and found[0] != 0
    after = critics.gradients(own)
    assert critics.same(after, critics.gradients(dict(theirs.model.named_parameters())))
    assert any(each.any() for each in after.values())
    assert inputs["advantages"].shape == inputs["completion_ids"].shape


# The critic


@pytest.mark.parametrize(
    ("kind", "loss_type", "cliprange"),
    [
        *(("lora", name, 0.2) for name in (*TOKEN_LOSSES, "gspo_token")),
        *(("lora", "grpo", None), ("full", "grpo", 0.2), ("full", "dapo", None)),
    ],
)
def test_value_loss_and_its_gradient_are_the_oracles(
    models: dict[str, Path], tmp_path: Path, kind: str, loss_type: str, cliprange: float | None
) -> None:
    """Answers without a reward have returns that are NaN, and no loss."""
    options = {"loss_type": loss_type, "cliprange_value": cliprange, **KINDS[kind]}
    trainer = build(models["dense"], tmp_path, exact=True, known=True, **options)
    inputs = micro_batch(trainer, window=2)
    assert inputs["returns"].isnan().any()
    trainer._compute_loss = lambda model, inputs: torch.zeros((), dtype=torch.float64)
    loss = backward(trainer, inputs)
    expected, of_parameters, flat = critics.by_hand(
        Twin(trainer), inputs, critics.token_weights(inputs, loss_type, 2, trainer.args), cliprange
    )
    # in float64, but for the norms, which transformers computes in float32 for any dtype
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    own = critics.gradients(critic_parameters(trainer))
    assert within(critics.distance(own, of_parameters), 5e-6)
    assert sum(each.any() for each in own.values()) > len(own) / 2
    if cliprange is not None:
        assert 0 < flat.sum() < critics.loss_mask(inputs).sum()


def test_a_module_of_the_adapters_name_stays_the_policys() -> None:
    """BERT's attention has a projection `value`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bare = BertLMHeadModel(BertConfig(**sizes, vocab_size=20, is_decoder=True))
    policy = get_peft_model(bare, LoraConfig(target_modules=["query", "value"]))
    before = {name for name, own in policy.named_parameters() if own.requires_grad}
    critic = build_adapter_model(policy, None)
    added = {name.replace(".default.", ".value.") for name in before}
    own = {f"base_model.model.bert.{name}" for name, _ in critic.named_parameters() if name != "score.weight"}
    assert own == added and len(own) == 4
    assert {name for name, own in policy.named_parameters() if own.requires_grad} == before
