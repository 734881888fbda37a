"""Send a policy's LoRA adapter to TRL's vLLM engine, instead of all weights with the adapter merged."""

import functools
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.generation.vllm_generation import empty_cache

__all__ = ["AdapterSender", "AdapterSync", "Gather", "keeping_weights"]

_SECONDS = 600  # for a server to load an adapter
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
"""Returns a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""


@dataclass(frozen=True)
class AdapterSync:
    """How an adapter is sent to an engine. All processes call the functions, which get the PEFT model."""

    option: str
    """The option and its value, for messages."""
    is_required: Callable[[Any, str], bool]
    """Returns True if an engine of this mode, "colocate" or "server", cannot have merged weights instead."""
    why_not: Callable[[Any, str, Gather], str | None]
    """Returns why an engine of this mode cannot serve the adapter; None if it may."""
    rank: Callable[[Any], int]
    """Returns the largest rank for which a colocated engine must be built."""
    state: Callable[[Any, Gather], dict[str, Tensor]]
    """Returns the adapter's tensors, whole, under the names that PEFT saves."""
    save: Callable[[Any, dict[str, Tensor], Path], None]
    """Writes an adapter into a folder, as PEFT does."""
    folder: Path
    """Folder where a server, which may be on another machine, finds adapters."""


class AdapterSender:
    """Sends each version of the adapter to one of TRL's engines, under a name of its own.

    Args:
        sync: How the adapter is sent.
        engine: TRL's `VLLMGeneration`.
    """

    def __init__(self, sync: AdapterSync, engine: Any) -> None:
        self._sync, self._engine = sync, engine
        self._version, self._run = 0, uuid.uuid4().hex[:8]  # a server may still have those of a run that died
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.flags = {"enable_lora": True, "max_lora_rank": sync.rank(engine.model), "max_loras": 1}
        """Options of vLLM that a colocated engine needs."""

    def send(self) -> None:
        """Send the adapter as it is now, and let the engine forget the version before. Every process must call this.

        Raises:
            ValueError: The engine does not take the adapter.
        """
        engine = self._engine
        state = self._sync.state(engine.model, engine._dist.gather_params)
        if engine.mode == "colocate":
            if engine.enable_sleep_mode and engine._llm_weights_sleeping:
                empty_cache()  # as TRL does, so that the weights fit
                engine.llm.wake_up(tags=["weights"])
                engine._llm_weights_sleeping = False
            self._write(state, None)
            engine.llm.llm_engine.add_lora(self._request())  # the engine has room for one, and drops the other
            engine.llm.reset_prefix_cache()
            if unserved := _unserved(engine.llm, self._version):
                raise ValueError(f"it leaves out {len(unserved)} of the adapter's modules, such as {unserved[0]}")
            return
        failure = [""]
        if engine.accelerator.is_main_process:
            try:
                self._send_to_server(state)
            except Exception as error:  # the others wait to hear of it
                failure = [str(error) or repr(error)]
        broadcast_object_list(failure, from_process=0)
        if failure[0]:
            raise ValueError(failure[0])

    def _send_to_server(self, state: dict[str, Tensor]) -> None:
        client, before = self._engine.vllm_client, self._name
        self._sync.folder.mkdir(parents=True, exist_ok=True)
        self._write(state, self._sync.folder.resolve())
        self._load()
        client.reset_prefix_cache()
        if client.model == before:
            self._unload(before)
        client.model = self._name  # last, because merged weights are generated with the base

    def _write(self, state: dict[str, Tensor], parent: Path | None) -> None:
        self._version += 1
        # the upload of a run to the Hub skips names that begin with "_"
        folder = tempfile.TemporaryDirectory(prefix="_vllm-adapter-", dir=parent)
        if parent is not None:  # a server may run as another user, and has to read it
            Path(folder.name).chmod(parent.stat().st_mode & 0o777)
        self._sync.save(self._engine.model, state, Path(folder.name))
        before, self._folder = self._folder, folder
        if before is not None:
            before.cleanup()

    @property
    def _name(self) -> str:
        return f"trl-steady-{self._run}-{self._version}"

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name)

    def _request(self) -> Any:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return LoRARequest(self._name, self._version, str(self._path))

    def _load(self) -> None:
        answer = self._post("load_lora_adapter", lora_name=self._name, lora_path=str(self._path))
        if answer.status_code == 200:
            return
        if "No adapter found" in answer.text:  # vLLM's own 404
            raise ValueError(
                f"the server cannot read {self._path}. Let it see the trainer's output_dir under the same path, for "
                "example on a shared file system"
            )
        if answer.status_code == 404:
            raise ValueError(
                "the server takes no adapters; start it with --enable-lora, with a --max-lora-rank, and with the "
                "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        raise ValueError(f"the server answers /v1/load_lora_adapter with {answer.status_code}: {answer.text}")

    def _unload(self, name: str) -> None:
        answer = self._post("unload_lora_adapter", lora_name=name)
        if answer.status_code not in (200, 404):  # 404: the server has been restarted since
            raise ValueError(f"the server answers /v1/unload_lora_adapter with {answer.status_code}: {answer.text}")

    def _post(self, endpoint: str, **body: str) -> Any:
        import requests  # TRL's client has it

        client = self._engine.vllm_client
        url = f"{client.base_url}/v1/{endpoint}"
        try:
            return client.session.post(url, json=body)
        except requests.exceptions.RetryError:  # it has no answer's text; vLLM refuses adapters with 500
            return requests.post(url, json=body, timeout=_SECONDS)

    def answer_with_adapter(self) -> None:
        """Let a colocated engine generate with the adapter, also when a `rollout_func` calls vLLM's own methods.

        A server gets the adapter's name with each request.
        """
        llm = self._engine.llm
        for name in ("generate", "chat"):
            if hasattr(llm, name):
                vars(llm)[name] = functools.partial(self._with_adapter, getattr(llm, name))

    def _with_adapter(self, own: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        # read now: TRL's engine sends another version when it wakes up
        return own(*arguments, **{"lora_request": self._request(), **keywords})


def keeping_weights(build: Callable[..., Any], **asked: Any) -> Any:
    """Build vLLM's `LLM` so that it keeps its weights while it sleeps. TRL's level of sleep drops them.

    They wait in the CPU's memory. Nobody would send the base again.
    """
    llm = build(**asked)
    if hasattr(llm, "sleep"):
        vars(llm)["sleep"] = functools.partial(_sleep_lightly, llm.sleep)
    return llm


def _sleep_lightly(sleep: Callable[..., None], level: int = 1, *arguments: Any, **keywords: Any) -> None:
    sleep(min(level, 1), *arguments, **keywords)


def _unserved(llm: Any, number: int) -> list[str]:
    """Return the adapter's modules that a colocated engine skips. vLLM only logs them, such as those of a tower."""
    try:
        manager = llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
        return sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())
    except AttributeError:  # private: another version may have other names
        return []
