"""The command `trl-steady`, also `python -m trl_steady` and `accelerate launch -m trl_steady`."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_HELP = """\
usage: trl-steady COMMAND ...

  run [LAUNCH OPTIONS] SCRIPT [ARGUMENTS]     run a script that trains with trl.GRPOTrainer, with trl-steady's instead
  run [LAUNCH OPTIONS] -m MODULE [ARGUMENTS]  the same of a module
  grpo [ARGUMENTS] [LAUNCH OPTIONS]           TRL's command `trl grpo`, with trl-steady's trainer and options
  methods                                     what trl-steady adds: setting, paper and page of the documentation
  env                                         versions, devices, and what this installation can use; for bug reports

LAUNCH OPTIONS are those of `accelerate launch`, and --accelerate_config with a file or the name of one of TRL's
(fsdp2, multi_gpu, single_gpu, zero2, zero3, ...). Without any, `run` runs in this very process, as python would.
`accelerate launch [LAUNCH OPTIONS] -m trl_steady run SCRIPT [ARGUMENTS]` does the same.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the command's own name; those of this process by default.

    Returns:
        The exit status.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if command in ("run", "grpo"):
        return run(rest) if command == "run" else grpo(rest)
    if command not in ("methods", "env") or rest:
        print(f"trl-steady: no command {' '.join([command, *rest])!r}\n\n{_HELP}", file=sys.stderr)
        return 2
    print(methods() if command == "methods" else env())
    return 0


def run(arguments: Sequence[str]) -> int:
    """A script that knows TRL's trainer only, with ours."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if arguments else 2
    if arguments[0].startswith("-") and arguments[0] != "-m":
        return _launch(arguments)
    return _run_here(list(arguments))


def grpo(arguments: Sequence[str]) -> int:
    """TRL's own command of this name."""
    from trl_steady.host.launching import grpo_command
    from trl_steady.swap import swapped

    with swapped():
        return grpo_command(arguments, lambda options, script: _launch([*options, *script]))  # its own script is there


def methods() -> str:
    """The table of what there is."""
    from trl_steady.methods import METHODS

    rows = [("", "method", "setting", "arXiv", "docs/"), *(method[:5] for method in METHODS)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def env() -> str:
    """What a bug report wants to know."""
    from trl_steady.environment import report

    return report()


def _launch(arguments: Sequence[str]) -> int:
    """`accelerate launch`, of `trl-steady run` in the place of the script."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    from trl_steady.host.launching import resolve_accelerate_config_argument

    parser = launch_command_parser()
    parser.prog = "trl-steady"
    parser.add_argument("--accelerate_config")
    launched = parser.parse_args(arguments)
    if launched.accelerate_config is not None:
        try:
            _, launched.config_file = resolve_accelerate_config_argument(
                ["--accelerate_config", launched.accelerate_config]
            )
        except ValueError as error:
            return _refused(str(error))
    target = [*(["-m"] if launched.module else []), launched.training_script]
    if not _is_there(target):
        return _refused(f"no such script: {launched.training_script!r}")
    launched.training_script_args = ["run", *target, *launched.training_script_args]
    launched.module, launched.training_script = True, __package__
    launch_command(launched)
    return 0


def _is_there(target: Sequence[str]) -> bool:
    """A module is for python to find, with ours in place already."""
    return len(target) > 1 if target[0] == "-m" else Path(target[0]).is_file()


def _refused(why: str) -> int:
    print(f"trl-steady: {why}", file=sys.stderr)
    return 2


def _run_here(arguments: list[str]) -> int:
    if not _is_there(arguments):
        return _refused("-m wants a module" if arguments[0] == "-m" else f"no such script: {arguments[0]!r}")
    from trl_steady.swap import swapped

    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:  # as python does
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        with swapped() as swap:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not swap.trainers and os.environ.get("RANK", "0") == "0":
        print(
            f"trl-steady run: {sys.argv[0]} has ended and built no GRPOTrainer of trl-steady's in this process. If it "
            "has trained GRPO, then with another trainer or in processes of its own, which trained plain TRL unless "
            "they said which trainer they have. Launch them with `trl-steady run` or `accelerate launch -m "
            "trl_steady run`, or import GRPOConfig and GRPOTrainer from trl_steady.",
            file=sys.stderr,
        )
    return 0
