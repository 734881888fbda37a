"""Reports of every trainer: which methods are on, and whether they act."""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import cast

import trl

from trl_steady import __version__
from trl_steady.config.methods import METHODS, Method
from trl_steady.config.shared import SharedOptions
from trl_steady.host.names import OF_ROLLOUTS, is_before_generation, overrides
from trl_steady.host.part import Part, Trainer
from trl_steady.losses.old_pass import OldPassPart


class ReportPart(Part):
    """Says what is on, and raises an error if a subclass, a mixin or a patch keeps it from taking effect.

    The check ends with the first optimizer step whose rollout was made in this run.
    """

    _has_generated = False
    _is_checked = False

    def built(self) -> None:
        """Print which methods are on."""
        if self.trainer.accelerator.is_main_process:  # print alone would do so on each machine
            self.trainer.accelerator.print(summary(self.trainer), flush=True)  # transformers' logger shows warnings

    def stepping(self) -> None:
        """Check the step before, unless that has been done: a script may override `training_step`."""
        if self._has_generated:
            self._check()
        self._has_generated |= is_before_generation(cast(trl.GRPOTrainer, self.trainer))

    def after_last_backward(self) -> None:
        """Check that the step has reached all methods that are on."""
        self._check()

    def ending(self, best: Path | None) -> None:
        """Check the last step, unless that has been done."""
        if self._has_generated:
            self._check()

    def _check(self) -> None:
        """Raise if an option had no effect; warn if the option is on by default.

        Raises:
            ValueError: The message names the overrides and the options.
        """
        if self._is_checked:
            return
        self._is_checked = self._has_generated
        trainer, args = self.trainer, self.trainer.args
        awaited = frozenset() if self._has_generated else OF_ROLLOUTS
        lost: dict[Method, list[str]] = {}
        for method in METHODS:
            missing = [name for name in method.acts_in if name not in trainer.reached and name not in awaited]
            if missing and method.is_on(trainer):
                lost[method] = missing
        asked = {method: names for method, names in lost.items() if not _is_default(method, args)}
        shown = asked or lost
        names = dict.fromkeys(name for missing in shown.values() for name in missing)
        found = dict.fromkeys(override for name in names for override in overrides(trainer, name))
        message = (
            f"{' and '.join(found) or 'a patch'} kept the first optimizer step from trl-steady's "
            f"{' and '.join(names)}, so this would have no effect: "
            f"{'; '.join(_described(method, args) for method in shown)}. Call super() in every step, or leave "
            "these options at their defaults."
        )
        if asked:
            raise ValueError(message)
        if lost and trainer.accelerator.is_main_process:
            warnings.warn(message, UserWarning, stacklevel=2)


def summary(trainer: Trainer) -> str:
    """Return a line with the trainer's class and a line for each active method with its options."""
    kind, args = type(trainer), trainer.args
    name = f"{kind.__module__}.{kind.__qualname__}"
    base = "" if kind.__module__.startswith("trl_steady.") else f" on trl_steady.{args.METHOD}Trainer"
    loss = f", loss_type={args.loss_type!r}" if args.METHOD != "RLOO" else ""
    lines = [f"trl-steady {__version__}, trl {version('trl')}: {name}{base}{loss}"]
    idle = {message.partition("=")[0] for message in args.cannot_act}
    acting = [method for method in METHODS if method.is_on(trainer) and idle.isdisjoint(method.options)]
    lines += [f"  on: {_described(method, args)}" for method in acting]
    lines += [] if acting else ["  on: nothing, it trains like TRL's trainer"]
    if why_not := trainer.part(OldPassPart).why_not:
        lines.append(f"  off: no pass of the old policy: {why_not}")
    return "\n".join(lines)


def _described(method: Method, args: SharedOptions) -> str:
    return f"{method.name}: {', '.join(method.settings(args))}"


def _is_default(method: Method, args: SharedOptions) -> bool:
    return all(getattr(args, option) == getattr(type(args), option) for option in method.options)
