"""Values that a part's model returns for each token travel like log-probs, through packing, cutting and budgets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_steady
from tests.tools import tiny
from trl_steady.host import MicroBatch, Part
from trl_steady.host.names import overridden


class NextToken:
    """A proxy whose value for a token is the token, so that a misplaced value is seen."""

    needs_places = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *, input_ids: Tensor, places: Tensor, **batch: Any) -> Any:
        outputs = self._model(input_ids=input_ids, places=places, **batch)
        extras = {"token": input_ids[:, 1:].float(), "place": places[:, 1:].float()}
        known = {name: getattr(outputs, name, None) for name in ("log_probs", "entropy", "aux_loss")}
        return SimpleNamespace(**known, extras=extras)


class TokenPart(Part):
    @contextlib.contextmanager
    def scoring(self, scoring: Any, model: Any) -> Iterator[Any]:
        yield NextToken(model)


class Valued(trl_steady.GRPOTrainer):
    """Ours with one more part, which keeps what it scores."""

    PARTS = (TokenPart, *trl_steady.GRPOTrainer.PARTS)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.batches: list[tuple[MicroBatch, dict[str, Any]]] = []
        super().__init__(*arguments, **keywords)

    def score(self, model: torch.nn.Module, inputs: dict[str, Any]) -> MicroBatch:
        batch = super().score(model, inputs)
        self.batches.append((batch, dict(inputs)))
        return batch


@pytest.mark.parametrize(
    "options",
    [
        {"trim_padding": False},
        {},
        {"share_prompts": True},
        {"token_budget": 40},
        {"token_budget": 40, "share_prompts": True, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_values_of_tokens_reach_the_loss_where_their_tokens_are(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, loss_type="gspo", max_steps=2, beta=0.1, **options)
    trainer = Valued(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())
    trainer.train()
    assert len(trainer.batches) >= 2
    for batch, inputs in trainer.batches:
        assert batch.extras["token"].shape == batch.logps.shape
        expected = inputs["completion_ids"].float()
        assert torch.equal(batch.extras["token"][batch.mask], expected[batch.mask])


def test_values_of_a_pass_that_is_regrouped_come_back_in_order(models: dict[str, Path], tmp_path: Path) -> None:
    """Without a gradient, sequences go through the model in batches of the budget, longest first."""
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, token_budget=20)
    trainer = Valued(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())
    lengths = torch.tensor([2, 6, 1, 5, 3])
    mask = torch.cat([torch.ones(5, 2), (torch.arange(6) < lengths.unsqueeze(1)).float()], dim=1).long()
    ids = torch.arange(40).view(5, 8) % 50
    extras: dict[str, Tensor] = {}
    with torch.no_grad(), overridden(trainer, {"_extras": extras}):
        trainer.log_probs(trainer.model, ids, mask, 6)
    own = mask[:, 2:].bool()
    assert torch.equal(extras["token"][own], ids[:, 2:][own].float())
    assert torch.equal(extras["place"][own], torch.arange(40).view(5, 8)[:, 2:][own].float())


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_no_value_outlives_its_micro_batch(models: dict[str, Path], tmp_path: Path, loss_type: str) -> None:
    """It would keep the graph of its forward. TRL's own loss reads no values."""
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, loss_type=loss_type, max_steps=1)
    trainer = Valued(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())
    trainer.train()
    assert bool(trainer.batches) == (loss_type == "gspo")
    assert not trainer._extras
