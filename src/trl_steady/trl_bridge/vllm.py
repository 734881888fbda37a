"""TRL's vLLM engine, extended to return further data of the tokens that it generates, and to take an adapter alone.

This file knows how TRL builds an engine, sends it weights and lets it generate. It knows neither the data nor the
adapter.
"""

import copy
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from trl_steady.core.engine import AdapterSync, EngineOutput, GenerationResult, NamedWeights, SendRequest
from trl_steady.core.feature import warn_user
from trl_steady.core.metrics import Clock
from trl_steady.core.processes import own_rows
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import TRAINER_MODULES

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration
else:  # where TRL's trainers look it up; `names.toml` refuses engines if it has moved
    VLLMClient, VLLMGeneration = object, getattr(TRAINER_MODULES[0], "VLLMGeneration", object)
vllm_generation = sys.modules[VLLMGeneration.__module__]


@contextmanager
def steady_engine(
    extras: Sequence[EngineOutput], sync: AdapterSync | None, clock: Clock, given: Mapping[str, object]
) -> Generator[None]:
    """Give each of TRL's trainers that is built inside this context an engine of ours, with these arguments of vLLM's.

    Raises:
        ValueError: vLLM cannot be built with the data that a feature wants, or with these arguments.
    """

    def build(*arguments: Any, model: PreTrainedModel | PeftModel, **keywords: Any) -> VLLMGeneration:
        ours = {"extras": extras, "sync": sync if is_peft_model(model) else None, "clock": clock, "given": given}
        return SteadyGeneration(*arguments, model=model, **ours, **keywords)

    grpo, rloo = TRAINER_MODULES
    with patched(grpo, {"VLLMGeneration": build}), patched(rloo, {"VLLMGeneration": build}):
        yield


class SteadyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` that stores data of its tokens until they are taken, and may get an adapter alone.

    Raises:
        ValueError: A colocated engine of several GPUs has to return extra data. The engine cannot serve the adapter,
            and merged weights will not do.
    """

    adapter: AdapterSync | None = None
    """Sends the adapter; None if all weights are sent."""
    respond: Callable[[SendRequest, Mapping[str, Any]], GenerationResult] | None = None
    """Returns the result of a request, which its first argument would send. It is set on the main process only."""
    before_sync: Callable[[], None] | None = None
    """Is called before other weights or another adapter are sent."""

    def __init__(
        self,
        *arguments: Any,
        extras: Sequence[EngineOutput],
        clock: Clock,
        sync: AdapterSync | None = None,
        given: Mapping[str, object] = MappingProxyType({}),
        **keywords: Any,
    ) -> None:
        self._extras, self._clock, self._sync, self._given = extras, clock, sync, given
        self._extra_values: dict[str, list[Any]] = {}
        super().__init__(*arguments, **keywords)

    def _init_vllm(self) -> None:
        sync = self._sync
        if sync is None:
            self._build({})
            return
        is_fsdp1 = self._dist.fsdp_version == 1
        why_not = "version 1 of FSDP does not gather an adapter" if is_fsdp1 else sync.why_not(self)
        if why_not := first_reason(why_not):
            self._merge_instead(sync, why_not)
            self._build({})
            return
        self._build(sync.flags(self))
        try:
            sync.send(self)
        except Exception as error:  # vLLM's own, of any type
            why_not = f"vLLM refuses the adapter: {error!s}"
        if why_not := first_reason(why_not):
            self._merge_instead(sync, why_not)
        else:
            self.adapter = sync
            sync.attach(self)

    def _merge_instead(self, sync: AdapterSync, why_not: str) -> None:
        """Warn that the engine gets merged weights, or refuse that."""
        if sync.is_required(self):
            raise ValueError(
                f"{sync.option}: {why_not}. Change that, or let the policy itself generate (use_vllm=False). An "
                "unquantised policy may also get merged weights (vllm_adapter_sync=False)."
            )
        warn_user(
            f"vLLM gets all weights with the adapter merged, because {why_not}. Set vllm_adapter_sync=False to send "
            "merged weights without this warning."
        )

    def _build(self, adapter_flags: dict[str, object]) -> None:
        """Build TRL's engine in this process, with the user's arguments over TRL's, or connect to the server."""
        if self.mode == "server":
            super()._init_vllm()
            return
        if self._extras and self.tensor_parallel_size > 1:
            extra = self._extras[0]
            raise ValueError(
                f"{extra.option} with vllm_tensor_parallel_size={self.tensor_parallel_size}: a colocated engine "
                f"returns the {extra.label} to one process only. Set vllm_mode='server'."
            )
        flags = {**adapter_flags, **{extra.flag: True for extra in self._extras}}
        llm_class = cast(Any, getattr(vllm_generation, "LLM", object))  # missing if vLLM is; TRL then raises an error
        given = [f"vllm_engine_kwargs={self._given!r}"] if self._given else []
        options = ", ".join([extra.option for extra in self._extras] + given)
        errors = (TypeError, ValueError) if options else ()

        def build(**trl_arguments: object) -> Any:
            try:
                llm = llm_class(**{**flags, **trl_arguments, **self._given})
            except errors as error:
                raise ValueError(
                    f"{options}: vLLM cannot be built. Change what it names, or leave the option out: {error}"
                ) from error
            if adapter_flags and self.enable_sleep_mode:
                sleep = llm.sleep  # move weights to the CPU: TRL's level drops them, and nobody would send the base
                vars(llm)["sleep"] = lambda level=1, *mode, **others: sleep(min(level, 1), *mode, **others)
            return llm

        with patched(vllm_generation, {"LLM": build}):
            super()._init_vllm()

    def whole(self, parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
        return self._dist.gather_params(parameters)

    def replace_weights(self, weights: Callable[[NamedWeights], Iterator[tuple[str, Tensor]]]) -> None:
        """Send `weights(trl_weights)` from now on, in place of `trl_weights()`, the named weights that TRL sends."""
        vars(self)["_iter_named_params"] = functools.partial(weights, self._iter_named_params)

    def wake_weights(self) -> None:
        """Wake the weights of a colocated engine that sleeps, as TRL does before it sends others."""
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            vllm_generation.empty_cache()  # so that the weights fit
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def sync_weights(self) -> None:
        """Send the policy's weights, or its adapter alone."""
        with self._clock.phase("sync"):
            if self.before_sync is not None:
                self.before_sync()
            if self.adapter is None:
                super().sync_weights()
            else:
                self.adapter.send(self)

    def generate(self, prompts: list[Any], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Generate as TRL does, and store the extra data."""
        if not self._extras and self.respond is None:
            return super().generate(prompts, *arguments, **keywords)
        if self.mode == "colocate":
            results: list[Any] = []
            with patched(self.llm, {"generate": _recorded(self.llm.generate, results)}):  # TRL drops the extra data
                result = super().generate(prompts, *arguments, **keywords)
            (outputs,) = results
            self._extra_values = self._compacted([completion for output in outputs for completion in output.outputs])
            return result
        on_main: list[dict[str, list[Any]]] = [{}]
        if not self.accelerator.is_main_process:
            result = super().generate(prompts, *arguments, **keywords)
        else:
            send = functools.partial(self.send_request, copy.copy(self.vllm_client))

            def generate(**request: Any) -> dict[str, Any]:
                output, on_main[0] = send(request) if self.respond is None else self.respond(send, request)
                return output

            with patched(self.vllm_client, {"generate": generate}):  # all that TRL's engine asks of its client
                result = super().generate(prompts, *arguments, **keywords)
        if self._extras:
            broadcast_object_list(on_main, from_process=0)
            own = own_rows(self.accelerator, len(prompts))
            self._extra_values = {field: values[own] for field, values in on_main[0].items()}
        return result

    def _compacted(self, completions: Sequence[object]) -> dict[str, list[Any]]:
        """Return the extra data of completions, field by field."""
        found: dict[str, list[Any]] = {}
        for extra in self._extras:
            values = [getattr(completion, extra.field, None) for completion in completions]
            found[extra.field] = [None if value is None else extra.compact(value) for value in values]
        return found

    def send_request(self, client: VLLMClient, request: Mapping[str, Any]) -> GenerationResult:
        """Send a request with a client of TRL's, which does not change. A thread needs a client of its own."""
        if not self._extras:
            return GenerationResult(client.generate(**request), {})
        if request.get("features") is None and any(extra.needs_tokens_endpoint for extra in self._extras):
            request = {**request, "features": [None] * len(request["prompts"])}  # features select the endpoint
        responses: list[Any] = []
        client = copy.copy(client)
        vars(client)["_post"] = _recorded(client._post, responses)  # the JSON, of which TRL's client drops the data
        output = client.generate(**request)
        # responses may come in any order; their token lists are the same objects as in TRL's output
        choices = {id(choice["token_ids"]): choice for response in responses for choice in response["choices"]}
        completions = [SimpleNamespace(**choices[id(ids)]) for ids in output["completion_ids"]]
        return GenerationResult(output, self._compacted(completions))

    def take(self, extra: EngineOutput) -> list[Any]:
        """Return the extra data of each completion of the last `generate`, and forget them.

        Raises:
            ValueError: The engine has returned none for a completion.
        """
        values = self._extra_values.pop(extra.field, [])
        missing = sum(each is None for each in values)
        if missing:
            raise ValueError(
                f"{extra.option}: vLLM returned no {extra.label} for {missing} of {len(values)} sequences. "
                f"{extra.fix_hint}"
            )
        return values


def first_reason(reason: str | None) -> str | None:
    """Return the first reason of any process, so that all decide alike. Otherwise they would wait for one another."""
    return next(filter(None, gather_object([reason])), None)


@contextmanager
def record_log_probs(engine: VLLMGeneration) -> Generator[list[tuple[Any, ...]]]:
    """Let TRL's engine return log-probs, which RLOO's trainer does not ask for. Give what it returns, as a list."""
    results: list[tuple[Any, ...]] = []
    with patched(engine, {"logprobs": engine.logprobs or 0, "generate": _recorded(engine.generate, results)}):
        yield results


def _recorded(function: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """Wrap a function so that its results are appended to `results`."""

    def call(*arguments: object, **keywords: object) -> Any:
        result = function(*arguments, **keywords)
        results.append(result)  # several threads may do this at once
        return result

    return call


def add_to_requests(llm: Any, lora_request: Callable[[], object]) -> None:
    """Let vLLM's `generate` and `chat` pass what `lora_request()` returns, unless the caller passes another one."""

    def with_request(call: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
        return call(*arguments, **{"lora_request": lora_request(), **keywords})

    for name in ("generate", "chat"):
        if hasattr(llm, name):
            vars(llm)[name] = functools.partial(with_request, getattr(llm, name))
