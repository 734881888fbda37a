"""Replacement of TRL's trainer classes in all modules of TRL and behind its `grpo` and `rloo` commands."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from typing import Any, NoReturn

import trl
from trl.cli import accelerate_launcher
from trl.cli.main import main as trls_command
from trl.scripts import grpo, rloo

from trl_steady.host.names import overridden

TRAINERS = {("trl.trainer.grpo_trainer", "GRPOTrainer"): "GRPO", ("trl.trainer.rloo_trainer", "RLOOTrainer"): "RLOO"}
"""Module and name of TRL's own trainers, which also identify them in a module that was loaded again -> method."""

_SCRIPTS: dict[str, Any] = {"grpo": grpo, "rloo": rloo}

Launch = Callable[[Sequence[str], Sequence[str]], object]


@contextmanager
def replaced_in_trl(**classes: type) -> Iterator[None]:
    """Replace classes of TRL, by name, in `trl` and in all of its loaded modules."""
    with ExitStack() as stack:
        for name, stand_in in classes.items():
            theirs = getattr(trl, name)  # TRL's lazy modules store the attribute from now on
            for module in [module for path, module in sys.modules.items() if path.split(".")[0] == "trl"]:
                names = [own for own, value in vars(module).items() if value is theirs]
                stack.enter_context(overridden(module, dict.fromkeys(names, stand_in)))
        yield


def command_options(command: str) -> list[str]:
    """Return the names of the options that TRL's command, "grpo" or "rloo", reads itself."""
    usage = _SCRIPTS[command].make_parser().format_usage()
    return ["help", "config", "accelerate_config", *re.findall(r"--(\w+)", usage)]


def trls(command: str, name: str, arguments: Sequence[str], launch: Launch, refuse: Callable[[str], NoReturn]) -> int:
    """Run TRL's own command, which sorts the arguments, but launch its script with `launch`.

    Args:
        command: "grpo" or "rloo".
        name: The command of ours that the usage text names.
        arguments: The arguments of the command.
        launch: Called with the options of `accelerate launch`, and a script with its arguments.
        refuse: Called with the error message of the parser.

    Returns:
        The exit status.
    """

    def instead(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        script = resources.files("trl.scripts").joinpath(script_name)
        launch(launch_args, [str(script), *training_script_args])

    def make_parser(prog: str) -> Any:
        parser = theirs(None, prog=f"trl-steady {name}")
        vars(parser)["error"] = refuse
        return parser

    theirs = _SCRIPTS[command].make_parser
    with (
        overridden(accelerate_launcher, {"launch_training_script": instead}),
        overridden(_SCRIPTS[command], {"make_parser": make_parser}),
    ):
        return trls_command([command, *arguments])
