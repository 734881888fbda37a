"""The command `trl-steady`, also `python -m trl_steady` and `accelerate launch -m trl_steady`."""

import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from trl_steady import __version__

__all__ = ["main"]

_HELP = """\
usage: trl-steady COMMAND ...

  run [LAUNCH OPTIONS] SCRIPT [ARGUMENTS]     run a script with trl-steady's GRPO and RLOO trainers in place of TRL's
  run [LAUNCH OPTIONS] -m MODULE [ARGUMENTS]  the same for a module
  grpo [ARGUMENTS] [LAUNCH OPTIONS]           run `trl grpo` with trl-steady's trainer and options
  rloo [ARGUMENTS] [LAUNCH OPTIONS]           the same for `trl rloo`
  ppo [ARGUMENTS] [LAUNCH OPTIONS]            run `trl grpo` with trl-steady's PPO trainer and options
  methods                                     list the methods that trl-steady adds, with settings, papers and docs
  env                                         list versions, devices and usable features, for bug reports

LAUNCH OPTIONS are those of `accelerate launch`, plus
  --set NAME=VALUE     set this option on every config of these trainers that the script builds; may be repeated
  --ppo                train with PPO where the script trains with GRPO
  --accelerate_config  a file, or the name of a config of TRL (fsdp2, multi_gpu, single_gpu, zero2, zero3, ...)
Without launch options other than --set and --ppo, `run` runs the script in this process, as python does.
`accelerate launch [LAUNCH OPTIONS] -m trl_steady run [--set NAME=VALUE] [--ppo] SCRIPT [ARGUMENTS]` does the same.

trl-steady --version prints the versions of trl-steady and of TRL.
"""
_COMMANDS = ("run", "grpo", "rloo", "ppo", "methods", "env")


class _Refused(Exception):
    """An invalid command line; only the message is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments without the program's name. The default is those of this process.

    Returns:
        The exit status.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    of_trl = command in ("grpo", "rloo", "ppo")  # these have a help of their own
    if not of_trl and {"-h", "--help"} & {command, *rest[:1]}:
        print(_HELP)
        return 0
    try:
        if of_trl or command == "run":
            return trls(command, rest) if of_trl else run(rest)
        if command == "--version":
            print(f"trl-steady {__version__}, trl {version('trl')}")
            return 0
        if command not in _COMMANDS:
            raise _Refused(_no_command(command))
        if rest:
            raise _Refused(f"{command} takes no arguments, but got {' '.join(rest)!r}.")
    except _Refused as refused:
        print(f"trl-steady: {refused}", file=sys.stderr)
        return 2
    print(methods() if command == "methods" else env())
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run a script that imports TRL's trainer, with trl-steady's in its place."""
    if not arguments:
        print(_HELP)
        return 2
    settings, ppo, rest = _leading_settings(arguments)
    if rest[0].startswith("-") and rest[0] != "-m":
        return _launch([*(["--ppo"] if ppo else []), *(f"--set={setting}" for setting in settings), *rest])
    return _run_here(rest, settings, ppo=ppo)


def trls(command: str, arguments: Sequence[str]) -> int:
    """Run TRL's `trl grpo` or `trl rloo` with trl-steady's trainer and options, or `trl grpo` with PPO."""
    from trl_steady.host import launching
    from trl_steady.launcher.swap import swapped

    ppo = ["--ppo"] if command == "ppo" else []
    script = "grpo" if ppo else command
    with swapped(ppo=bool(ppo)):
        known = [*launching.command_options(script), *_launch_options(_launch_parser())]
        names = [word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        if unknown:  # before TRL builds a config, which may raise another error
            raise _Refused(_unrecognized(unknown, known))
        return launching.trls(
            script, command, arguments, lambda given, target: _launch([*ppo, *given, *target], known), _refuse
        )


def methods() -> str:
    """Return the table of the methods that trl-steady adds."""
    from trl_steady.config.methods import METHODS

    rows = [("", "method", "setting", "arXiv", "docs/"), *(method[:5] for method in METHODS)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def env() -> str:
    """Return the versions, devices and usable features for a bug report."""
    from trl_steady.launcher.environment import report

    return report()


def _no_command(command: str) -> str:
    from trl_steady.config.spelling import near

    if Path(command).is_file():
        return f"no command {command!r}. Did you mean trl-steady run {command}?"
    return f"no command {command!r}.{near(command, _COMMANDS, '{}')} trl-steady --help lists the commands."


def _leading_settings(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return the settings of leading `--set` options, whether `--ppo` is among them, and the other arguments."""
    settings, ppo, rest = [], False, list(arguments)
    while rest and rest[0].split("=")[0] in ("--set", "--ppo"):
        first = rest.pop(0)
        if first == "--ppo":
            ppo = True
            continue
        if first == "--set" and not rest:
            raise _Refused("--set needs NAME=VALUE.")
        settings.append(rest.pop(0) if first == "--set" else first.removeprefix("--set="))
    if not rest:
        raise _Refused("there is no script after --set.")
    return settings, ppo, rest


def _parsed_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of `--set` by name."""
    if not settings:
        return {}
    from trl_steady.launcher.options import parse_settings

    try:
        return parse_settings(settings)
    except ValueError as error:
        raise _Refused(str(error)) from None


def _refuse(message: str) -> NoReturn:
    """Refuse arguments with the parser's message, but without its long usage text."""
    raise _Refused(f"{message}.")


def _unrecognized(names: Sequence[str], known: Sequence[str]) -> str:
    from trl_steady.config.spelling import near

    hints = "".join(dict.fromkeys(near(name, known, "--{}") for name in names))
    return f"unrecognized arguments: {' '.join(f'--{name}' for name in names)}.{hints}"


def _launch_parser() -> Any:
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--accelerate_config")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--ppo", action="store_true")
    return parser


def _launch_options(parser: Any) -> list[str]:
    return re.findall(r"--(\w+)", parser.format_usage())


def _launch(arguments: Sequence[str], known: Sequence[str] = ()) -> int:
    """Run `accelerate launch` on `trl-steady run` with the script.

    Args:
        arguments: Launch options, then the script and its arguments.
        known: Names to suggest for a misspelt option, in addition to the launch options.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trl_steady.host.launching import accelerate_launch, resolve_accelerate_config_argument

    parser = _launch_parser()

    def refuse(message: str) -> NoReturn:
        unknown = re.findall(r" --?([\w-]+)", message.partition("unrecognized arguments:")[2])
        if not unknown:
            _refuse(message)
        hints = _unrecognized(unknown, [*known, *_launch_options(parser)])
        raise _Refused(hints if known else hints + _behind(unknown))

    parser.error = refuse
    launched = parser.parse_args(arguments)
    if launched.accelerate_config is not None:
        config = ["--accelerate_config", launched.accelerate_config]
        try:
            _, launched.config_file = resolve_accelerate_config_argument(config)
        except ValueError as error:
            raise _Refused(str(error)) from None
    _parsed_settings(launched.settings)
    target = [*(["-m"] if launched.module else []), launched.training_script]
    if not _is_there(target):
        raise _Refused(f"no such script: {launched.training_script!r}")
    settings = [f"--set={setting}" for setting in launched.settings]
    ppo = ["--ppo"] if launched.ppo else []
    launched.training_script_args = ["run", *ppo, *settings, *target, *launched.training_script_args]
    launched.module, launched.training_script = True, "trl_steady"
    try:
        accelerate_launch(launched, _refuse)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        print(
            f"trl-steady: process {rank} failed with exit code {first.exitcode}. See its error above.", file=sys.stderr
        )
        raise SystemExit(1) from None
    return 0


def _behind(names: Sequence[str]) -> str:
    """Return a sentence that tells where to put options of a config; "" if none of the names is one."""
    from trl_steady.launcher.options import is_option

    ours = [name for name in names if is_option(name)]
    return f" Write --{ours[0]} after the script, or --set {ours[0]}=VALUE before it." if ours else ""


def _is_there(target: Sequence[str]) -> bool:
    """Return True if the script exists or a module is named, which Python looks up only when it runs."""
    return len(target) > 1 if target[0] == "-m" else Path(target[0]).is_file()


def _run_here(arguments: list[str], settings: Sequence[str], *, ppo: bool) -> int:
    if not _is_there(arguments):
        raise _Refused("-m needs a module" if arguments[0] == "-m" else f"no such script: {arguments[0]!r}")
    options = _parsed_settings(settings)
    from trl_steady.launcher.swap import swapped

    is_module = arguments[0] == "-m"
    target, sys.argv = arguments[: is_module + 1], arguments[is_module:]
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:  # as python does
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        with swapped(options, sys.argv[1:], target, ppo=ppo) as swap:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not swap.trainers and os.environ.get("RANK", "0") == "0":
        print(f"trl-steady run: {target[-1]} {_without_ours(list(swap.others))}", file=sys.stderr)
    return 0


def _without_ours(trainers: Sequence[str]) -> str:
    """Return the final message for a script that has built no trainer of trl-steady's."""
    if trainers:
        whose = "TRL's own" if all("trl." in trainer for trainer in trainers) else "not trl-steady's"
        verb = "is" if len(trainers) == 1 else "are"
        ours = "trl-steady has only GRPOTrainer, RLOOTrainer and PPOTrainer"
        return f"trained with {' and '.join(trainers)}, which {verb} {whose}; {ours}."
    return (
        "ended without building trl-steady's GRPOTrainer or RLOOTrainer in this process. If the script starts "
        "training processes, launch them with `trl-steady run` or `accelerate launch -m trl_steady run`, or import "
        "GRPOConfig and GRPOTrainer from trl_steady. Otherwise they train with plain TRL."
    )
