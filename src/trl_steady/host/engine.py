"""TRL's vLLM engine, with the experts that each token has gone through."""

import base64
import functools
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trl_steady.host.names import overridden
from trl_steady.routing.replay import Routers
from trl_steady.routing.routes import from_engine

__all__ = ["RoutedGeneration", "capturing_engine"]

_FLAG = "enable_return_routed_experts"
_PARTS_WITH_FLAG = ("model_config", "aux_output_config")  # of a server's config; the second from vLLM 0.31 on
_INSTEAD = "or set router_replay='R2', which takes the routes of the trainer's own pass"


@contextmanager
def capturing_engine() -> Iterator[None]:
    """TRL's trainers built meanwhile have an engine that returns routes."""
    with overridden(grpo_trainer, {"VLLMGeneration": RoutedGeneration}):
        yield


class RoutedGeneration(VLLMGeneration):
    """TRL's, started with the capture of routes, which are kept for whoever takes them.

    Raises:
        ValueError: a model without routers; a vLLM that has no capture, or a server that was started without it; a
            colocated engine over several GPUs.
    """

    _routes: Sequence[Any] | None = None

    def _init_vllm(self) -> None:
        try:  # before an engine is, which would say it in its own way
            Routers(self.model)
        except ValueError as error:
            raise ValueError(f"router_replay='R3': {error} Leave router_replay unset.") from None
        if self.mode == "server":
            super()._init_vllm()
            if self.accelerator.is_main_process:
                server = self.vllm_client.get_server_info()
                if not any((server.get(part) or {}).get(_FLAG) for part in _PARTS_WITH_FLAG):
                    raise ValueError(
                        "router_replay='R3' needs the routes of the vLLM server, which was started without capturing "
                        f"them. Start it with --enable-return-routed-experts, {_INSTEAD}."
                    )
            return
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"router_replay='R3' with vllm_tensor_parallel_size={self.tensor_parallel_size}: one process alone "
                f"would have the routes of a colocated engine. Set vllm_mode='server', {_INSTEAD}."
            )
        # absent without vLLM, which TRL then says
        llm = getattr(vllm_generation, "LLM", None)
        engine = {} if llm is None else {"LLM": functools.partial(llm, **{_FLAG: True})}
        try:
            with overridden(vllm_generation, engine):
                super()._init_vllm()
        except TypeError as error:
            if _FLAG not in str(error):
                raise
            raise ValueError(
                f"router_replay='R3' needs a vLLM with {_FLAG}, and the one installed has none. Install a newer one "
                f"that TRL supports, {_INSTEAD}."
            ) from error

    def generate(self, prompts: Any, images: Any, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """TRL's, keeping the routes."""
        if self.mode == "colocate":
            answers: list[Any] = []
            with overridden(self.llm, {"generate": _kept(self.llm.generate, answers)}):
                result = super().generate(prompts, images, *arguments, **keywords)
            (outputs,) = answers
            self._routes = [completion.routed_experts for output in outputs for completion in output.outputs]
            return result
        if images is not None and any(images):
            raise ValueError(
                "router_replay='R3' with images, which TRL sends to a vLLM server one by one, in no order. Set "
                f"vllm_mode='colocate', {_INSTEAD}."
            )
        answers = []
        if not self.accelerator.is_main_process:
            result = super().generate(prompts, images, *arguments, **keywords)
        else:
            with overridden(self.vllm_client, {"_post": _kept(self.vllm_client._post, answers)}):
                result = super().generate(prompts, images, *arguments, **keywords)
        everywhere = [[choice.get("routed_experts") for answer in answers for choice in answer["choices"]]]
        broadcast_object_list(everywhere, from_process=0)
        first = self.accelerator.process_index * len(prompts)
        self._routes = everywhere[0][first : first + len(prompts)]
        return result

    def take_routes(self, layers: Sequence[int]) -> list[Tensor]:
        """(T - 1, L, K) of each sequence of the last `generate`, once.

        Args:
            layers: (L,) which decoder layers have routers.

        Raises:
            ValueError: the engine has returned none.
        """
        assert self._routes is not None
        routes, self._routes = self._routes, None
        missing = sum(each is None for each in routes)
        if missing:
            raise ValueError(
                f"router_replay='R3': vLLM returned no routes for {missing} of {len(routes)} sequences. Start it with "
                "--enable-return-routed-experts; some versions return none for a request that was preempted, which "
                f"more memory for the KV cache avoids; {_INSTEAD}."
            )
        return [from_engine(_decoded(each), layers=layers) for each in routes]


def _kept(function: Any, answers: list[Any]) -> Any:
    """The function, with its answers kept."""

    def keeping(*arguments: Any, **keywords: Any) -> Any:
        answers.append(function(*arguments, **keywords))
        return answers[-1]

    return keeping


def _decoded(routes: Any) -> Any:
    """An array; a server sends it as a file of NumPy's in base64."""
    return np.load(io.BytesIO(base64.b64decode(routes))) if isinstance(routes, str) else routes
