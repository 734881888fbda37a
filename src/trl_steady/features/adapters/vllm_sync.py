"""Send a policy's LoRA adapter to a vLLM engine, instead of all weights with the adapter merged.

An engine that gets the adapter alone has loaded the base itself. `LoraSync.prepare` finds out if that can be right.
"""

import tempfile
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from peft import LoraConfig, PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import BitsAndBytesConfig

from trl_steady.core.engine import NotServedError
from trl_steady.features.adapters.base_model import BaseModel, Gather
from trl_steady.trl_bridge import models
from trl_steady.trl_bridge.vllm import SteadyGeneration

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can be built."""
# Fields of LoraConfig with which an adapter still is two matrices a layer, of one rank and one scale. `BaseModel`
# knows which inits of these matrices have changed the base.
_SERVED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "target_modules",
    "fan_in_fan_out",
    "lora_alpha",
    "lora_dropout",
    "r",
    "use_rslora",
    "qalora_group_size",
    "init_lora_weights",
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
}


class LoraSync:
    """Sends each version of the adapter to one engine, under a name of its own.

    `asked` is the value of `vllm_adapter_sync`. A server, which may be on another machine, finds adapters in `folder`.
    """

    def __init__(self, asked: bool | None, folder: Path) -> None:
        self._asked = asked
        self._server_folder = folder
        self._run = uuid.uuid4().hex[:8]  # a server may still have the adapters of a run that died
        self._version = 0
        self._written: tempfile.TemporaryDirectory[str] | None = None
        self._path = ""

    def is_required(self, engine: SteadyGeneration) -> bool:
        """Return True if the engine cannot have merged weights instead, or must not."""
        return bool(self._asked) or needs_adapter(_policy(engine), engine.mode)

    def prepare(self, engine: SteadyGeneration) -> dict[str, object]:
        """Return vLLM's options for a colocated engine that serves the adapter, or raise a `NotServedError`."""
        policy = _policy(engine)
        if why_not := why_not_served(policy, engine.mode, engine.gathered):
            raise NotServedError(why_not)
        rank = cast(LoraConfig, policy.active_peft_config).r
        built_for = min(largest for largest in _RANKS if largest >= rank)
        return {"enable_lora": True, "max_lora_rank": built_for, "max_loras": 1}

    def send(self, engine: SteadyGeneration) -> object | None:
        """Send the adapter as it is now, and return the request with which a colocated engine generates.

        The engine forgets the version before. A server gets the adapter's name with each request of TRL's client.
        """
        state = adapter_state(_policy(engine), engine.gathered)
        if engine.mode == "colocate":
            return self._send_to_process(engine, state)
        failure = [""]
        if engine.accelerator.is_main_process:
            try:
                self._send_to_server(engine, state)
            except Exception as error:  # the other processes wait to hear of it
                failure = [str(error) or repr(error)]
        broadcast_object_list(failure, from_process=0)
        if failure[0]:
            raise ValueError(failure[0])
        return None

    def _send_to_process(self, engine: SteadyGeneration, state: dict[str, Tensor]) -> object:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        self._write(engine, state, None)
        request = LoRARequest(self._adapter_name, self._version, self._path)
        engine.llm.llm_engine.add_lora(request)  # the engine has room for one, and drops the other
        engine.llm.reset_prefix_cache()
        if unserved := _unserved(engine.llm, self._version):
            raise ValueError(f"it leaves out {len(unserved)} of the adapter's modules, such as {unserved[0]}")
        return request

    def _send_to_server(self, engine: SteadyGeneration, state: dict[str, Tensor]) -> None:
        client = engine.vllm_client
        name_before = self._adapter_name
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
        if client.model == name_before:
            _post(client, "unload_lora_adapter", lora_name=name_before)  # a restarted server does not know it
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
        self._written = folder
        self._path = folder.name

    @property
    def _adapter_name(self) -> str:
        return f"trl-steady-{self._run}-{self._version}"


def needs_adapter(model: PeftModel, mode: str) -> bool:
    """Return whether an engine cannot have merged weights, because it quantises its weights as the base is."""
    return mode == "colocate" and BaseModel(model).is_quantised


def why_not_served(model: PeftModel, mode: str, gather: Gather) -> str | None:
    """Return why a vLLM engine cannot serve the adapter beside a base that it loads itself; None if it may."""
    config = model.active_peft_config
    if type(config) is not LoraConfig:
        return f"an adapter of {type(config).__name__} is not LoRA"
    if len(model.active_adapters) > 1:
        return f"{len(model.active_adapters)} adapters are active"
    for field in fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name not in _SERVED and value and value != field.default:
            return f"vLLM does not serve LoRA with {field.name}={value!r}"
    if config.r > _RANKS[-1]:
        return f"vLLM does not serve LoRA of rank {config.r}, but up to {_RANKS[-1]}"
    base = BaseModel(model)
    if elsewhere := base.adapted_elsewhere:
        return f"vLLM serves LoRA in the language model only, and skips {elsewhere[0]}"
    if base.is_quantised and mode == "server":
        return "a server does not quantise its base as the policy's is"
    asked = getattr(base.model.config, "quantization_config", None)
    if isinstance(asked, BitsAndBytesConfig) and not (
        asked.load_in_4bit and asked.bnb_4bit_quant_type == "nf4" and asked.bnb_4bit_use_double_quant
    ):
        return (
            "vLLM quantises with bnb_4bit_quant_type='nf4' and bnb_4bit_use_double_quant=True, and the policy does not"
        )
    # the engine loads its own base, from the checkpoint
    return base.why_not_checkpoint(gather)


def adapter_state(model: PeftModel, gather: Gather) -> dict[str, Tensor]:
    """Return the active adapter's tensors, whole and on the CPU, under the names that PEFT saves."""
    adapter = model.active_adapters[0]
    parameters = [parameter for name, parameter in model.named_parameters() if adapter in name.split(".")]
    state: dict[str, Tensor] = {}
    with gather(parameters):
        saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        for name, tensor in saved.items():
            name = name.replace("_checkpoint_wrapped_module.", "")
            state[name] = models.whole(tensor).to("cpu", copy=True).contiguous()
    return state


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
