"""Options about a vLLM engine, and what contradicts them.

`Adapters` in `features/adapters/feature.py` reads `vllm_adapter_sync`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import trl

from trl_steady.config.options import ENGINE_ARGUMENTS, IN_ROLLOUT, POSITIVE, Idle, Needs, option, why_disabled

if TYPE_CHECKING:
    _TRLConfig = trl.GRPOConfig
else:
    _TRLConfig = object

# Arguments of vLLM's engine that a trainer decides -> the option for it, or "".
_DECIDED_BY_TRAINER: dict[str, str] = {
    "model": "",
    "logprobs_mode": "",
    "distributed_executor_backend": "",
    # an engine of more processes than TRL knows of would get other prompts in each
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "pipeline_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_tensor_parallel_size",
    "enable_lora": "vllm_adapter_sync",
    "max_loras": "vllm_adapter_sync",
    "max_lora_rank": "vllm_adapter_sync",
    "enable_return_routed_experts": "router_replay",
    "return_sampling_mask": "keep_sampling_mask",
    "max_model_len": "vllm_max_model_length",
    "trust_remote_code": "trust_remote_code",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
}


@dataclass
class EngineOptions(_TRLConfig):
    """Options of every trainer of trl-steady that are about an engine."""

    METHOD: ClassVar[str]
    """"GRPO", for example: the config and the trainer are named after it."""
    vllm_adapter_sync: Annotated[bool | None, Needs("use_vllm"), IN_ROLLOUT] = option(
        None,
        "With `use_vllm` and LoRA, send vLLM the adapter alone, which it serves beside its own copy of the base. "
        "True: require that. False: send all weights with the adapter merged. None: send the adapter if its "
        "configuration is one that vLLM serves, and otherwise merged weights, with a warning.",
    )
    vllm_engine_kwargs: Annotated[dict[str, Any] | str | None, ENGINE_ARGUMENTS, Needs("use_vllm")] = option(
        None,
        'Arguments for a colocated vLLM engine, such as `{"max_num_batched_tokens": 8192}`. They override TRL\'s. '
        "They are those of `vllm.LLM`, less the ones that the trainer decides. On a command line, in JSON.",
    )
    vllm_request_seeds: Annotated[bool | None, Needs("use_vllm")] = option(
        None,
        "Sample each completion that vLLM generates with a seed of its own, from `seed`, the optimizer step and the "
        "row. Runs with other seeds get other completions, and a resumed run gets those of the run that never "
        "stopped. A `seed` in `generation_kwargs` or `vllm_engine_kwargs` takes the place of the run's. False: as in "
        "TRL, whose colocated engines begin with the same seed in each run. None: True with `full_determinism`.",
    )
    engine_check: Annotated[float | None, POSITIVE] = option(
        1.0,
        "Largest mean k3, in nats per token, between trainer and vLLM (or a `rollout_func`) in the first rollout of "
        "a run and in the first after a resume. A larger value means that the engine probably serves another model. "
        "The run then stops with an error. The default, 1.0, counts as 0.1 where vLLM gets the adapter alone. None: "
        "no check.",
    )
    async_generate: bool = option(
        False,
        'With `vllm_mode="server"`, let the server generate the next rollout while the trainer trains on this one. '
        "Its answers are of the policy one rollout before, except in the first rollout of each epoch.",
    )

    @property
    def is_colocated(self) -> bool:
        """True if a vLLM engine runs in the trainer's process."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def seeds_requests(self) -> bool:
        """True if each completion that vLLM generates has a seed of its own."""
        if self.vllm_request_seeds is None:
            return self.use_vllm and self.full_determinism
        return self.use_vllm and self.vllm_request_seeds

    @property
    def request_seed(self) -> int:
        """The seed from which `vllm_request_seeds` derives others: one that is given for the engine, or the run's."""
        for_requests: dict[str, Any] = cast(Any, self.generation_kwargs) or {}
        if for_requests.get("seed") is not None:
            return for_requests["seed"]
        engine = self.vllm_engine_kwargs or {}
        assert not isinstance(engine, str)  # parsed by transformers.TrainingArguments
        if self.is_colocated and "seed" in engine:
            return engine["seed"]
        return self.seed

    def _engine_idle_because(self) -> dict[str, Idle | None]:
        no_engine = why_disabled(self, "use_vllm")
        reasons = {"vllm_engine_kwargs": no_engine, "engine_check": None}
        if no_engine is not None:
            reasons["engine_check"] = Idle("use_vllm=False and no rollout_func generates", "Set use_vllm=True")
        elif self.vllm_mode == "server":
            reasons["vllm_engine_kwargs"] = Idle("vllm_mode='server'", "Give them to the server")
        return reasons

    def _engine_contradictions(self) -> Iterator[str]:
        if self.is_colocated:
            yield from self._wrong_engine_arguments()
        if not self.async_generate:
            return
        if self.METHOD == "RLOO":
            yield (
                "async_generate=True does not work with RLOO, whose trainer drops the server's log-probs, so that "
                "nothing corrects for older answers. Use GRPOTrainer, or leave it unset."
            )
        if not self.use_vllm or self.vllm_mode != "server":
            yield (
                f"async_generate=True does not work with use_vllm={self.use_vllm}, vllm_mode={self.vllm_mode!r}: only "
                "a server can generate while this process trains. Set use_vllm=True and vllm_mode='server'."
            )

    def _wrong_engine_arguments(self) -> Iterator[str]:
        given = self.vllm_engine_kwargs or {}
        assert not isinstance(given, str)  # parsed by transformers.TrainingArguments
        for name, value in given.items():
            if name in _DECIDED_BY_TRAINER:
                option = _DECIDED_BY_TRAINER[name]
                instead = f", and set {option}" if option else ""
                yield f"vllm_engine_kwargs has {name}={value!r}, which the trainer decides. Leave it out{instead}."
            is_seed = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if name == "seed" and not is_seed:
                yield f"vllm_engine_kwargs has seed={value!r}, which cannot work. Set seed to 0, 1, 2, ..."
            if name in ("quantization", "quantization_config") and value and not self.vllm_adapter_sync:
                yield (
                    f"vllm_engine_kwargs has {name}={value!r}, and a quantised engine cannot take the policy's "
                    "weights. Train a LoRA adapter and set vllm_adapter_sync=True, or leave it out."
                )
