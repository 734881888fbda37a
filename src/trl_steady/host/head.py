"""What TRL's fused LM head is asked for, answered by somebody else."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import trl.trainer.utils
from torch import Tensor

from trl_steady.host.names import overridden

__all__ = ["Head", "Scores", "scored_by"]

Scores = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""(N,) each: log-probs, entropies, and what GRPO does not ask for."""


@dataclass(frozen=True)
class Head:
    """A question to TRL's fused LM head, of `N` positions.

    On a GPU these are the positions with a label, elsewhere all, with token 0 in the place of a missing label.
    """

    hidden: Tensor
    """(N, H)"""
    weight: Tensor
    """(V, H), whole where it is sharded."""
    bias: Tensor | None
    """(V,)"""
    targets: Tensor
    """(N,)"""
    temperature: float
    chunk_size: int
    softcap: float | None
    logit_scale: float
    outputs: tuple[str, ...]

    def own(self) -> Scores:
        """TRL's answer."""
        return _OWN.apply(*vars(self).values())

    @staticmethod
    def gathered(weight: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
        """Context in which parameters are whole that DeepSpeed's ZeRO-3 has sharded."""
        parameters: Any = (weight, bias)
        return trl.trainer.utils.maybe_gather_lm_head_ctx(*parameters)


_OWN: Any = trl.trainer.utils._ChunkedLogProbFunction


@contextmanager
def scored_by(answer: Callable[[Head], Scores]) -> Iterator[None]:
    """Have the fused heads of all models answer so meanwhile."""
    head = SimpleNamespace(apply=lambda *arguments: answer(Head(*arguments)))
    with overridden(trl.trainer.utils, {"_ChunkedLogProbFunction": head}):
        yield
