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

from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor

from trl_steady.core.engine import (
    AdapterSync,
    EngineExtra,
    GenerationResult,
    NamedWeights,
    NotServedError,
    SendRequest,
)
from trl_steady.core.metrics import Clock
from trl_steady.core.processes import first_reason, own_rows
from trl_steady.core.user_warning import warn_user
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.trl_state import TRAINER_MODULES
from trl_steady.trl_bridge.vllm_seeds import FIRST_SEED, ask, client_for, engine_seed, with_seeds

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration
else:  # where TRL's trainers look it up; `names.toml` refuses engines if it has moved
    VLLMClient, VLLMGeneration = object, getattr(TRAINER_MODULES[0], "VLLMGeneration", object)
vllm_generation = sys.modules[VLLMGeneration.__module__]


@contextmanager
def steady_engine(
    extras: Sequence[EngineExtra], sync: AdapterSync | None, clock: Clock, engine_kwargs: Mapping[str, object]
) -> Generator[None]:
    """Give each of TRL's trainers that is built inside this context an engine of ours, with these arguments of vLLM's.

    Raises:
        ValueError: vLLM cannot be built with the data that a feature wants, or with these arguments.
    """
    build = functools.partial(SteadyGeneration, extras=extras, sync=sync, clock=clock, engine_kwargs=engine_kwargs)
    grpo, rloo = TRAINER_MODULES
    with patched(grpo, {"VLLMGeneration": build}), patched(rloo, {"VLLMGeneration": build}):
        yield


class SteadyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` that stores data of its tokens until they are taken, and may get an adapter alone.

    Raises:
        ValueError: A colocated engine of several GPUs has to return extra data. The engine cannot serve the adapter,
            and merged weights will not do.
    """

    active_sync: AdapterSync | None = None
    """Sends the adapter alone, which the engine has taken; None if all weights are sent."""
    respond: Callable[[SendRequest, Mapping[str, Any]], GenerationResult] | None = None
    """Returns the result of a request, which its first argument would send. It is set on the main process only."""
    before_sync: Callable[[], None] | None = None
    """Is called before other weights or another adapter are sent."""
    first_seed: int | None = None
    """Seed of the first completion of a call, with one more for each further one; None for vLLM's own draws."""

    def __init__(
        self,
        *arguments: Any,
        extras: Sequence[EngineExtra],
        clock: Clock,
        sync: AdapterSync | None = None,
        engine_kwargs: Mapping[str, object] = MappingProxyType({}),
        **keywords: Any,
    ) -> None:
        self._extras = extras
        self._clock = clock
        self._wanted_sync = sync
        self._engine_kwargs = engine_kwargs
        self._extra_values: dict[str, list[Any]] = {}
        super().__init__(*arguments, **keywords)

    def _init_vllm(self) -> None:
        """Build the engine for the adapter alone, or for merged weights if it cannot serve the adapter."""
        sync = self._wanted_sync
        if sync is None or not is_peft_model(self.model):
            self._build({})
            return
        flags: dict[str, object] = {}
        why_not: str | None = None
        if self._dist.fsdp_version == 1:
            why_not = "version 1 of FSDP does not gather an adapter"
        else:
            try:
                flags = sync.prepare(self)
            except NotServedError as reason:
                why_not = str(reason)
        if why_not := first_reason(why_not):
            self._merge_instead(sync, why_not)
            self._build({})
            return
        self._build(flags)
        try:
            self._send_adapter(sync)
        except Exception as error:  # vLLM's own, of any type
            why_not = f"vLLM refuses the adapter: {error!s}"
        if why_not := first_reason(why_not):
            self._merge_instead(sync, why_not)
            return
        self.active_sync = sync
        if self.mode == "colocate":
            self._add_adapter_to_requests()

    def _merge_instead(self, sync: AdapterSync, why_not: str) -> None:
        """Warn that the engine gets merged weights, or refuse that."""
        if sync.is_required(self):
            raise ValueError(
                "vLLM has to serve the adapter alone (vllm_adapter_sync=True, or a quantised policy with "
                f"vllm_mode='colocate'), and cannot: {why_not}. Change that, or let the policy itself generate "
                "(use_vllm=False). An unquantised policy may also get merged weights (vllm_adapter_sync=False)."
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
        flags = dict(adapter_flags)
        options: list[str] = []
        for extra in self._extras:
            flags[extra.flag] = True
            options.append(extra.option)
        if self._engine_kwargs:
            options.append(f"vllm_engine_kwargs={self._engine_kwargs!r}")
        llm_class = cast(Any, getattr(vllm_generation, "LLM", object))  # missing if vLLM is; TRL then raises an error

        def build(**trl_arguments: Any) -> Any:
            own = dict(self._engine_kwargs)
            if "seed" in own:
                engines = self.accelerator.num_processes // self.tensor_parallel_size
                own["seed"] = engine_seed(cast(int, own["seed"]), trl_arguments["seed"], engines)
            try:
                llm = llm_class(**{**flags, **trl_arguments, **own})
            except (TypeError, ValueError) as error:
                if not options:
                    raise
                raise ValueError(
                    f"{', '.join(options)}: vLLM cannot be built. Change what it names, or leave the option out: "
                    f"{error}"
                ) from error
            if adapter_flags and self.enable_sleep_mode:
                _keep_weights_in_sleep(llm)
            return llm

        with patched(vllm_generation, {"LLM": build}):
            super()._init_vllm()

    def _send_adapter(self, sync: AdapterSync) -> None:
        """Send the adapter as it is now to an engine whose weights are awake, as TRL does with weights."""
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            vllm_generation.empty_cache()  # so that the weights fit
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self._adapter_request = sync.send(self)

    def _add_adapter_to_requests(self) -> None:
        """Let vLLM's `generate` and `chat` use the adapter, also when a `rollout_func` calls them.

        A caller may pass another `lora_request`. A server gets the adapter's name with each request instead.
        """

        def with_request(call: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
            keywords.setdefault("lora_request", self._adapter_request)  # of the last sync
            return call(*arguments, **keywords)

        for name in ("generate", "chat"):
            if hasattr(self.llm, name):
                vars(self.llm)[name] = functools.partial(with_request, getattr(self.llm, name))

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Return a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
        return self._dist.gather_params(parameters)

    def replace_weights(self, weights: Callable[[NamedWeights], Iterator[tuple[str, Tensor]]]) -> None:
        """Send `weights(trl_weights)` from now on, in place of `trl_weights()`, the named weights that TRL sends."""
        vars(self)["_iter_named_params"] = functools.partial(weights, self._iter_named_params)

    def sync_weights(self) -> None:
        """Send the policy's weights, or its adapter alone."""
        with self._clock.phase("sync"):
            if self.before_sync is not None:
                self.before_sync()
            if self.active_sync is None:
                super().sync_weights()
            else:
                self._send_adapter(self.active_sync)

    def generate(self, prompts: list[Any], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Generate as TRL does, with seeds, and store the extra data."""
        generate = functools.partial(super().generate, prompts, *arguments, **keywords)
        if not self._extras and self.respond is None and self.first_seed is None:
            return generate()
        if self.mode == "colocate":
            return self._generate_here(generate)
        return self._generate_on_server(generate, len(prompts))

    def _generate_here(self, generate: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        results: list[Any] = []
        generate_here = _recorded(self.llm.generate, results)  # TRL drops the extra data
        if self.first_seed is not None:
            generate_here = with_seeds(generate_here, self.first_seed)
        with patched(self.llm, {"generate": generate_here}):
            result = generate()
        (outputs,) = results
        completions: list[object] = []
        for output in outputs:
            completions.extend(output.outputs)
        self._extra_values = self._compacted(completions)
        return result

    def _generate_on_server(self, generate: Callable[[], tuple[Any, ...]], prompts: int) -> tuple[Any, ...]:
        on_main: list[dict[str, list[Any]]] = [{}]
        if not self.accelerator.is_main_process:
            result = generate()
        else:
            send = functools.partial(self.send_request, copy.copy(self.vllm_client))
            respond = self.respond

            def answer(**request: Any) -> dict[str, Any]:
                if self.first_seed is not None:
                    request[FIRST_SEED] = self.first_seed
                response = send(request) if respond is None else respond(send, request)
                on_main[0] = response.extras
                return response.output

            with patched(self.vllm_client, {"generate": answer}):  # all that TRL's engine asks of its client
                result = generate()
        if self._extras:
            broadcast_object_list(on_main, from_process=0)
            own = own_rows(self.accelerator, prompts)
            self._extra_values = {field: values[own] for field, values in on_main[0].items()}
        return result

    def _compacted(self, completions: Sequence[object]) -> dict[str, list[Any]]:
        """Return the extra data of completions, field by field."""
        by_field: dict[str, list[Any]] = {}
        for extra in self._extras:
            values: list[Any] = []
            for completion in completions:
                value = getattr(completion, extra.field, None)
                values.append(None if value is None else extra.compact(value))
            by_field[extra.field] = values
        return by_field

    def send_request(self, client: VLLMClient, request: Mapping[str, Any]) -> GenerationResult:
        """Send a request with a client of TRL's, which does not change. A thread needs a client of its own."""
        client = client_for(client, request)
        if not self._extras:
            return GenerationResult(ask(client, request), {})
        needs_tokens_endpoint = any(extra.needs_tokens_endpoint for extra in self._extras)
        if needs_tokens_endpoint and request.get("features") is None:
            request = {**request, "features": [None] * len(request["prompts"])}  # features select the endpoint
        responses: list[Any] = []
        vars(client)["_post"] = _recorded(client._post, responses)  # the JSON, of which TRL's client drops the data
        output = ask(client, request)
        # responses may come in any order; their token lists are the same objects as in TRL's output
        choices: dict[int, dict[str, Any]] = {}
        for response in responses:
            for choice in response["choices"]:
                choices[id(choice["token_ids"])] = choice
        completions = [SimpleNamespace(**choices[id(ids)]) for ids in output["completion_ids"]]
        return GenerationResult(output, self._compacted(completions))

    def take(self, extra: EngineExtra) -> list[Any]:
        """Return the extra data of each completion of the last `generate`, and forget them.

        Raises:
            ValueError: The engine has returned none for a completion.
        """
        values = self._extra_values.pop(extra.field, [])
        missing = sum(value is None for value in values)
        if missing:
            raise ValueError(
                f"{extra.option}: vLLM returned no {extra.label} for {missing} of {len(values)} sequences. "
                f"{extra.fix_hint}"
            )
        return values


@contextmanager
def record_log_probs(engine: VLLMGeneration) -> Generator[list[tuple[Any, ...]]]:
    """Let TRL's engine return log-probs, which RLOO's trainer does not ask for. Give what it returns, as a list."""
    results: list[tuple[Any, ...]] = []
    generate = _recorded(engine.generate, results)
    with patched(engine, {"logprobs": engine.logprobs or 0, "generate": generate}):
        yield results


def _recorded(function: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """Wrap a function so that its results are appended to `results`."""

    def call(*arguments: object, **keywords: object) -> Any:
        result = function(*arguments, **keywords)
        results.append(result)  # several threads may do this at once
        return result

    return call


def _keep_weights_in_sleep(llm: Any) -> None:
    """Let an engine that sleeps move its weights to the CPU. TRL's level drops them, and nobody sends the base."""
    sleep = llm.sleep

    def sleep_lightly(level: int = 1, *mode: object, **others: object) -> Any:
        return sleep(min(level, 1), *mode, **others)

    vars(llm)["sleep"] = sleep_lightly
