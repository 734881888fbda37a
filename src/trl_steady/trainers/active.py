"""Summary of a trainer's active methods, and a check before the first optimizer step that they take effect."""

import warnings
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from transformers import TrainerCallback

from trl_steady import __version__
from trl_steady.config.methods import Method, methods_on
from trl_steady.host.names import is_before_generation

if TYPE_CHECKING:
    from trl_steady.config.shared import SharedOptions
    from trl_steady.host import Steady

__all__ = ["PATIENCE", "FirstStepCheck", "summary"]

PATIENCE = 10
"""Number of optimizer steps after which an override must have called `super()`, if it calls it conditionally."""


def summary(trainer: "Steady") -> str:
    """Return a line with the trainer's class and a line for each active method with its options."""
    kind, args = type(trainer), cast(Any, trainer.args)
    name = f"{kind.__module__}.{kind.__qualname__}"
    base = "" if kind.__module__.startswith("trl_steady.") else f" on trl_steady.{args.METHOD}Trainer"
    loss = f", loss_type={args.loss_type!r}" if args.METHOD != "RLOO" else ""
    lines = [f"trl-steady {__version__}, trl {version('trl')}: {name}{base}{loss}"]
    lines += [f"  {'on' if acts else 'cannot act'}: {_described(method, args)}" for method, acts in acting(trainer)]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  on: nothing, it trains like TRL's trainer"])


def acting(trainer: "Steady") -> Iterator[tuple[Method, bool]]:
    """Yield each active method of the trainer, with False if a warning has said that it has no effect."""
    args = cast(Any, trainer.args)
    has_engine = trainer.use_vllm or trainer.rollout_func is not None
    warned = [*args.cannot_act, *([] if has_engine else args.idle_without_engine)]
    for method in methods_on(trainer):
        yield method, not any(message.startswith(f"{option}=") for option in method.options for message in warned)


class FirstStepCheck(TrainerCallback):
    """Raise an error if a subclass, a mixin or a patch keeps an option from taking effect.

    The trainer runs this check before the backward pass of the last micro-batch of each optimizer step, because
    DeepSpeed takes its step in backward. As a callback it also runs before each optimizer step, because the user may
    override `training_step`. The check ends after the first step whose rollout was made in this run.

    An override may call `super()` under a condition, for example only for groups that have an advantage. If the first
    step does not make this call, the override gets a warning, and has `PATIENCE` steps to make it.
    """

    def __init__(self, trainer: "Steady") -> None:
        self._trainer, self._has_generated, self._is_done = trainer, False, False
        self._steps, self._warned = 0, set[str]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record whether this step begins with a new rollout, and does not continue the rollout of a checkpoint."""
        self._has_generated |= is_before_generation(self._trainer)
        self._steps += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Run the check on the methods that this step has reached."""
        self.check()

    def check(self) -> None:
        """Raise if an option had no effect in this optimizer step; warn if the option is on by default.

        Raises:
            ValueError: The message names the class, the method that it overrides, the option and its value.
        """
        if self._is_done:
            return
        lost: dict[str, list[Method]] = {}
        args = cast(Any, self._trainer.args)
        for method in methods_on(self._trainer):
            for name in self._trainer.reached.missing(method.acts_in, has_generated=self._has_generated):
                lost.setdefault(name, []).append(method)
        by_default = {method for methods in lost.values() for method in methods if _is_default(method, args)}
        waits = False
        for name, methods in lost.items():
            asked = [method for method in methods if method not in by_default]
            why, way_out = self._trainer.reached.why(name)
            options = [option for method in asked or methods for option in method.options]
            names = " and ".join(dict.fromkeys(options))
            unset = f"leave {names} at TRL's defaults" if asked else f"switch off {names}"
            message = (
                f"{why}, so this would have no effect: {'; '.join(_described(m, args) for m in asked or methods)}. "
                f"{way_out}, or {unset}."
            )
            is_conditional = self._steps <= PATIENCE and self._trainer.reached.calls_super(name)
            if asked and not is_conditional:
                raise ValueError(message)
            waits |= bool(asked)
            if self._trainer.accelerator.is_main_process and name not in self._warned:
                so_far = f"In the first optimizer step {message} This becomes an error after {PATIENCE} such steps."
                warnings.warn(so_far if asked else message, UserWarning, stacklevel=2)
            self._warned.add(name)
        self._is_done = self._has_generated and not waits


def _described(method: Method, args: "SharedOptions") -> str:
    return f"{method.name}: {', '.join(method.settings(args))}"


def _is_default(method: Method, args: "SharedOptions") -> bool:
    defaults = {option.name: option.default for option in fields(args)}
    return all(getattr(args, option) == defaults[option] for option in method.options)
