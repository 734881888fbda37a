"""Ours in the place of TRL's `GRPOTrainer` and `GRPOConfig`, while a script runs that knows TRL's only."""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
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
from trl_steady.idle import cannot_act
from trl_steady.methods import METHODS
from trl_steady.trainer import GRPOTrainer

__all__ = ["Swap", "swapped"]

# before a script may put its own into our class
_OURS: dict[str, Any] = {name: inspect.getattr_static(GRPOTrainer, name) for name in CONTRACT.parameters}
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")


@dataclass
class Swap:
    """What has come of it."""

    trainers: int = 0
    """How many of ours were built."""


@contextmanager
def swapped() -> Iterator[Swap]:
    """Whatever is imported from TRL meanwhile has our trainer and our config; each trainer says what it trains with.

    Raises:
        ValueError: where GRPO would be trained by a trainer that is not ours all the same, or where a script replaces
            a method in which something that is asked for would act; when the trainer is constructed.
    """
    swap, environment, theirs = Swap(), dict(os.environ), trl.GRPOConfig
    any_trainer, own_trainer = transformers.Trainer.__init__, GRPOTrainer.__init__

    @functools.wraps(any_trainer)
    def constructed(self: Any, *arguments: Any, **keywords: Any) -> None:
        any_trainer(self, *arguments, **keywords)
        is_grpo = isinstance(self.args, theirs) or any(b.__name__.endswith("GRPOTrainer") for b in type(self).__mro__)
        if is_grpo and not isinstance(self, GRPOTrainer):
            raise ValueError(_not_ours(type(self)))

    @functools.wraps(own_trainer)
    def constructed_by_us(self: GRPOTrainer, *arguments: Any, **keywords: Any) -> None:
        own_trainer(self, *arguments, **keywords)
        swap.trainers += 1
        late = [name for name, value in os.environ.items() if environment.get(name) != value]
        self.accelerator.print("\n".join(_said(self) + _too_late(late)), flush=True)

    with standing_in(GRPOTrainer=GRPOTrainer, GRPOConfig=GRPOConfig), ExitStack() as stack:
        hooks: dict[type, Any] = {transformers.Trainer: constructed, GRPOTrainer: constructed_by_us}
        for trainer, hook in hooks.items():
            stack.callback(setattr, trainer, "__init__", trainer.__init__)
            setattr(trainer, "__init__", hook)  # noqa: B010
        yield swap


def _not_ours(trainer: type) -> str:
    kept = any((base.__module__, base.__qualname__) == TRAINER for base in trainer.__mro__)
    why = (
        "its class, or one that it is derived from, is TRL's own, from before it was replaced or loaded again since"
        if kept
        else "it is not derived from trl.GRPOTrainer, or from what another package has put in its place"
    )
    return (
        f"{_name(trainer)} would train GRPO without trl-steady: {why}. To train with trl-steady, derive it from "
        "trl_steady.GRPOTrainer, with `from trl_steady import GRPOConfig, GRPOTrainer` in that module; to train "
        "without, run the script with python."
    )


def _said(trainer: GRPOTrainer) -> list[str]:
    """Which trainer, and which methods.

    Raises:
        ValueError: the script replaces what one of them acts in.
    """
    kind, args = type(trainer), trainer.args
    bases = "" if kind is GRPOTrainer else " on trl_steady.GRPOTrainer"
    lines = [f"trl-steady {__version__}, trl {version('trl')}: {_name(kind)}{bases}, loss_type={args.loss_type!r}"]
    has_engine = trainer.use_vllm or trainer.rollout_func is not None
    warned = [*cannot_act(args), *([] if has_engine else args.idle_without_engine)]
    named: dict[str, None] = {}
    for method in METHODS:
        if not method.is_on(args):
            continue
        asked = f"{method.name}: {', '.join(f'{option}={getattr(args, option)!r}' for option in method.options)}"
        replaced = [name for name in method.acts_in if _replaces(kind, name, method.acts_in)]
        named |= dict.fromkeys(replaced)
        if replaced and method.kind != "passes":
            raise ValueError(
                f"{_name(kind)} replaces {' and '.join(replaced)}, where it would have to act, what is asked for: "
                f"{asked}. Call what it replaces, as by super(), or leave {', '.join(method.options)} at TRL's "
                "defaults."
            )
        idle = any(message.startswith(f"{option}=") for option in method.options for message in warned)
        how = "cannot act" if idle else "off" if replaced else "on"
        lines.append(f"  {how}: {asked}")
    if len(lines) == 1:
        lines.append("  on: nothing, it trains as TRL's does")
    named |= dict.fromkeys(name for name in CONTRACT.parameters if _replaces(kind, name, [name]))
    return lines + [f"  off: what trl-steady does in {name}, which {_name(kind)} replaces" for name in named]


def _too_late(variables: Collection[str]) -> list[str]:
    names = sorted(name for name in variables if name.startswith(_READ_AT_IMPORT))
    return [f"  too late: {name}, read before the script has set it. Set it in the shell" for name in names]


def _replaces(trainer: type, method: str, enough: Collection[str]) -> bool:
    """Whether a class has, in the place of ours, one that calls none of these."""
    for base in trainer.__mro__:
        own = vars(base).get(method)
        if own is _OURS[method]:
            break
        if own is not None and not _calls(getattr(own, "__func__", own), {*enough}, _OURS[method]):
            return True
    return False


def _calls(function: Callable[..., Any], names: set[str], ours: Any) -> bool:
    """By name, as with `super()`, or ours, kept aside by what has replaced it."""
    function = inspect.unwrap(function, stop=lambda inner: inner is ours)
    if function is ours or not inspect.isfunction(function):
        return function is ours
    used = inspect.getclosurevars(function)
    kept_aside = any(value is ours for value in [*used.nonlocals.values(), *used.globals.values()])
    return kept_aside or _mentions(function.__code__, names)


def _mentions(code: CodeType, names: set[str]) -> bool:
    return not names.isdisjoint(code.co_names) or any(
        _mentions(part, names) for part in code.co_consts if isinstance(part, CodeType)
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
