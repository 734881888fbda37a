"""Routes of a vLLM, colocated or a server, as tests/tools/engines.py plays it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from trl.generation import vllm_generation

from tests.features.router_replay.tools import CLOSE, Row, oracles, rows
from tests.oracles import routes as routed_oracle
from tests.oracles.routes import NONE
from tests.tools import engines, tiny
from tests.tools.engines import COMPLETIONS, RENDER, SPARSE, TOKENS, Array, Build, Engine, Server, chosen, kept
from tests.tools.sets import lists
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.router_replay.routes import from_engine
from trl_steady.features.sampling_mask.feature import take_candidates

mixture, engine, in_process = engines.mixture, engines.engine, engines.in_process
server, over_http, flagged = engines.server, engines.over_http, engines.flagged

R3: dict[str, Any] = {"router_replay": "R3"}
SETS: dict[str, Any] = {"keep_sampling_mask": True, "top_k": 20}


@pytest.fixture
def colocated(in_process: Build) -> Build:
    return lambda *arguments, **options: in_process(*arguments, **{**R3, **options})


@pytest.fixture
def served(over_http: Build) -> Build:
    return lambda **options: over_http(**{**R3, **options})


def check(trainer: Any, mixture: Path) -> None:
    """Two rollouts, the second after a sync: the routes that were returned, in every pass."""
    assert len(trainer.rollouts) == 2
    for number, (_, output) in enumerate(trainer.rollouts):
        found = list(rows(output))
        assert len({row.prompt for row in found}) > 1 and len({len(row.ids) - row.prompt for row in found}) > 2
        for row in found:
            check_row(row, number)
    policy = oracles(mixture, trainer)
    for update in trainer.updates:
        before, now = policy(trainer.rollouts[update.rollout][0]), policy(update.weights)
        for row in update.rows:
            check_row(row, update.rollout)
            with torch.no_grad():
                for name, model in {"logps": now, "old_per_token_logps": before}.items():
                    forced = routed_oracle.log_probs(model, row.ids, row.prompt, row.routes)
                    torch.testing.assert_close(row.values[name], forced, **CLOSE)
    fallback = [row["routing/fallback"] for row in tiny.history(trainer) if "routing/fallback" in row]
    assert fallback == [0, 0]


def check_row(row: Row, rollout: int) -> None:
    expected = torch.from_numpy(chosen(row.ids, rollout + 1)[:, SPARSE])
    assert row.routes is not None and row.of_padding is not None
    assert row.routes.dtype == torch.uint8 and torch.equal(row.routes[:-1], expected[:-1])
    assert (row.routes[-1] == NONE).all() or torch.equal(row.routes[-1], expected[-1])
    assert (row.of_padding == NONE).all()


ANSWERS: dict[str, Callable[[Array], Array]] = {
    "all but the last token": lambda experts: experts[:-1],
    "all tokens": lambda experts: experts,
    "layers with routers": lambda experts: experts[:-1, SPARSE],
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_an_engine_in_the_process_returns_is_replayed(
    mixture: Path, engine: Engine, colocated: Build, answer: str
) -> None:
    engine.answered = ANSWERS[answer]
    unflagged = vllm_generation.LLM
    trainer = colocated()
    assert vllm_generation.LLM is unflagged
    llm = trainer.vllm_generation.llm
    assert llm.asked["enable_return_routed_experts"] is True and llm.asked["model"] == str(mixture)
    check(tiny.train(trainer), mixture)
    assert "generate" not in vars(llm) and engine.weights.keys() == tiny.parameters(trainer).keys()


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("answer", ["all but the last token", "layers with routers"])
def test_what_a_server_returns_is_replayed(
    mixture: Path, engine: Engine, server: Server, served: Build, answer: str
) -> None:
    """It has each prompt once, and answers with the choices of one after those of another."""
    engine.answered = ANSWERS[answer]
    trainer = served()
    check(tiny.train(trainer), mixture)
    assert not {"_post", "generate"} & vars(trainer.vllm_generation.vllm_client).keys()
    assert server.requests.keys() == {COMPLETIONS}
    assert [(len(body["prompt"]), body["n"]) for body in server.requests[COMPLETIONS]] == [(4, 4), (4, 4)]


@pytest.mark.parametrize("is_silent", [False, True])
def test_answers_without_routes_are_refused(engine: Engine, served: Build, is_silent: bool) -> None:
    engine.answered, engine.is_silent = lambda _: None, is_silent
    with pytest.raises(ValueError, match=r"vLLM returned no routes for 16 of 16 sequences\. Start a server with "):
        served().train()


def test_wrong_routes_are_refused(engine: Engine, colocated: Build) -> None:
    engine.answered = lambda experts: np.zeros_like(experts[:-1])
    with pytest.raises(ValueError, match=r"routes of token 0 in layer 0 are \[0, 0\].*has not captured them"):
        colocated().train()
    engine.answered = lambda experts: experts[:-2]
    with pytest.raises(ValueError, match=r"returned values for \d+ tokens of a sequence of \d+\. Only the last"):
        colocated().train()


@pytest.mark.refuses(
    "router_replay R3",
    on="vLLM colocate",
    where="with `vllm_tensor_parallel_size` above 1",
)
def test_an_engine_over_several_gpus_is_refused(colocated: Build) -> None:
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2: a colocated engine.*Set vllm_mode='server'"):
        colocated(vllm_tensor_parallel_size=2)


PICTURE = 3


def test_a_server_is_asked_about_images_too(server: Server, flagged: Build) -> None:
    """TRL sends each prompt with what the server made of its images, or with nothing."""
    generation = flagged(**R3, **SETS).vllm_generation
    generation.processing_class = SimpleNamespace(image_token_id=PICTURE)
    red, blue = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    prompts = [[1, 2], [PICTURE, PICTURE, 4], [5, PICTURE, 6, PICTURE], [9], [8, PICTURE]]
    images = [None, [red], [red, blue], None, [blue]]
    twice = lambda items: [each for each in items for _ in range(2)]
    _, completions, _, _ = generation.generate(twice(prompts), twice(images), 2)
    pairs = list(zip(twice(prompts), completions, strict=True))
    sets = lists(take_candidates(generation, completions))
    assert sets == [each for pair in pairs for each in kept(*pair, 0)]
    found = [from_engine(each, SPARSE) for each in generation.take(ROUTES)]
    for (prompt, ids), routes in zip(pairs, found, strict=True):
        assert torch.equal(routes, torch.from_numpy(chosen([*prompt, *ids], 0)[:-1, SPARSE]))
    assert {path: len(bodies) for path, bodies in server.requests.items()} == {RENDER: 3, TOKENS: 5}
    sent = {tuple(body["token_ids"]): body["features"] for body in server.requests[TOKENS]}
    assert sent[1, 2] is sent[(9,)] is None
    (one, both, other) = (sent[tuple(prompts[i])] for i in (1, 2, 4))
    assert both["mm_hashes"]["image"] == [*one["mm_hashes"]["image"], *other["mm_hashes"]["image"]]
    assert both["mm_placeholders"]["image"] == [{"offset": 1, "length": 1}, {"offset": 3, "length": 1}]
    assert [body["token_ids"] for body in server.requests[TOKENS]] != server.answers
