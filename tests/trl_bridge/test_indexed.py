"""Each row of a batch goes through the model once and in order, or what is known of its tokens would be another's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

from tests.tools import tiny
from trl_steady.trl_bridge.log_probs import IndexedModel

ROWS, WIDTH = 5, 3
INDICES = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
TRLS = trl.GRPOTrainer._get_per_token_logps_and_entropies


def test_parts_get_the_indices_of_their_rows() -> None:
    model = IndexedModel(lambda *, input_ids, token_indices: token_indices, INDICES)
    parts = [model(input_ids=torch.zeros(rows, WIDTH)) for rows in (2, 2, 1)]
    model.refuse_rest()
    assert torch.equal(torch.cat(parts), INDICES)


def without_the_last(
    self: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, *others: Any, **options: Any
) -> Any:
    scores = TRLS(self, model, input_ids[:-1], attention_mask[:-1], *others, **options)
    return tuple(None if each is None else torch.cat([each, each[-1:]]) for each in scores)


def twice(self: Any, model: Any, *others: Any, **options: Any) -> Any:
    TRLS(self, model, *others, **options)
    return TRLS(self, model, *others, **options)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("options", [{}, {"trim_padding": False}, {"token_budget": 40}], ids=str)
@pytest.mark.parametrize("scoring", [without_the_last, twice])
def test_scoring_that_skips_or_repeats_rows_is_refused(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scoring: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, keep_sampling_mask=True, top_k=5, max_steps=1, **options)
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", scoring)
    with pytest.raises(RuntimeError, match="need each row once and in order"):
        trainer.train()
