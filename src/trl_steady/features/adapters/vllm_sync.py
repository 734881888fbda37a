"""Send a policy's LoRA adapter to a vLLM engine, instead of all weights with the adapter merged."""

import tempfile
import uuid
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from trl_steady.features.adapters.vllm_support import adapter_state, needs_adapter, served_rank, why_not_served
from trl_steady.trl_bridge.vllm import SteadyGeneration, add_to_requests


class LoraSync:
    """Sends each version of the adapter to one engine, under a name of its own.

    `asked` is the value of `vllm_adapter_sync`. A server, which may be on another machine, finds adapters in `folder`.
    """

    def __init__(self, asked: bool | None, folder: Path) -> None:
        self.option = f"vllm_adapter_sync={asked}"
        self._asked, self._server_folder = asked, folder
        self._version, self._run = 0, uuid.uuid4().hex[:8]  # a server may still have those of a run that died
        self._written: tempfile.TemporaryDirectory[str] | None = None
        self._path = ""

    def is_required(self, engine: SteadyGeneration) -> bool:
        """Return True if the engine cannot have merged weights instead, or must not."""
        return bool(self._asked) or needs_adapter(_policy(engine), engine.mode)

    def why_not(self, engine: SteadyGeneration) -> str | None:
        """Return why the engine cannot serve the adapter; None if it may."""
        return why_not_served(_policy(engine), engine.mode, engine.whole)

    def flags(self, engine: SteadyGeneration) -> dict[str, object]:
        """Return the options of vLLM that a colocated engine needs."""
        return {"enable_lora": True, "max_lora_rank": served_rank(_policy(engine)), "max_loras": 1}

    def send(self, engine: SteadyGeneration) -> None:
        """Send the adapter as it is now, or raise. The engine forgets the version before."""
        state = adapter_state(_policy(engine), engine.whole)
        if engine.mode == "colocate":
            engine.wake_weights()
            self._write(engine, state, None)
            engine.llm.llm_engine.add_lora(self._request())  # the engine has room for one, and drops the other
            engine.llm.reset_prefix_cache()
            if unserved := _unserved(engine.llm, self._version):
                raise ValueError(f"it leaves out {len(unserved)} of the adapter's modules, such as {unserved[0]}")
            return
        failure = [""]
        if engine.accelerator.is_main_process:
            try:
                self._send_to_server(engine, state)
            except Exception as error:  # the other processes wait to hear of it
                failure = [str(error) or repr(error)]
        broadcast_object_list(failure, from_process=0)
        if failure[0]:
            raise ValueError(failure[0])

    def _send_to_server(self, engine: SteadyGeneration, state: dict[str, Tensor]) -> None:
        client, before = engine.vllm_client, self._adapter_name
        self._server_folder.mkdir(parents=True, exist_ok=True)
        self._write(engine, state, self._server_folder.resolve())
        answer = _post(client, "load_lora_adapter", lora_name=self._adapter_name, lora_path=self._path)
        if answer.status_code != 200:
            raise ValueError(
                f"the server answers /v1/load_lora_adapter with {answer.status_code}: {answer.text}. Start it with "
                "--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and let it see "
                f"{self._path} under the same path"
            )
        client.reset_prefix_cache()
        if client.model == before:
            _post(client, "unload_lora_adapter", lora_name=before)  # a restarted server does not know it
        client.model = self._adapter_name  # last, because merged weights are generated with the base

    def _write(self, engine: SteadyGeneration, state: dict[str, Tensor], parent: Path | None) -> None:
        self._version += 1
        # the upload of a run to the Hub skips names that begin with "_"
        folder = tempfile.TemporaryDirectory(prefix="_vllm-adapter-", dir=parent)
        if parent is not None:  # a server may run as another user, and has to read it
            Path(folder.name).chmod(parent.stat().st_mode & 0o777)
        save_file(state, Path(folder.name, "adapter_model.safetensors"))
        _policy(engine).active_peft_config.save_pretrained(folder.name)
        if self._written is not None:
            self._written.cleanup()
        self._written, self._path = folder, folder.name

    @property
    def _adapter_name(self) -> str:
        return f"trl-steady-{self._run}-{self._version}"

    def _request(self) -> object:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return LoRARequest(self._adapter_name, self._version, self._path)

    def attach(self, engine: SteadyGeneration) -> None:
        """Let a colocated engine generate with the adapter, also when a `rollout_func` calls vLLM's own methods.

        A server gets the adapter's name with each request.
        """
        if engine.mode == "colocate":
            # the request is made at each call: TRL's engine sends another version when it wakes up
            add_to_requests(engine.llm, self._request)


def _policy(engine: SteadyGeneration) -> PeftModel:
    return cast(PeftModel, engine.model)  # the bridge asks for the sync of PEFT models only


def _post(client: Any, endpoint: str, **body: str) -> Any:
    """Post to an endpoint of vLLM that TRL's client does not know, and return the response of `requests`."""
    import requests  # TRL's client has it

    url = f"{client.base_url}/v1/{endpoint}"
    try:
        return client.session.post(url, json=body)
    except requests.exceptions.RetryError:  # without the answer's text; vLLM refuses adapters with 500
        return requests.post(url, json=body, timeout=600)


def _unserved(llm: Any, number: int) -> list[str]:
    """Return the adapter's modules that a colocated engine skips. vLLM only logs them, such as those of a tower."""
    try:
        manager = llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
        return sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())
    except AttributeError:  # private: another version may have other names
        return []
