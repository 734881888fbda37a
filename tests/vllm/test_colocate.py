"""Routes of a vLLM engine in the trainer's process: they are those of the tokens, and what they are good for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.features.router_replay.tools import CLOSE, oracles, rows
from tests.oracles import routes as routed_oracle
from tests.oracles.routes import NONE
from tests.tools import agent, tiny
from tests.vllm import conftest, mixtures
from tests.vllm.tools import Colocated, needs_vllm, shares
from trl_steady.features.router_replay.feature import RouterReplay

pytestmark = needs_vllm


@pytest.mark.supports("router_replay R3", "trim_padding", on="vLLM colocate")
def test_routes_are_those_of_each_token_and_of_the_weights_that_were_sent(
    mixture: Path, tmp_path: Path, colocated: Colocated
) -> None:
    """Three rollouts of four updates each, but for the last."""
    trainer = tiny.train(colocated(mixture, tmp_path, max_steps=9, learning_rate=3e-3))
    assert trainer.feature(RouterReplay).routers(trainer.model).decoder_layers == mixtures.SPARSE
    assert len(trainer.rollouts) == 3 and shares(mixture, trainer) == [1.0, 1.0, 1.0]
    assert max(shares(mixture, trainer, of_weights=0)[1:]) < 0.7  # the weights have moved
    policy, apart = oracles(mixture, trainer), 0
    for _, output in trainer.rollouts:
        found = list(rows(output))
        completions = {len(row.ids) - row.prompt for row in found}
        assert len({row.prompt for row in found}) > 1 and len(completions) > 3 and min(completions) < 40
        for row in found:
            assert row.routes is not None and row.of_padding is not None
            assert (row.routes[-1] == NONE).all() and (row.routes[:-1] != NONE).all()
            assert (row.of_padding == NONE).all()
    for update in trainer.updates:
        now = policy(update.weights)
        for row in update.rows:
            with torch.no_grad():
                forced = routed_oracle.log_probs(now, row.ids, row.prompt, row.routes)
                apart += not torch.allclose(forced, routed_oracle.log_probs(now, row.ids, row.prompt), **CLOSE)
            torch.testing.assert_close(row.values["logps"], forced, **CLOSE)
    assert apart > 20
    history = tiny.history(trainer)
    assert [row["routing/fallback"] for row in history if "routing/fallback" in row] == [0, 0, 0]
    assert history[0]["routing/changed"] < 1e-3 < 0.02 < history[3]["routing/changed"]
    assert all(row["mismatch/kl"] < 1e-9 for row in history if "mismatch/kl" in row)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts that calls tools; its first layer is dense."""
    names = ("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    sizes = {name: mixtures.SIZES[name] for name in names}
    sizes |= {"kind": Qwen3MoeConfig, "mlp_only_layers": [0]}
    return agent.train_model(tmp_path_factory.mktemp("caller"), steps=90, **sizes)


def test_turns_of_an_agent_are_put_together(
    caller: Path, tmp_path: Path, colocated: Colocated, engines: conftest.Engines
) -> None:
    """A turn's last token, which has no route then, has that of the next turn, whose prompt is cached in part."""
    engines.answers.clear()
    options: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "max_completion_length": 160,
        "min_p": 0.1,  # nothing that was not learned
        "max_steps": 4,
        "learning_rate": 1e-4,
        "build": {
            "tools": agent.tools([]),
            "train_dataset": agent.dataset(agent.one_by_one, agent.both_at_once),
            "processing_class": agent.tokenizer(),
        },
    }
    trainer = tiny.train(colocated(caller, tmp_path, **options))
    assert shares(caller, trainer) == [1.0, 1.0]
    assert [row["routing/fallback"] for row in tiny.history(trainer) if "routing/fallback" in row] == [0, 0]
    later = [request for answer in engines.answers if len(answer) < 16 for request in answer]
    assert max(request.num_cached_tokens for request in later) >= conftest.BLOCK
    assert len(trainer.turns[0]) >= 2
    boundaries = 0
    for _, output in trainer.rollouts:
        for row in rows(output):
            for _, end in agent.turns(row.ids[row.prompt :])[:-1]:
                assert row.routes is not None and (row.routes[row.prompt + end - 1] != NONE).all()
                boundaries += 1
    assert boundaries > 5
