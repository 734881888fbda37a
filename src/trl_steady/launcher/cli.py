"""The command `trl-steady`, also `python -m trl_steady` and `accelerate launch -m trl_steady`."""

import argparse
import functools
import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from trl_steady import __version__

_HELP = """\
usage: trl-steady COMMAND ...

  run [LAUNCH OPTIONS] SCRIPT [ARGUMENTS]     run a script with trl-steady's GRPO and RLOO trainers in place of TRL's
  run [LAUNCH OPTIONS] -m MODULE [ARGUMENTS]  the same for a module
  grpo [ARGUMENTS] [LAUNCH OPTIONS]           run `trl grpo` with trl-steady's trainer and options
  rloo [ARGUMENTS] [LAUNCH OPTIONS]           the same for `trl rloo`
  ppo [ARGUMENTS] [LAUNCH OPTIONS]            run `trl grpo` with trl-steady's PPO trainer and options
  methods                                     list the methods that trl-steady adds, with settings, papers and docs
  env                                         list versions and devices, for bug reports

LAUNCH OPTIONS are those of `accelerate launch`, plus
  --set NAME=VALUE     set this option on every config of these trainers that the script builds; may be repeated
  --ppo                train with PPO where the script trains with GRPO
  --accelerate_config  a file, or the name of a config of TRL (fsdp2, multi_gpu, single_gpu, zero2, zero3, ...)
Without launch options other than --set and --ppo, `run` runs the script in this process, as python does.
`accelerate launch [LAUNCH OPTIONS] -m trl_steady run [--set NAME=VALUE] [--ppo] SCRIPT [ARGUMENTS]` does the same.

trl-steady --version prints the versions of trl-steady and of TRL.
"""


class _Refused(Exception):
    """An invalid command line; only the message is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return the exit status."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    of_trl = command in ("grpo", "rloo", "ppo")  # these have a help of their own
    if not of_trl and {"-h", "--help"} & {command, *rest[:1]}:
        print(_HELP)
        return 0
    try:
        if of_trl:
            return trls(command, rest)
        if command == "run":
            return run(rest)
        if command not in _TABLES or rest:
            from trl_steady.host.mistakes import near

            unknown = " ".join([command, *rest])
            raise _Refused(f"no command {unknown!r}.{near(command, _COMMANDS)} trl-steady --help lists the commands.")
    except _Refused as refused:
        print(f"trl-steady: {refused}", file=sys.stderr)
        return 2
    print(_TABLES[command]())
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run a script that imports TRL's trainer, with trl-steady's in its place."""
    settings, ppo, rest = _leading_settings(arguments)
    if not rest:
        raise _Refused("run needs a script. trl-steady --help lists the commands.")
    if rest[0].startswith("-") and rest[0] != "-m":
        return _launch([*(["--ppo"] if ppo else []), *(f"--set={setting}" for setting in settings), *rest])
    return _run_in_this_process(rest, settings, ppo=ppo)


def trls(command: str, arguments: Sequence[str]) -> int:
    """Run TRL's `trl grpo` or `trl rloo` with trl-steady's trainer and options, or `trl grpo` with PPO."""
    from trl_steady.launcher import trl_commands
    from trl_steady.launcher.swap import swapped

    ppo = ["--ppo"] if command == "ppo" else []
    script = "grpo" if ppo else command
    with swapped(ppo=bool(ppo)):
        known = [*trl_commands.command_options(script), *_launch_options(_launch_parser())]
        names = [word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
        unknown = [f"--{name}" for name in names if not any(option.startswith(name) for option in known)]
        if unknown:  # before TRL builds a config, which may raise another error
            _refuse(known, f"unrecognized arguments: {' '.join(unknown)}")

        def launch(given: Sequence[str], target: Sequence[str]) -> int:
            return _launch([*ppo, *given, *target], known)

        return trl_commands.trls(script, command, arguments, launch, functools.partial(_refuse, known))


def methods() -> str:
    """Return the table of the methods that trl-steady adds."""
    from trl_steady.config.methods import METHODS

    rows = [("", "method", "setting", "arXiv", "docs/"), *(method[:5] for method in METHODS)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def env() -> str:
    """Return the versions for a bug report."""
    from trl_steady.launcher.environment import report

    return report()


def versions() -> str:
    """Return the versions of trl-steady and of TRL."""
    return f"trl-steady {__version__}, trl {version('trl')}"


_TABLES = {"methods": methods, "env": env, "--version": versions}
_COMMANDS = ("run", "grpo", "rloo", "ppo", *_TABLES)


def _leading_settings(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return the settings of leading `--set` options, whether `--ppo` is among them, and the other arguments."""
    settings, ppo, rest = [], False, list(arguments)
    while rest and rest[0].split("=")[0] in ("--set", "--ppo"):
        first = rest.pop(0)
        if first == "--ppo":
            ppo = True
        elif first == "--set" and not rest:
            raise _Refused("--set needs NAME=VALUE.")
        else:
            settings.append(rest.pop(0) if first == "--set" else first.removeprefix("--set="))
    return settings, ppo, rest


def _parsed_settings(settings: Sequence[str]) -> dict[str, object]:
    """Return the options of `--set` by name."""
    if not settings:
        return {}
    from trl_steady.launcher.options import parse_settings

    try:
        return parse_settings(settings)
    except ValueError as error:
        raise _Refused(str(error)) from None


def _refuse(known: Sequence[str], message: str) -> NoReturn:
    """Refuse arguments with the parser's message, but without its usage text, and suggest a known option."""
    from trl_steady.host.mistakes import near

    unknown = re.findall(r" --?([\w-]+)", message.partition("unrecognized arguments:")[2])
    raise _Refused(f"{message}.{''.join(dict.fromkeys(near(name, known, '--{}') for name in unknown))}")


def _launch_parser() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--accelerate_config")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--ppo", action="store_true")
    return parser


def _launch_options(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"--(\w+)", parser.format_usage())


def _launch(arguments: Sequence[str], known: Sequence[str] = ()) -> int:
    """Run `accelerate launch` on `trl-steady run` with the script.

    Args:
        arguments: Launch options, then the script and its arguments.
        known: Names to suggest for a misspelt option, in addition to the launch options.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser = _launch_parser()
    vars(parser)["error"] = functools.partial(_refuse, [*known, *_launch_options(parser)])
    launched = parser.parse_args(arguments)
    if launched.accelerate_config is not None:
        try:
            _, launched.config_file = resolve_accelerate_config_argument(
                ["--accelerate_config", launched.accelerate_config]
            )
        except ValueError as error:
            raise _Refused(str(error)) from None
    _parsed_settings(launched.settings)
    target = [*(["-m"] if launched.module else []), launched.training_script]
    _refuse_missing(target)
    settings = [f"--set={setting}" for setting in launched.settings]
    ppo = ["--ppo"] if launched.ppo else []
    launched.training_script_args = ["run", *ppo, *settings, *target, *launched.training_script_args]
    launched.module, launched.training_script = True, "trl_steady"
    launched.quiet = True  # no traceback of accelerate's below the script's own
    try:
        launch_command(launched)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        print(f"trl-steady: process {rank} failed with exit code {first.exitcode}, see above.", file=sys.stderr)
        raise SystemExit(1) from None
    return 0


def _refuse_missing(target: Sequence[str]) -> None:
    """Refuse a script that does not exist. Python looks up a module only when it runs."""
    if target[-1] == "-m" or (target[0] != "-m" and not Path(target[0]).is_file()):
        raise _Refused(f"no such script: {target[-1]!r}")


def _run_in_this_process(arguments: list[str], settings: Sequence[str], *, ppo: bool) -> int:
    _refuse_missing(arguments)
    options = _parsed_settings(settings)
    from trl_steady.launcher.swap import swapped

    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:  # as python does
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        with swapped(options, ppo=ppo) as swap:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not swap.trainers and os.environ.get("RANK", "0") == "0":
        others = f"It built {' and '.join(swap.others)}. " if swap.others else ""
        print(
            f"trl-steady run: {sys.argv[0]} ended without building a GRPOTrainer or RLOOTrainer in this process. "
            f"{others}If the script starts processes that train, launch them with `trl-steady run`. Otherwise they "
            "train with plain TRL.",
            file=sys.stderr,
        )
    return 0
