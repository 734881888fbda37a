"""Run an unchanged script, or TRL's own, with trl-steady's trainers and configs in place of TRL's."""

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import wraps
from importlib import resources
from typing import Any, NoReturn, cast
from unittest import mock

import trl
from transformers.trainer_utils import TrainOutput

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig
from trl_steady.config.shared import SharedOptions
from trl_steady.trainers.base import SteadyTrainer
from trl_steady.trainers.grpo import GRPOTrainer
from trl_steady.trainers.ppo import PPOTrainer
from trl_steady.trainers.rloo import RLOOTrainer
from trl_steady.trl_bridge import refuse_unsupported
from trl_steady.trl_bridge.patching import patched

_SCRIPTS = tuple(str(resources.files("trl.scripts").joinpath(f"{name}.py")) for name in ("grpo", "rloo"))
_FORCED = "_forced_by_the_launcher"  # attribute of a config: the values of `--set` after its checks


@contextmanager
def swapped(settings: Mapping[str, object] | None = None, *, ppo: bool = False) -> Generator[list[type]]:
    """Replace TRL's GRPO and RLOO trainers and configs by trl-steady's in all modules of TRL.

    Args:
        settings: Options that every config gets before its checks. They override what the script passes to it.
        ppo: True to put PPO in GRPO's place.

    Yields:
        The classes of trl-steady's trainers that have been built so far.

    Raises:
        ValueError: A config of the script has no such option, or has lost its value, or is given to a trainer that is
            not trl-steady's, or several processes train, each alone.
    """
    built: list[type] = []
    build = SteadyTrainer.__init__

    @wraps(build)
    def build_and_note(
        trainer: SteadyTrainer, model: Any, reward_funcs: Any, args: Any, *positional: Any, **keywords: Any
    ) -> None:
        _refuse_changed(args)
        build(trainer, model, reward_funcs, args, *positional, **keywords)
        built.append(type(trainer))
        _refuse_processes_apart(trainer.accelerator.num_processes)

    ours: dict[str, type] = {
        "GRPOTrainer": PPOTrainer if ppo else GRPOTrainer,
        "GRPOConfig": PPOConfig if ppo else GRPOConfig,
        "RLOOTrainer": RLOOTrainer,
        "RLOOConfig": RLOOConfig,
    }
    with ExitStack() as stack:
        stack.enter_context(_forced(settings or {}))
        stack.enter_context(mock.patch.object(SteadyTrainer, "__init__", build_and_note))
        for name, replacement in ours.items():
            theirs = getattr(trl, name)  # TRL's lazy modules store the attribute from now on
            for path, module in list(sys.modules.items()):
                if path.split(".")[0] == "trl":
                    aliases = [alias for alias, value in vars(module).items() if value is theirs]
                    stack.enter_context(patched(module, dict.fromkeys(aliases, replacement)))
        yield built


@contextmanager
def _forced(settings: Mapping[str, object]) -> Generator[None]:
    """Give every config these options before its checks, however a script imports its class and derives from it."""
    check = SharedOptions.__post_init__

    @wraps(check)
    def set_and_check(config: SharedOptions) -> None:
        known = {option.name for option in fields(config)}
        for name in settings:
            if name not in known:
                raise ValueError(f"--set {name}: {config.METHOD}Config has no option {name!r}. Leave it out.")
        vars(config).update(settings)
        check(config)
        vars(config)[_FORCED] = {name: getattr(config, name) for name in settings}

    with mock.patch.object(SharedOptions, "__post_init__", set_and_check):
        yield


def _refuse_changed(config: object) -> None:
    """Raise a ValueError if an option of `--set` has another value than after the checks of this config."""
    forced: Mapping[str, object] = getattr(config, _FORCED, {})  # another object is refused by the trainer
    for name, value in forced.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"--set {name} was given, but the trainer's config has {name}={getattr(config, name)!r}. The script "
                "changes it after it has built the config. Remove that change."
            )


def run_script(
    arguments: Sequence[str],
    settings: Mapping[str, object],
    *,
    ppo: bool,
    around: AbstractContextManager[None],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Run a script, or a module after "-m", as python does. Print a message if it builds no trainer of trl-steady.

    `refuse` is called for a mistake in the command line of TRL's own scripts, such as a name that does not exist.
    """
    built: Sequence[type] = ()
    try:
        # `around` comes first: what it changes in a config is not a change by the script
        with around, swapped(settings, ppo=ppo) as built, _end_after_preemption(arguments[0]):
            _run(arguments)
    except (ValueError, OSError, ImportError, AttributeError, KeyError) as error:
        if _is_told_by_its_message(error):
            refuse(f"{type(error).__name__}: {error}")
        raise
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not built and os.environ.get("RANK", "0") == "0":
        print(
            f"trl-steady run: {sys.argv[0]} ended without building a trainer of trl-steady in this process. If it has "
            "trained, it has trained with TRL: import the trainer from trl or trl_steady. If it starts processes that "
            "train, launch them with `trl-steady run`.",
            file=sys.stderr,
        )


@contextmanager
def _end_after_preemption(script: str) -> Generator[None]:
    """Let TRL's scripts end with a training that the cluster has ended. They would save, and push, half a run."""
    train = SteadyTrainer.train

    @wraps(train)
    def train_or_end(trainer: SteadyTrainer, *arguments: Any, **keywords: Any) -> TrainOutput:
        trained = train(trainer, *arguments, **keywords)
        if trainer.preemption.is_stopping:
            sys.exit()
        return trained

    if script in _SCRIPTS:
        with mock.patch.object(SteadyTrainer, "train", train_or_end):
            yield
    else:
        yield


def _is_told_by_its_message(error: BaseException) -> bool:
    """Return True if a script of TRL's finds no reward function or no data set under a name of its command line."""
    packages: list[str] = []  # of the functions that the script's own has called
    is_inside = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_inside:
            packages.append(str(frame.f_globals.get("__name__")).split(".")[0])
        elif frame.f_code.co_name == "main" and frame.f_code.co_filename in _SCRIPTS:
            is_inside = True
    if not packages:
        return is_inside
    # in a module of the user's, the line counts
    return packages[0] == "datasets" or set(packages) == {"importlib"}


def dataclasses_of(script: str) -> list[type]:
    """Return the dataclasses that a script parses from its command line and its YAML file, and end it there."""
    kinds: list[type] = []

    def note(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        kinds.extend(getattr(parser, "dataclass_types", ()))
        sys.exit()

    parse = mock.patch.object(argparse.ArgumentParser, "parse_known_args", note)  # which all parsers call
    with swapped(), suppress(SystemExit), parse, mock.patch.object(SteadyTrainer, "train", note):
        _run([script])
    return kinds


def _run(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        _set_first_path(os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        path = os.path.abspath(sys.argv[0])
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        runpy.run_path(path, run_name="__main__")


def _set_first_path(folder: str) -> None:
    """Set where modules are looked for first, as python does."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def run_trl_command(
    command: str, arguments: Sequence[str], launch: Callable[[list[str]], object], refuse: Callable[[str], NoReturn]
) -> int:
    """Run TRL's own command, which sorts the arguments, but launch its script with `launch`, and return the status.

    Args:
        command: "grpo", "rloo", or "ppo" for TRL's "grpo" with PPO in GRPO's place.
        arguments: The arguments of the command.
        launch: Called with the options of `accelerate launch`, and a script with its arguments.
        refuse: Called with the error message of the parser.
    """
    refuse_unsupported(**{f"trl-steady {command}": True})
    from trl.cli import accelerate_launcher
    from trl.cli.main import main as trl_main
    from trl.scripts import grpo, rloo

    name = "grpo"
    script = grpo
    if command == "rloo":
        name = "rloo"
        script = rloo
    make_parser = cast(Any, script).make_parser

    def launch_instead(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        path = str(resources.files("trl.scripts").joinpath(script_name))
        options = launch_args
        if command == "ppo":
            options = ["--ppo", *launch_args]
        launch([*options, path, *training_script_args])

    def make_our_parser(prog: str) -> Any:
        parser = make_parser(None, prog=f"trl-steady {command}")
        vars(parser)["error"] = refuse
        return parser

    with (
        swapped(ppo=command == "ppo"),
        patched(accelerate_launcher, {"launch_training_script": launch_instead}),
        patched(script, {"make_parser": make_our_parser}),
    ):
        return trl_main([name, *arguments])


def _refuse_processes_apart(together: int) -> None:
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if together < started:
        raise ValueError(
            f"{started} processes were started, but each would train alone, because torch finds no GPU and the config "
            "does not ask for the CPU. Set use_cpu=True in the script, or --set use_cpu=true."
        )
