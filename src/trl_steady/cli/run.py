"""Run an unchanged script, or TRL's own, with trl-steady's trainers and configs in place of TRL's."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import resources
from typing import Any, NoReturn, cast
from unittest import mock

import trl

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


@contextmanager
def swapped(settings: Mapping[str, object] | None = None, *, ppo: bool = False) -> Generator[list[type]]:
    """Replace TRL's GRPO and RLOO trainers and configs by trl-steady's in all modules of TRL.

    Args:
        settings: Options that every config gets before its checks. They override what the script passes to it.
        ppo: True to put PPO in GRPO's place.

    Yields:
        The classes of trl-steady's trainers that have been built so far.

    Raises:
        ValueError: A config of the script has lost an option of `settings`, or is given to a trainer that is not
            trl-steady's, or several processes train, each alone.
    """
    built = list[type]()

    def note(trainer: SteadyTrainer) -> None:
        built.append(type(trainer))
        _refuse_processes_apart(trainer.accelerator.num_processes)

    ours: dict[str, type] = {
        "GRPOTrainer": PPOTrainer if ppo else GRPOTrainer,
        "GRPOConfig": PPOConfig if ppo else GRPOConfig,
        "RLOOTrainer": RLOOTrainer,
        "RLOOConfig": RLOOConfig,
    }
    before = SharedOptions.forced
    SharedOptions.forced = dict(settings or {})
    SteadyTrainer.when_built.append(note)
    try:
        with ExitStack() as stack:
            for name, replacement in ours.items():
                theirs = getattr(trl, name)  # TRL's lazy modules store the attribute from now on
                for module in [module for path, module in sys.modules.items() if path.split(".")[0] == "trl"]:
                    names = [found for found, value in vars(module).items() if value is theirs]
                    stack.enter_context(patched(module, dict.fromkeys(names, replacement)))
            yield built
    finally:
        SharedOptions.forced = before
        SteadyTrainer.when_built.remove(note)


def run_script(
    arguments: Sequence[str], settings: Mapping[str, object], *, ppo: bool, around: AbstractContextManager[None]
) -> None:
    """Run a script, or a module after "-m", as python does. Print a message if it builds no trainer of trl-steady."""
    built: Sequence[type] = ()
    try:
        with swapped(settings, ppo=ppo) as built, around:
            _run(arguments)
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


def dataclasses_of(script: str) -> list[type]:
    """Return the dataclasses that a script parses from its command line and its YAML file, and end it there."""
    found: list[type] = []

    def note(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        found.extend(getattr(parser, "dataclass_types", ()))
        sys.exit()

    parse = mock.patch.object(argparse.ArgumentParser, "parse_known_args", note)  # which all parsers call
    with swapped(), suppress(SystemExit), parse, mock.patch.object(SteadyTrainer, "train", note):
        _run([script])
    return found


def _run(arguments: Sequence[str]) -> None:
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[is_module:])
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:  # as python does
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(path, run_name="__main__")


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

    name, script = ("rloo", rloo) if command == "rloo" else ("grpo", grpo)
    make_parser = cast(Any, script).make_parser
    ppo = ["--ppo"] if command == "ppo" else []

    def launch_instead(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        path = str(resources.files("trl.scripts").joinpath(script_name))
        launch([*ppo, *launch_args, path, *training_script_args])

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
