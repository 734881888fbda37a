"""Generation ahead when something fails: one clear error, no hang, and a resume that loses nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.generation.vllm_client import VLLMClient

from tests.features.async_generation import tools as ahead
from tests.features.async_generation.tools import Watched
from tests.tools import engines, tiny
from tests.tools.engines import COMPLETIONS, Server
from tests.tools.resumable import differences

engine, server, mixture = engines.engine, engines.server, engines.mixture
ONE_STEP = {"per_device_train_batch_size": 16, "steps_per_generation": 1}


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    with ahead.connected():
        yield Watched(server)


FAULTS: dict[str, tuple[Any, str]] = {
    "HTTP 500": ((500, "the engine is dead"), r"Request failed: 500.*the engine is dead"),
    "HTTP 400": ((400, "prompt too long"), r"Request failed: 400.*prompt too long"),
}


@pytest.mark.parametrize(
    ("fault", "lora"), [("HTTP 500", True), ("HTTP 400", False), ("malformed", False), ("no connection", True)]
)
def test_an_error_of_the_server_ends_the_next_rollout(
    models: dict[str, Path],
    tmp_path: Path,
    server: Server,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    lora: bool,
) -> None:
    """The request for the third rollout fails while the second is trained on."""
    engines.without_pauses(monkeypatch)
    options = {**ONE_STEP, "lora": lora, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    post = server.post

    def failing(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS and len(watched.asked) >= 2:
            return {"choices": [{"text": "no token ids"}]}
        answer = post(path, body)
        if path == COMPLETIONS and len(watched.asked) == 2 and fault in FAULTS:
            server.refused[COMPLETIONS] = FAULTS[fault][0]
        return answer

    message = FAULTS[fault][1] if fault in FAULTS else "KeyError|Connection"
    server.post = failing  # type: ignore[method-assign]
    trainer = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    if fault == "no connection":
        server.post = post  # type: ignore[method-assign]
        generate = VLLMClient.generate

        def asking(client: VLLMClient, **question: Any) -> Any:
            if len(watched.asked) >= 2:
                client.base_url = "http://127.0.0.1:9"  # where nobody listens
            return generate(client, **question)

        monkeypatch.setattr(VLLMClient, "generate", asking)
    with pytest.raises(RuntimeError, match=rf"(?s)async_generate=True: .*at step 2, .*({message}).*Resume from"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    if fault == "no connection":
        monkeypatch.setattr(VLLMClient, "generate", generate)
    server.refused.clear()
    server.post = post  # type: ignore[method-assign]
    resumed = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    # what the server did not answer is asked again, of the policy as it is now
    assert [row["async/versions_behind"] for row in tiny.history(resumed)[:-1]] == [0, 1, 0, 1]


def test_a_slow_server_is_waited_for(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched
) -> None:
    watched.seconds = 0.5
    trainer = tiny.train(ahead.build(server.url, models["dense"], tmp_path, **ONE_STEP, max_steps=3))
    waited = [row["async/waited"] for row in tiny.history(trainer)[:-1]]
    hidden = [row["async/overlap"] for row in tiny.history(trainer)[:-1]]
    assert waited[0] >= 0.5 and hidden[0] == 0
    for seconds, share in zip(waited[1:], hidden[1:], strict=True):
        assert seconds > 0 and 0 <= share < 1
        assert 0.49 <= seconds / (1 - share) < 20  # the generation, which a busy machine lengthens
    assert all(each.is_steady for each in watched.asked)
    adapters = trainer.vllm_generation.vllm_client.session.adapters.values()
    assert all(each.max_retries.raise_on_status for each in adapters)  # the thread had a session for itself


def test_a_full_disk_under_the_adapter_ends_the_run_and_a_resume_goes_on(
    models: dict[str, Path], tmp_path: Path, server: Server, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl_steady.features.adapters import vllm_sync as sending

    options = {**ONE_STEP, "lora": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    torch.manual_seed(0)
    whole = ahead.state(tiny.train(ahead.build(server.url, models["dense"], tmp_path / "whole", **options)))
    torch.manual_seed(0)
    trainer, sent, write = ahead.build(server.url, models["dense"], tmp_path / "run", **options), [], sending.save_file

    def full(*arguments: Any) -> None:
        sent.append(arguments)
        if len(sent) == 3:
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(sending, "save_file", full)
    with pytest.raises(ValueError, match="No space left on device"):
        trainer.train()
    resumed = ahead.build(server.url, models["dense"], tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    assert (
        len(sent) > 3 and differences(whole, ahead.state(resumed)) == []
    )  # the answers that were ahead are in the checkpoint
