"""Reports of every trainer: which methods are on, and whether they act."""

from pathlib import Path
from typing import Any, TypeVar

from trl_steady.config.methods import METHODS, methods_on
from trl_steady.host.inputs import refuse_inputs
from trl_steady.host.models import text_tokenizer
from trl_steady.host.names import default_output_dir
from trl_steady.host.part import Part
from trl_steady.trainers.active import FirstStepCheck, summary
from trl_steady.trainers.card import add_methods

__all__ = ["InputsPart", "ReportPart", "own_config"]

_C = TypeVar("_C")


def own_config(kind: type[_C], method: str, model: Any, args: Any) -> _C:
    """Return `args`, or a config with TRL's output folder for a method such as "GRPO" if it is None.

    Raises:
        ValueError: `args` is of another class.
    """
    if args is None:
        args = kind(default_output_dir(model, method))  # pyright: ignore[reportCallIssue]
    if not isinstance(args, kind):
        raise ValueError(
            f"args is a {type(args).__module__}.{type(args).__qualname__}, which has none of trl_steady's options. "
            f"Import {method}Config from trl_steady too: from trl_steady import {method}Config, {method}Trainer."
        )
    return args


class InputsPart(Part):
    """Refuses data, tokenizers and reward functions with which the first rollout or an evaluation would fail."""

    def built(self) -> None:
        """Refuse what does not fit."""
        refuse_inputs(self.trainer, text_tokenizer(self.trainer))


class ReportPart(Part):
    """Says what is on, and checks that it acts."""

    def built(self) -> None:
        """Print which methods are on."""
        trainer = self.trainer
        self._first_step = FirstStepCheck(trainer)
        trainer.add_callback(self._first_step)
        if trainer.accelerator.is_main_process:  # print alone would do so on each machine
            trainer.accelerator.print(summary(trainer), flush=True)  # transformers' logger shows warnings only

    def before_last_backward(self) -> None:
        """Check that an optimizer step has reached all methods that are on."""
        self._first_step.check()

    def add_to_card(self, card: Path) -> None:
        """Add the methods that were on, and their citations."""
        trainer = self.trainer
        has_steps = getattr(trainer, "has_step_rewards", False)  # no option tells
        active = methods_on(trainer.args)
        on = [method for method in METHODS if method in active or (has_steps and method.kind == "rewards")]
        add_methods(card, on, trainer.args)
