"""Replacement of TRL's trainer classes in all modules of TRL and behind its `grpo` and `rloo` commands."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from typing import Any, NoReturn

import trl
from trl.cli import accelerate_launcher
from trl.cli.main import main as trl_main
from trl.scripts import grpo, rloo

from trl_steady.trl_bridge.private import patched

_SCRIPTS: dict[str, Any] = {"grpo": grpo, "rloo": rloo}


@contextmanager
def replaced_in_trl(**classes: type) -> Iterator[None]:
    """Replace classes of TRL, by name, in `trl` and in all of its loaded modules."""
    with ExitStack() as stack:
        for name, stand_in in classes.items():
            theirs = getattr(trl, name)  # TRL's lazy modules store the attribute from now on
            for module in [module for path, module in sys.modules.items() if path.split(".")[0] == "trl"]:
                names = [found for found, value in vars(module).items() if value is theirs]
                stack.enter_context(patched(module, dict.fromkeys(names, stand_in)))
        yield


def run_trl_command(
    command: str, arguments: Sequence[str], launch: Callable[[list[str]], object], refuse: Callable[[str], NoReturn]
) -> int:
    """Run TRL's own command, which sorts the arguments, but launch its script with `launch`, and return the status.

    Args:
        command: "grpo", "rloo", or "ppo" for TRL's "grpo".
        arguments: The arguments of the command.
        launch: Called with the options of `accelerate launch`, and a script with its arguments.
        refuse: Called with the error message of the parser.
    """
    script = "rloo" if command == "rloo" else "grpo"

    def instead(script_name: str, launch_args: list[str], training_script_args: list[str]) -> None:
        launch([*launch_args, str(resources.files("trl.scripts").joinpath(script_name)), *training_script_args])

    def make_parser(prog: str) -> Any:
        parser = theirs(None, prog=f"trl-steady {command}")
        vars(parser)["error"] = refuse
        return parser

    theirs = _SCRIPTS[script].make_parser
    with (
        patched(accelerate_launcher, {"launch_training_script": instead}),
        patched(_SCRIPTS[script], {"make_parser": make_parser}),
    ):
        return trl_main([script, *arguments])
