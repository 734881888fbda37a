"""Replacement of TRL's GRPO and RLOO trainers and configs by trl-steady's while an unchanged script runs."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
import trl

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig
from trl_steady.config.shared import SharedOptions
from trl_steady.host import Steady
from trl_steady.host.launching import TRAINERS, standing_in
from trl_steady.launcher.options import given_to_script, refuse_dropped, refuse_unknown
from trl_steady.trainers.grpo import GRPOTrainer
from trl_steady.trainers.ppo import PPOTrainer
from trl_steady.trainers.rloo import RLOOTrainer

__all__ = ["Swap", "swapped"]

_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")
_KEPT = "_set_by_launcher"  # attribute of a config: the options of --set, with their values after the config's checks


@dataclass
class Swap:
    """The trainers that a script has built."""

    trainers: int = 0
    """Number of trl-steady's trainers."""
    others: dict[str, None] = field(default_factory=dict)
    """Names of the other trainers, in order of construction."""


@contextmanager
def swapped(
    settings: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    target: Sequence[str] = ("SCRIPT",),
    *,
    ppo: bool = False,
) -> Iterator[Swap]:
    """Replace TRL's GRPO and RLOO trainers and configs by trl-steady's in all modules of TRL.

    Args:
        settings: Options that every config gets before its checks. They override what the script passes to it.
        arguments: The script's arguments. They may have options that the script does not read.
        target: The script, or `-m` and a module, for messages.
        ppo: True to put PPO in GRPO's place.

    Yields:
        The trainers that have been built so far.

    Raises:
        ValueError: The script builds a trainer that would train GRPO or RLOO without trl-steady, or one whose config
            lacks an option of `settings` or `arguments`, or several processes train, each alone.
    """
    swap, environment, theirs = Swap(), dict(os.environ), (trl.GRPOConfig, trl.RLOOConfig)
    any_trainer = transformers.Trainer.__init__
    options, given = dict(settings or {}), given_to_script(arguments)

    @functools.wraps(any_trainer)
    def constructed(self: Any, *positional: Any, **keywords: Any) -> None:
        if not isinstance(self, Steady):
            args = keywords.get("args", positional[1] if len(positional) > 1 else None)
            names = [base.__name__ for base in type(self).__mro__]
            if isinstance(args, theirs) or any(name.endswith(("GRPOTrainer", "RLOOTrainer")) for name in names):
                raise ValueError(_not_ours(type(self)))
            swap.others[_origin(type(self))] = None
        any_trainer(self, *positional, **keywords)

    def counting(own_trainer: Any) -> Any:
        @functools.wraps(own_trainer)
        def constructed_by_us(
            self: Any, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **keywords: Any
        ) -> None:
            _refuse_dropped(args)  # before the model is loaded
            own_trainer(self, model, reward_funcs, args, *positional, **keywords)
            _refuse_dropped(self.args)  # if args was None, the trainer has built a config
            started, together = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), self.accelerator.num_processes
            if together < started:
                raise ValueError(
                    f"{started} processes were started, but each would train alone, because torch finds no GPU and "
                    "the config does not ask for the CPU. Set use_cpu=True in the script, or --set use_cpu=true."
                )
            swap.trainers += 1
            for name in sorted(name for name, value in os.environ.items() if environment.get(name) != value):
                if name.startswith(_READ_AT_IMPORT):
                    late = f"  too late: {name} was read before the script set it. Set it in the shell"
                    self.accelerator.print(late, flush=True)

        return constructed_by_us

    def _refuse_dropped(args: Any) -> None:
        if isinstance(args, SharedOptions):
            refuse_dropped(args, vars(args).get(_KEPT, options), given, target)

    def setting(own_checks: Any) -> Any:
        @functools.wraps(own_checks)
        def checked(self: Any) -> None:
            refuse_unknown(self, options)
            vars(self).update(options)
            own_checks(self)
            vars(self)[_KEPT] = {name: getattr(self, name) for name in options}

        return checked

    hooks: list[tuple[type, str, Any]] = [(transformers.Trainer, "__init__", constructed)]
    ours = {"GRPO": (PPOTrainer, PPOConfig) if ppo else (GRPOTrainer, GRPOConfig), "RLOO": (RLOOTrainer, RLOOConfig)}
    for trainer, config in ours.values():
        hooks.append((trainer, "__init__", counting(trainer.__init__)))
        if options:
            hooks.append((config, "__post_init__", setting(config.__post_init__)))
    trainers = {f"{method}Trainer": trainer for method, (trainer, _) in ours.items()}
    configs = {f"{method}Config": config for method, (_, config) in ours.items()}
    with standing_in(**trainers, **configs), ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, hook)
        yield swap


def _not_ours(trainer: type) -> str:
    if any(base.__name__ == "AsyncGRPOTrainer" for base in trainer.__mro__):
        return (
            f"{_origin(trainer)} is TRL's own; trl-steady has only GRPOTrainer, RLOOTrainer and PPOTrainer. Run the "
            "script with python."
        )
    kept = next((base for base in trainer.__mro__ if (base.__module__, base.__qualname__) in TRAINERS), None)
    method = "RLOO" if any(base.__name__.endswith("RLOOTrainer") for base in trainer.__mro__) else "GRPO"
    why = (
        "its class, or a base of it, is TRL's own, imported before trl-steady replaced it or loaded again later"
        if kept
        else f"it is not derived from trl.{method}Trainer, or another package has replaced that class"
    )
    return (
        f"{_name(trainer)} would train {method} without trl-steady: {why}. To train with trl-steady, derive it from "
        f"trl_steady.{method}Trainer, with `from trl_steady import {method}Config, {method}Trainer` in that module. "
        "To train without trl-steady, run the script with python."
    )


def _origin(trainer: type) -> str:
    """Return the public name of a trainer, with the class of TRL or transformers that it derives from."""
    for base in trainer.__mro__:
        package = base.__module__.split(".")[0]
        if package in ("trl", "transformers"):
            public = f"{package}.{base.__name__}" if base.__module__.startswith(f"{package}.trainer") else _name(base)
            return public if base is trainer else f"{_name(trainer)} (a {public})"
    return _name(trainer)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
