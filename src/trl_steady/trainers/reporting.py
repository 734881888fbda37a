"""Reports of every trainer: which methods are on, and whether they act."""

import warnings
from pathlib import Path
from typing import Any, TypeVar

from trl_steady.config.shared import SharedOptions
from trl_steady.host.names import default_output_dir
from trl_steady.host.part import Part
from trl_steady.trainers.active import FirstStepCheck, acting, summary
from trl_steady.trainers.card import add_methods

__all__ = ["ReportPart", "own_config"]

_C = TypeVar("_C", bound=SharedOptions)


def own_config(kind: type[_C], model: Any, args: Any) -> _C:
    """Return `args`, or a config of a class with TRL's output folder if it is None.

    Raises:
        ValueError: `args` is the config of another trainer.
    """
    method = kind.METHOD
    if args is None:
        args = kind(default_output_dir(model, method))
    if isinstance(args, kind) and method == args.METHOD:
        return args
    theirs = getattr(args, "METHOD", method)
    other = "" if theirs == method else f", or: from trl_steady import {theirs}Config, {theirs}Trainer"
    raise ValueError(
        f"trl_steady.{method}Trainer takes a trl_steady.{method}Config, and args is a {type(args).__module__}."
        f"{type(args).__qualname__}. Import both: from trl_steady import {method}Config, {method}Trainer{other}."
    )


class ReportPart(Part):
    """Says what is on, and checks that it acts."""

    def built(self) -> None:
        """Print which methods are on."""
        trainer = self.trainer
        if not trainer.reward_weights.any():
            warnings.warn(
                f"reward_weights={trainer.reward_weights.tolist()} sets all rewards to 0. Set one of the weights to a "
                "number other than 0, or leave reward_weights unset.",
                UserWarning,
                stacklevel=2,
            )
        self._first_step = FirstStepCheck(trainer)
        trainer.add_callback(self._first_step)
        if trainer.accelerator.is_main_process:  # print alone would do so on each machine
            trainer.accelerator.print(summary(trainer), flush=True)  # transformers' logger shows warnings only

    def before_last_backward(self) -> None:
        """Check that an optimizer step has reached all methods that are on."""
        self._first_step.check()

    def add_to_card(self, card: Path) -> None:
        """Add the methods that acted, and their citations."""
        add_methods(card, [method for method, acts in acting(self.trainer) if acts], self.trainer.args)
