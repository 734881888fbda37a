"""What a step keeps alive: no more than it will read again."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

import trl_steady
from tests.tools import tiny
from trl_steady.features.router_replay.replay import Replay


def test_a_micro_batch_by_tokens_gives_up_its_routes_after_its_backward(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[weakref.ref[Replay]] = []
    alive: list[int] = []
    build = Replay.__init__

    def remember(replay: Replay, *arguments: Any, **keywords: Any) -> None:
        build(replay, *arguments, **keywords)
        replays.append(weakref.ref(replay))

    class Counting(trl_steady.GRPOTrainer):
        def _policy_loss(self, *arguments: Any, **keywords: Any) -> Any:
            gc.collect()
            alive.append(sum(replay() is not None for replay in replays))
            return super()._policy_loss(*arguments, **keywords)

    monkeypatch.setattr(Replay, "__init__", remember)
    monkeypatch.setattr(trl_steady, "GRPOTrainer", Counting)
    options: dict[str, Any] = {"router_replay": "R2", "num_iterations": 2, "router_aux_loss_coef": 0.0}
    trainer = tiny.trainer(models["moe"], tmp_path, token_budget=20, max_steps=1, **options)
    trainer.train()
    assert len(alive) > 2 and alive == [0] * len(alive)
