"""The policy as an engine: it samples through TRL, with other routers or a truncated distribution, with log-probs.

Because TRL's own generation samples, routes and kept tokens are recorded as they always are. A `Sampler` has neither.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LogitsProcessor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe.probe import changed, routed
from stress.samplers import ROUNDINGS
from trl_steady.trl_bridge.generation import last_logits_processor

__all__ = ["ROUTERS", "Engine"]

SCORED = 32  # answers of a rollout whose routes are compared


def _in_bf16(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear(hidden.bfloat16(), weight.bfloat16())


def _in_fp8(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply what is rounded to e4m3, with one scale for each token and each expert. Return bf16, as kernels do."""
    e4m3 = ROUNDINGS["e4m3"]
    return linear(e4m3(hidden), e4m3(weight)).bfloat16()


ROUTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"float32": linear, "bf16": _in_bf16, "fp8": _in_fp8}
"""Number formats of a router. Each takes hidden states and weight, and returns logits (tokens, experts)."""


class Engine:
    """The policy in the place of an engine.

    Args:
        noise: Size of normal noise on the weights of the routers, in standard deviations of each. Every rollout of
            every seed has its own.
        routers: Number format of the routers, a key of `ROUTERS`.
    """

    def __init__(self, noise: float = 0.0, routers: str = "float32") -> None:
        self.noise, self.logits = noise, ROUTERS[routers]
        self.routes_otherwise = noise != 0.0 or routers != "float32"

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module, seed: int) -> Iterator[None]:
        """Let the routers of a Qwen3-MoE choose as the engine's inside this context. `seed` is that of the noise."""
        if not self.routes_otherwise:
            yield
            return
        generator = torch.Generator().manual_seed(seed)
        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        for router in routers:
            noise = torch.randn(router.weight.shape, generator=generator).to(router.weight.device)
            weight = router.weight.detach() + self.noise * router.weight.detach().std() * noise
            router.forward = partial(self._route, router, weight)
        try:
            yield
        finally:
            for router in routers:
                del router.forward

    def _route(self, router: Qwen3MoeTopKRouter, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and indices of the chosen experts, as the router does, with another weight."""
        logits = self.logits(hidden.reshape(-1, hidden.size(-1)), weight)
        values, experts = logits.softmax(-1, torch.float).topk(router.top_k, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        return logits, values, experts

    @torch.no_grad()
    def rerouted(self, model: Any, seed: int, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
        """Return the share of experts that the engine chose and the policy would not, on some answers of a rollout."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts[:SCORED], answers[:SCORED], strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
        is_token = torch.arange(longest, device=model.device) < torch.tensor([[len(row)] for row in rows]).to(ids)
        with routed(model) as own:
            model(input_ids=ids)
        with self.running(model, seed), routed(model) as engines:
            model(input_ids=ids)
        return changed(own, engines, is_token)

    @contextlib.contextmanager
    def scoring(self, model: Any) -> Iterator["Scores"]:
        """Collect the log-probs of the distribution that the model samples from, as an engine's processed ones."""
        scores = Scores()
        with last_logits_processor(model, scores, lambda config: None):
            yield scores


class Scores(LogitsProcessor):
    """Keeps the log-probs of each step of a generation: (answers, vocabulary)."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Keep what the next token is drawn from."""
        self.steps.append(scores.float().log_softmax(-1))
        return scores

    def of(self, answers: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs of the tokens of each answer."""
        steps = torch.stack(self.steps, dim=1)
        found = []
        for own, ids in zip(steps, answers, strict=True):
            tokens = torch.tensor(ids, device=own.device)[:, None]
            found.append(own[: len(ids)].gather(-1, tokens)[:, 0].tolist())
        return found
