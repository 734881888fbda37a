"""Answers of a real engine with request seeds: runs of two seeds, of a group, killed and resumed, and of a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trl.generation.vllm_client import VLLMClient

from tests.tools import tiny
from tests.vllm import sampled
from tests.vllm.tools import needs_vllm, serving
from trl_steady.trl_bridge.patching import patched

pytestmark = needs_vllm


@pytest.mark.supports("vllm_request_seeds", on="vLLM colocate")
def test_a_killed_run_goes_on_with_the_answers_of_the_run_that_never_stopped(folder: Path, tmp_path: Path) -> None:
    whole = sampled.run(folder, tmp_path / "whole")
    assert [step for step, _ in whole] == [0, 2, 4]
    killed = sampled.run(folder, tmp_path / "killed", kill_after=2)
    rest = sampled.run(folder, tmp_path / "killed", resume=True)
    assert killed == whole[:1] and rest == whole[1:]
    other = sampled.run(folder, tmp_path / "other", seed=8, max_steps=2)
    pairs = list(zip(whole[0][1], other[0][1], strict=True))
    assert sum(first != second for first, second in pairs) == len(pairs) == 16
    for _, answers in whole:
        for start in range(0, len(answers), 4):
            group = answers[start : start + 4]
            assert len({tuple(ids) for ids in group}) == 4 and {len(ids) for ids in group} == {16}


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serving(folder, tmp_path_factory.mktemp("server"), ["--logprobs-mode", "processed_logprobs"])


@pytest.mark.supports("vllm_request_seeds", on="vLLM server")
def test_a_server_samples_each_completion_with_its_own_seed(
    folder: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins are the answers of a prompt that is there twice, which vLLM gives one seed in one request."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "max_completion_length": 16,
    }
    engine = tiny.trainer(folder, tmp_path, generation_kwargs={"ignore_eos": True}, **options).vllm_generation
    prompts = [[60, 70, 80]] * 8

    def answers(first_seed: int | None) -> list[tuple[int, ...]]:
        with patched(engine, {"first_seed": first_seed}):
            _, completions, logprobs, _ = engine.generate(prompts, None, 4)
        assert [len(each) for each in logprobs] == [len(ids) for ids in completions] == [16] * 8
        return [tuple(ids) for ids in completions]

    first = answers(1000)
    assert len({*first}) == 8
    assert answers(1000) == first  # float32, and answers of one length
    assert answers(1004) == first[4:] + answers(1008)[:4]
    assert {*answers(2000)}.isdisjoint(first)
    engine.generation_kwargs["seed"] = 1000
    assert answers(None) == first[:4] * 2
