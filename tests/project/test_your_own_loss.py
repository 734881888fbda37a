"""The code of docs/your-own-loss.md does what the page says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import training_args

import trl_steady
from tests.project.code_blocks import blocks, run
from tests.tools import tiny
from tests.tools.batches import Batch, Evaluate, random_batch
from trl_steady.losses import LOSSES

ADVANTAGES, SUBCLASS, ENTRY = (block for block in blocks("docs/your-own-loss.md") if block.language == "python")
EPSILON = 0.2


@pytest.fixture
def entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The globals of the page's second block, whose loss is in the table during the test."""
    monkeypatch.chdir(tmp_path)
    # bf16 is TRL's default, and transformers wants a GPU for it; no model runs here
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setitem(LOSSES, "spo", None)  # so that it is deleted afterwards
    return run(ENTRY)


def by_hand(batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss and gradient of SPO, token by token: with r' = r, the derivative is -r A + |A| / epsilon (r - 1) r."""
    loss, gradient = 0.0, torch.zeros_like(batch.logps)
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            ratio = (batch.logps[i, t] - batch.old_logps[i, t]).exp().item()
            own = (batch.advantages[i] if batch.advantages.dim() == 1 else batch.advantages[i, t]).item()
            share = 1 / (len(batch.mask) * length)
            loss -= share * (ratio * own - abs(own) / (2 * EPSILON) * (ratio - 1) ** 2)
            gradient[i, t] = -share * ratio * (own - abs(own) / EPSILON * (ratio - 1))
    return loss, gradient


def right(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def test_short_right_answers_get_a_bonus(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Seen(run(ADVANTAGES)["ShortAndRight"]):
        def advantages(self, rollout: Any) -> Any:
            seen[:] = rollout, rollout.advantages.clone()
            return super().advantages(rollout)

    monkeypatch.setattr(trl_steady, "GRPOTrainer", Seen)
    tiny.train(tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": right}, max_steps=1))
    rollout, before = seen
    by_answer = zip(rollout.is_sampled.tolist(), rollout.rewards.tolist(), strict=True)
    bonus = torch.tensor([0.2 / sum(mask) if reward else 0.0 for mask, reward in by_answer])
    assert before.any() and 0 < bonus.count_nonzero() < len(bonus)
    torch.testing.assert_close(rollout.advantages, before + bonus)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_the_subclass_halves_negative_advantages_under_any_loss(
    evaluate: Evaluate, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(spread=0.1)  # most ratios are inside the clip range
    halved = batch._replace(advantages=torch.where(batch.advantages > 0, batch.advantages, batch.advantages / 2))
    as_is, expected = (evaluate(each, loss_type=loss_type) for each in (batch, halved))
    monkeypatch.setattr(trl_steady, "GRPOTrainer", run(SUBCLASS)["Gentle"])
    found = evaluate(batch, loss_type=loss_type)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.grad, expected.grad)
    assert not torch.allclose(found.grad, as_is.grad)


@pytest.mark.usefixtures("entered")
@pytest.mark.parametrize("per_token", [False, True])
def test_the_entry_is_spo_by_hand(evaluate: Evaluate, per_token: bool) -> None:
    batch = random_batch(per_token=per_token)
    found = evaluate(batch, loss_type="spo", epsilon=EPSILON, epsilon_high=None)
    loss, gradient = by_hand(batch)
    assert found.loss.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found.grad, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("entered")
def test_the_entry_has_trl_kl_and_our_masks(evaluate: Evaluate) -> None:
    batch = random_batch()
    options = {"loss_type": "spo", "epsilon": EPSILON, "epsilon_high": None}
    ref = {"ref_per_token_logps": batch.old_logps - 0.1}
    loss, gradient = by_hand(batch)
    grpo, without = (evaluate(batch, loss_type="grpo", beta=beta, inputs=ref) for beta in (0.5, 0.0))
    found = evaluate(batch, **options, beta=0.5, inputs=ref)
    assert found.loss.item() == pytest.approx(loss + (grpo.loss - without.loss).item(), rel=1e-12)
    torch.testing.assert_close(found.grad, gradient + grpo.grad - without.grad, rtol=1e-12, atol=1e-14)
    masked = evaluate(batch, **options, off_policy_mask_threshold=0.0)
    statistic = ((batch.old_logps - batch.logps) * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
    is_dropped = (batch.advantages < 0) & (statistic > 0)
    assert 0 < is_dropped.sum() < len(is_dropped)
    torch.testing.assert_close(masked.grad, gradient * ~is_dropped[:, None], rtol=1e-12, atol=1e-14)


def test_the_entry_trains_packed_with_a_budget(
    entered: dict[str, Any], models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entered["args"].epsilon == EPSILON and not entered["args"].is_on_policy
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, loss_type="spo", token_budget=200))
    assert trained.state.global_step == 6
    printed = capsys.readouterr().out
    assert "on: SPO: loss_type='spo'" in printed
    own = tiny.parameters(trained)
    grpo = tiny.parameters(tiny.train(tiny.trainer(models["dense"], tmp_path, loss_type="grpo", token_budget=200)))
    assert all(value.isfinite().all() for value in own.values())
    assert any(not torch.equal(value, grpo[name]) for name, value in own.items())


def test_a_loss_that_is_not_in_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss_type='spo'"):
        trl_steady.GRPOConfig(str(tmp_path), loss_type="spo", bf16=False)
