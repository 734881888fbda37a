"""The command `trl-steady`, also `python -m trl_steady` and `accelerate launch -m trl_steady`."""

import argparse
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn, cast

from trl_steady import __version__
from trl_steady.cli.mistakes import wrong_options

SKILL = Path(__file__).parents[1] / ".agents/skills/trl-steady/SKILL.md"
"""The skill for coding agents. They look for it in this folder of an installed package."""
_HELP = """\
usage: trl-steady COMMAND ...

  run [LAUNCH OPTIONS] SCRIPT [ARGUMENTS]     run a script with trl-steady's GRPO and RLOO trainers in place of TRL's
  run [LAUNCH OPTIONS] -m MODULE [ARGUMENTS]  the same for a module
  grpo [ARGUMENTS] [LAUNCH OPTIONS]           run `trl grpo` with trl-steady's trainer and options
  rloo [ARGUMENTS] [LAUNCH OPTIONS]           the same for `trl rloo`
  ppo [ARGUMENTS] [LAUNCH OPTIONS]            run `trl grpo` with trl-steady's PPO trainer and options
  report PATH ... [--json] [--fail-on LEVEL] [--watch]
                                              say what is wrong with a run, from its log; also for runs of plain TRL
  methods                                     list the methods that trl-steady adds, with settings, papers and docs
  schema [SCRIPT ...]                         print a JSON schema of the YAML files for --config, for editors; with the
                                              options that these scripts parse
  env                                         list versions and devices, for bug reports, and the path of the skill for
                                              coding agents

LAUNCH OPTIONS are those of `accelerate launch`, plus
  --set NAME=VALUE     set this option on every config of these trainers that the script builds; may be repeated
  --ppo                train with PPO where the script trains with GRPO
  --accelerate_config  a file, or the name of a config of TRL (fsdp2, multi_gpu, single_gpu, zero2, zero3, ...)
With --dry-run, `run`, `grpo`, `rloo` and `ppo` build everything, print the arithmetic of the run, and train nothing.
--dry-run=step also takes one optimizer step. Nothing is saved.
Without launch options other than --set and --ppo, `run` runs the script in this process, as python does.
`accelerate launch [LAUNCH OPTIONS] -m trl_steady run [--set NAME=VALUE] [--ppo] SCRIPT [ARGUMENTS]` does the same.

trl-steady --version prints the versions of trl-steady and of TRL.
"""


class _Refused(Exception):
    """An invalid command line; only the message is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return the exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    if not arguments:
        arguments = ["--help"]
    command = arguments[0]
    rest = list(arguments[1:])
    is_trl_command = command in ("grpo", "rloo", "ppo")
    dry_run: list[str] = []
    if is_trl_command or command == "run":
        dry_run = [word for word in rest if word in _DRY_RUNS]
        rest = [word for word in rest if word not in _DRY_RUNS]
    has_own_help = is_trl_command or command == "report"
    asks_for_help = command in _HELP_OPTIONS or (bool(rest) and rest[0] in _HELP_OPTIONS)
    if asks_for_help and not has_own_help:
        print(_HELP)
        return 0
    try:
        if is_trl_command:
            return run_trl_command(command, rest, dry_run)
        if command == "run":
            return run(rest, dry_run)
        if command == "report":
            from trl_steady.report.command import report

            return report(rest, _refuse)
        if command == "schema":
            return schema(rest)
        if command not in _TABLES or rest:
            _refuse(f"no command {' '.join(arguments)!r}. trl-steady --help lists the commands.")
    except _Refused as refused:
        print(f"trl-steady: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a trainer has said what continues the run
        return 130
    print(_TABLES[command]())
    return 0


def run(arguments: Sequence[str], dry_run: Sequence[str] = ()) -> int:
    """Run a script that imports TRL's trainer, with trl-steady's in its place."""
    settings, ppo, rest = _leading_settings(arguments)
    if rest in ([], ["-m"]):
        _refuse("run needs a script. trl-steady --help lists the commands.")
    is_launched = rest[0].startswith("-") and rest[0] != "-m"
    script = rest[0]
    if is_launched:
        script = _script_after_options(rest)
    if not script.startswith("-") and not os.path.exists(script):
        _refuse(f"there is no script {script}.")
    for message in wrong_options([f"--{setting}" for setting in settings]):
        _refuse(message)
    if is_launched:
        return _launch(arguments, dry_run)
    from trl_steady.cli.run import run_script
    from trl_steady.cli.settings import parse_settings

    try:
        options = parse_settings(settings)
    except ValueError as error:
        _refuse(str(error))
    around = nullcontext()
    if dry_run:
        from trl_steady.cli import dry_run as rehearsal

        around = rehearsal.dry_run(step="--dry-run=step" in dry_run)
    run_script(rest, options, ppo=ppo, around=around, refuse=_refuse)
    return 0


def _script_after_options(arguments: Sequence[str]) -> str:
    """Return the first word that ends as a script does, or "-m" before it: what follows a module is its own."""
    for word in arguments:
        if word in ("-m", "--module") or word.endswith(".py"):
            return word
    return "-m"


def run_trl_command(command: str, arguments: Sequence[str], dry_run: Sequence[str]) -> int:
    """Run TRL's `trl grpo` or `trl rloo` with trl-steady's trainer and options, or `trl grpo` with PPO."""
    for message in wrong_options(arguments):
        _refuse(message)
    from trl_steady.cli import run

    return run.run_trl_command(command, arguments, partial(_launch, dry_run=dry_run), _refuse)


def schema(scripts: Sequence[str]) -> int:
    """Print a JSON schema of the YAML files for `--config`."""
    for script in scripts:
        if not os.path.exists(script):
            _refuse(f"there is no script {script}.")
    from trl_steady.cli.schema import schema

    print(schema(scripts, _launch_parser()))
    return 0


def methods() -> str:
    """Return the table of the methods that trl-steady adds: page, method and paper, setting."""
    from trl_steady.config.methods import METHODS

    lines: dict[str, None] = {}  # a page only once
    for method in METHODS:
        title = f"  {method.name}"
        if method.paper:
            title = f"{title} (arXiv {method.paper})"
        for line in (f"{method.kind}: docs/{method.page}", title, f"      {method.setting}"):
            lines[line] = None
    return "\n".join(lines)


def env() -> str:
    """Print the versions of TRL and of its packages for a bug report, and return that of trl-steady, and its skill.

    The report and the formulas work without TRL, so its absence is no error.
    """
    try:
        from trl.scripts.env import print_env
    except ModuleNotFoundError as missing:
        print(f"- {missing.name} is not installed. The report works without it, and the formulas with torch alone")
    else:
        print_env()
    return f"- trl-steady version: {__version__}\n- trl-steady skill for coding agents: {SKILL}"


def versions() -> str:
    """Return the versions of trl-steady and of TRL."""
    try:
        of_trl = f"trl {version('trl')}"
    except PackageNotFoundError:
        of_trl = "TRL is not installed"
    return f"trl-steady {__version__}, {of_trl}"


_DRY_RUNS = ("--dry-run", "--dry-run=step")
_HELP_OPTIONS = ("-h", "--help")
_TABLES = {"methods": methods, "env": env, "--version": versions}


def _leading_settings(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return the settings of leading `--set` options, whether `--ppo` is among them, and the other arguments."""
    settings: list[str] = []
    ppo = False
    rest = list(arguments)
    while rest and rest[0].split("=")[0] in ("--set", "--ppo"):
        first = rest.pop(0)
        if first == "--ppo":
            ppo = True
        elif first.startswith("--ppo"):
            _refuse("--ppo takes no value.")
        elif first != "--set":
            settings.append(first.removeprefix("--set="))
        elif rest:
            settings.append(rest.pop(0))
        else:
            _refuse("--set needs NAME=VALUE.")
    return settings, ppo, rest


def _refuse(message: str) -> NoReturn:
    """Refuse arguments with the parser's message, but without its usage text."""
    raise _Refused(message)


def _launch_parser() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    parser = cast(argparse.ArgumentParser, launch_command_parser())
    parser.add_argument("--accelerate_config", help="a file, or the name of a config of TRL")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--ppo", action="store_true")
    vars(parser)["error"] = _refuse
    return parser


def _launch(arguments: Sequence[str], dry_run: Sequence[str] = ()) -> int:
    """Run `accelerate launch` on `trl-steady run`, with launch options, then a script and its arguments."""
    from accelerate.commands.launch import launch_command
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    launched = _launch_parser().parse_args(arguments)
    if launched.accelerate_config is not None:
        _, launched.config_file = resolve_accelerate_config_argument(
            ["--accelerate_config", launched.accelerate_config]
        )
    words = ["run", *dry_run]
    if launched.ppo:
        words.append("--ppo")
    words += [f"--set={setting}" for setting in launched.settings]
    if launched.module:
        words.append("-m")
    words.append(launched.training_script)
    launched.training_script_args = words + launched.training_script_args
    launched.module = True
    launched.training_script = "trl_steady"
    launched.quiet = True  # no traceback of accelerate's below the script's own
    with _sigterm_reaches_children():
        launch_command(launched)
    return 0


@contextmanager
def _sigterm_reaches_children() -> Generator[None]:
    """Pass SIGTERM on. accelerate's launcher of one process would end, and leave its child behind.

    torchrun, which launches several, does so by itself.
    """
    import psutil

    def pass_on(number: int, _: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
