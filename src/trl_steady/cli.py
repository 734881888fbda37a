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
        from trl_steady.host.launching import resolve_accelerate_config_argument

        _launch(resolve_accelerate_config_argument(list(arguments)))
        return 0
    return _run_here(list(arguments))


def grpo(arguments: Sequence[str]) -> int:
    """TRL's own command of this name."""
    from trl_steady.host.launching import grpo_command
    from trl_steady.swap import swapped

    with swapped():
        return grpo_command(arguments, lambda options, script: _launch([*options, *script]))


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


def _launch(arguments: Sequence[str]) -> None:
    """`accelerate launch`, of `trl-steady run` in the place of the script."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    parser.prog = "trl-steady"
    launched = parser.parse_args(arguments)
    module = ["-m"] if launched.module else []
    launched.training_script_args = ["run", *module, launched.training_script, *launched.training_script_args]
    launched.module, launched.training_script = True, __package__
    launch_command(launched)


def _run_here(arguments: list[str]) -> int:
    is_module = arguments[0] == "-m"
    target = arguments[is_module:]
    if not target or not (is_module or Path(target[0]).is_file()):
        print(f"trl-steady run: no such {'module' if is_module else 'script'}: {' '.join(target)!r}", file=sys.stderr)
        return 2
    from trl_steady.swap import swapped

    # as python sets it
    sys.argv = target
    sys.path.insert(0, os.getcwd() if is_module else str(Path(target[0]).resolve().parent))
    with swapped() as swap:
        if is_module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target[0], run_name="__main__")
    if not swap.trainers and os.environ.get("RANK", "0") == "0":
        print(
            f"trl-steady run: {target[0]} has ended without a GRPOTrainer of trl-steady's, so that nothing of "
            "trl-steady was on. If it has trained, then in another process or with another trainer: launch the "
            "processes with `trl-steady run` or `accelerate launch -m trl_steady run`, or import GRPOConfig and "
            "GRPOTrainer from trl_steady in the script.",
            file=sys.stderr,
        )
    return 0
