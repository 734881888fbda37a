"""Ours in the place of TRL's `GRPOTrainer` and `GRPOConfig`, while a script runs that knows TRL's only."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import CodeType
from typing import Any

import transformers
import trl

from trl_steady import __version__
from trl_steady.config import GRPOConfig
from trl_steady.host import CONTRACT
from trl_steady.host.launching import TRAINER, standing_in
from trl_steady.methods import METHODS
from trl_steady.trainer import GRPOTrainer

__all__ = ["Swap", "swapped"]

_LOSS = ("compute_loss", "_compute_loss")
_IN_THE_LOSS = ("loss", "KL", "mask")  # kinds of methods


@dataclass
class Swap:
    """What has come of it."""

    trainers: int = 0
    """How many of ours were built."""


@contextmanager
def swapped() -> Iterator[Swap]:
    """Whatever is imported from TRL meanwhile has our trainer and our config; each trainer says what it trains with.

    Raises:
        ValueError: where GRPO would be trained by a trainer that is not ours all the same, or by a loss that makes
            those of our options idle that are set; when it is constructed.
    """
    swap, own, theirs = Swap(), transformers.Trainer.__init__, trl.GRPOConfig

    @functools.wraps(own)
    def constructed(self: Any, *arguments: Any, **keywords: Any) -> None:
        own(self, *arguments, **keywords)
        if isinstance(self, GRPOTrainer):
            swap.trainers += 1
            self.accelerator.print(_active(self), flush=True)
        elif isinstance(self.args, theirs) or any(_is_grpo(base) for base in type(self).__mro__):
            raise ValueError(_not_ours(type(self)))

    with standing_in(GRPOTrainer=GRPOTrainer, GRPOConfig=GRPOConfig):
        transformers.Trainer.__init__ = constructed
        try:
            yield swap
        finally:
            transformers.Trainer.__init__ = own


def _is_grpo(base: type) -> bool:
    return base.__name__.endswith("GRPOTrainer")


def _not_ours(trainer: type) -> str:
    kept = any((base.__module__, base.__qualname__) == TRAINER for base in trainer.__mro__)
    why = (
        "its class, or one that it is derived from, is TRL's own, from before it was replaced or loaded again since"
        if kept
        else "it is not derived from trl.GRPOTrainer, or from what another package has put in its place"
    )
    return (
        f"{_name(trainer)} would train GRPO without trl-steady: {why}. Derive it from trl_steady.GRPOTrainer, with "
        "`from trl_steady import GRPOConfig, GRPOTrainer` in that module, or run the script with python to train "
        "without trl-steady."
    )


def _active(trainer: GRPOTrainer) -> str:
    """Which trainer, and which methods."""
    kind, args = type(trainer), trainer.args
    bases = "" if kind is GRPOTrainer else " on trl_steady.GRPOTrainer"
    lines = [f"trl-steady {__version__}, trl {version('trl')}: {_name(kind)}{bases}, loss_type={args.loss_type!r}"]
    on = [method for method in METHODS if method.is_on(args)]
    lines += [f"  on: {method.name}: {method.setting}" for method in on] or ["  on: nothing, it trains as TRL's does"]
    replaced = [name for name in CONTRACT.parameters if _replaces(kind, name)]
    idle = [method.name for method in on if method.kind in _IN_THE_LOSS]
    if idle and any(name in _LOSS for name in replaced):
        raise ValueError(
            f"{_name(kind)} replaces {' and '.join(replaced)}, and with it the loss in which {', '.join(idle)} would "
            "act. Call super() there, or leave these options at TRL's defaults."
        )
    if replaced:
        lines.append(f"  off: what trl-steady does in {', '.join(replaced)}, which {_name(kind)} replaces")
    return "\n".join(lines)


def _replaces(trainer: type, method: str) -> bool:
    """Whether a class below ours has its own, in which nothing of that name is called."""
    for base in trainer.__mro__[: trainer.__mro__.index(GRPOTrainer)]:
        if method in vars(base):
            code = getattr(inspect.unwrap(getattr(base, method)), "__code__", None)
            return code is not None and not _mentions(code, method)
    return False


def _mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_mentions(part, name) for part in code.co_consts if isinstance(part, CodeType))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
