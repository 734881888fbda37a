"""Routes of a vLLM server, a process of its own. It cannot take weights on CPU, so that there is one rollout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trl.generation.vllm_client import VLLMClient

from tests.features.router_replay.tools import build, oracles, rows
from tests.oracles.routes import NONE
from tests.tools import tiny
from tests.vllm import mixtures
from tests.vllm.tools import needs_vllm, serving, shares
from trl_steady.features.router_replay.feature import ROUTES
from trl_steady.features.router_replay.routes import from_engine
from trl_steady.features.sampling_mask.feature import SAMPLING_MASK, take_candidates

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def url(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--enable-return-routed-experts", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    yield from serving(mixture, tmp_path_factory.mktemp("server"), flags)


def served(
    mixture: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, list[int]]:
    """A trainer whose engine is the server, and how many tensors it was sent each time, which do not get there."""
    sent: list[int] = []

    def update(self: Any, metadata: list[Any], weights: Iterator[Any]) -> None:
        sent.append(len(metadata))

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)
    address = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    training = {"max_completion_length": 40, "learning_rate": 1e-3, "max_steps": 4}
    return build(mixture, tmp_path, **{**address, **training, **options}), sent


@pytest.mark.supports("router_replay R3", "trim_padding", on="vLLM server")
def test_routes_are_those_of_each_token(
    mixture: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, sent = served(mixture, tmp_path, url, monkeypatch, router_replay="R3")
    before = vars(trainer.vllm_generation.vllm_client).copy()
    tiny.train(trainer)
    assert vars(trainer.vllm_generation.vllm_client).keys() == before.keys()
    assert len(sent) == len(trainer.rollouts) == 1 and shares(mixture, trainer) == [1.0]
    ((weights, output),) = trainer.rollouts
    found, model = list(rows(output)), oracles(mixture, trainer)(weights)
    assert len({row.prompt for row in found}) > 1 and len({len(row.ids) - row.prompt for row in found}) > 3
    rolled = []
    for row in found:
        assert row.routes is not None and row.of_padding is not None
        assert (row.routes[-1] == NONE).all() and (row.of_padding == NONE).all()
        rolled.append(mixtures.agreement(model, row.ids, row.routes[:-1].roll(1, dims=0)))
    assert mixtures.share(rolled) < 0.5
    logged = tiny.history(trainer)[0]
    assert logged["routing/fallback"] == 0 and logged["routing/changed"] < 1e-3 and logged["mismatch/kl"] < 1e-9


def test_routes_of_answers_to_tokens_are_those_of_each_token(
    mixture: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are sent one by one, as those with images are; of kept tokens the answers have nothing."""
    trainer, _ = served(mixture, tmp_path, url, monkeypatch, router_replay="R3")
    generation, model = trainer.vllm_generation, oracles(mixture, trainer)(trainer.model.state_dict())
    prompts = [[60 + i, 70, 80, 90 - i] * (i + 1) for i in range(6) for _ in range(3)]
    generation._extras, generation._extra_values = [SAMPLING_MASK, ROUTES], {SAMPLING_MASK.field: [], ROUTES.field: []}
    given, completions, _, _ = generation.generate(prompts, None, 3)
    assert given == prompts and len({len(ids) for ids in completions}) > 3
    sequences = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
    pairs = list(zip(sequences, [from_engine(each, mixtures.SPARSE) for each in generation.take(ROUTES)], strict=True))
    assert [len(routes) for _, routes in pairs] == [len(ids) - 1 for ids in sequences]
    assert mixtures.share([mixtures.agreement(model, *pair) for pair in pairs]) == 1.0
    assert mixtures.share([mixtures.agreement(model, ids, routes.roll(1, 0)) for ids, routes in pairs]) < 0.5
    with pytest.raises(
        ValueError, match=r"vLLM returned no kept tokens for 18 of 18 sequences\. Start a server with "
    ):
        take_candidates(generation, completions)
