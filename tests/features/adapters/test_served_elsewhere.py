"""Adapters for a server, for an engine that tells of tokens, and on several processes."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from tests.features.adapters import tools
from tests.features.adapters.tools import LLM, ROUNDING, differences, requests
from tests.tools import engines, tiny
from trl_steady.core import processes
from trl_steady.features.adapters import vllm_sync as sending
from trl_steady.features.adapters.feature import Adapters
from trl_steady.trl_bridge import vllm as host_engine

mixture, engine, in_process = engines.mixture, engines.engine, engines.in_process
server, over_http, built = engines.server, engines.over_http, tools.built


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("options", [{"router_replay": "R3"}, {"top_k": 50, "keep_sampling_mask": True}])
def test_what_the_engine_says_of_tokens_is_as_with_merged_weights(
    engine: engines.Engine, in_process: engines.Build, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Its tokens come from nowhere, so that both ways train alike to the bit."""
    requests(monkeypatch)
    ends: list[dict[str, Tensor]] = []
    for sync in (True, False):
        engine.adapters, engine.syncs = ([], -1) if sync else (None, 0)  # an adapter is sent once more, at first
        engine._asked.clear()
        build = {"peft_config": LoraConfig(**tiny.LORA)}
        torch.manual_seed(0)  # the adapter begins at random
        trainer = in_process(vllm_adapter_sync=sync, build=build, **options)
        trainer.train()
        assert (trainer.vllm_generation.active_sync is not None) == sync
        ends.append(tiny.parameters(trainer))
    assert ends[0].keys() == ends[1].keys()
    assert not [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


def test_a_server_that_takes_no_adapters_gets_weights(server: engines.Server, over_http: engines.Build) -> None:
    build = {"peft_config": LoraConfig(**tiny.LORA)}
    reason = "vLLM refuses the adapter: the server answers /v1/load_lora_adapter with 404.*Start it with --enable-lora"
    with pytest.raises(ValueError, match=f"vLLM has to serve the adapter alone .*: {reason}"):
        over_http(vllm_adapter_sync=True, build=build)
    with pytest.warns(UserWarning, match=f"because {reason}"):
        trainer = over_http(build=build)
    trainer.train()
    assert trainer.vllm_generation.active_sync is None and server.engine.weights


@pytest.fixture
def sent(server: engines.Server, over_http: engines.Build) -> Callable[..., Any]:
    """Builds a trainer whose server takes adapters."""
    server.missing = set()

    def build(**options: Any) -> Any:
        return over_http(build={"peft_config": LoraConfig(**tiny.LORA)}, **options)

    return build


def test_a_servers_adapter_is_kept_out_of_uploads_and_can_be_read(
    server: engines.Server, sent: Callable[..., Any], tmp_path: Path
) -> None:
    """transformers uploads the output folder without what begins with "_". A server may run as another user."""
    tmp_path.chmod(0o755)
    trainer = sent()
    trainer.vllm_generation.sync_weights()
    (folder,) = (path for path in tmp_path.iterdir() if "adapter" in path.name)
    assert server.requests[engines.LOAD][-1]["lora_path"] == str(folder)
    assert folder.name.startswith("_") and folder.stat().st_mode & 0o777 == 0o755


def test_a_server_that_was_restarted_takes_the_next_adapter(server: engines.Server, sent: Callable[..., Any]) -> None:
    """It does not know the version before, which is all that vLLM's 404 says then."""
    trainer = sent()
    server.missing = {engines.UNLOAD}
    trainer.vllm_generation.sync_weights()
    assert trainer.vllm_generation.vllm_client.model == server.requests[engines.LOAD][-1]["lora_name"]


def test_a_servers_reason_is_in_the_message(
    server: engines.Server, sent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.without_pauses(monkeypatch)
    server.refused[engines.LOAD] = (500, "LoRA rank 4 is greater than max_lora_rank")
    with pytest.raises(
        ValueError, match=r"with 500: .*LoRA rank 4 is greater than max_lora_rank.*under the same path"
    ):
        sent(vllm_adapter_sync=True)


def test_every_process_hears_why_a_version_was_not_sent(
    sent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, told = sent(), list[str]()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sending, "save_file", fail)
    monkeypatch.setattr(sending, "broadcast_object_list", lambda values, from_process: told.extend(values))
    with pytest.raises(ValueError, match="no space left"):
        trainer.vllm_generation.sync_weights()
    assert told == ["no space left"]


def test_merged_weights_are_not_generated_with_an_adapter(server: engines.Server, sent: Callable[..., Any]) -> None:
    """The server has taken an adapter, but does not let go of its prefix cache."""
    server.missing = {"/reset_prefix_cache"}
    with pytest.warns(UserWarning, match="because vLLM refuses the adapter: Request failed: 404"):
        trainer = sent()
    assert server.requests[engines.LOAD] and trainer.vllm_generation.vllm_client.model == "mixture"


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("stage", ["base", "send"])
def test_processes_agree_on_adapters(
    built: Callable[..., tuple[Any, LLM]], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """One that sends all weights gathers other parameters than one that sends the adapter, and both would wait."""
    calls = iter(["other base"] if stage == "base" else [None, "no space left"])
    monkeypatch.setattr(processes, "gather_object", lambda values: [*values, next(calls)])
    with pytest.warns(UserWarning, match="because other base" if stage == "base" else "because no space left"):
        trainer, llm = built(max_steps=4)
    assert trainer.vllm_generation.active_sync is None and next(calls, None) is None
    assert max(differences(trainer)) < ROUNDING and llm.weights and llm.answered == [None]


@pytest.mark.parametrize("takes", [True, False])
def test_processes_agree_on_what_a_server_answers(monkeypatch: pytest.MonkeyPatch, wide: Path, takes: bool) -> None:
    """Only the first of them talks to it."""
    failure = "" if takes else "it says no"
    heard = lambda values, from_process: values.__setitem__(0, failure)
    monkeypatch.setattr(sending, "broadcast_object_list", heard)
    model = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(wide), LoraConfig(**tiny.LORA))
    engine = object.__new__(host_engine.SteadyGeneration)
    builds: list[None] = []
    waits = SimpleNamespace(is_main_process=False, wait_for_everyone=lambda: builds.append(None))
    backend = SimpleNamespace(gather_params=lambda _: contextlib.nullcontext(), fsdp_version=None)
    args: Any = SimpleNamespace(use_vllm=True, vllm_adapter_sync=None, output_dir="never")
    sync = Adapters(cast(Any, None), args).make_adapter_sync(args)
    vars(engine).update(model=model, mode="server", accelerator=waits, _dist=backend, _extras=[], _wanted_sync=sync)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: self.accelerator.wait_for_everyone())
    with contextlib.nullcontext() if takes else pytest.warns(UserWarning, match="it says no"):
        engine._init_vllm()
    assert (engine.active_sync is not None) == takes
    assert len(builds) == 1  # or the others would wait for the first
