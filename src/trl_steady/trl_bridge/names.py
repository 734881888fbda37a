"""TRL's names that we use, from `names.toml`. A TRL that is not tested is compared with them once, at import."""

import inspect
import pkgutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trl_steady.losses import LOSSES
from trl_steady.trl_bridge.overrides import names_in


class Needed(NamedTuple):
    """A function of TRL that settings need."""

    settings: list[str]
    owner: str
    name: str
    parameters: list[str]
    """The first of its parameters; empty for any."""
    names: set[str]
    """Attributes, functions and strings in its code."""


def needed() -> Iterator[Needed]:
    """Yield the functions of `names.toml`, one of both trainers once for each."""
    for group in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["needed"]:
        settings = [_with_losses(setting) for setting in group["settings"]]
        for path, uses in group["functions"].items():
            owner, _, name = path.rpartition(".")
            parameters = " ".join(uses.get("takes", "").split())
            known = parameters.split(", ") if parameters else []
            kinds = [owner]
            if owner == "*":
                kinds = ["GRPOTrainer", "RLOOTrainer"]
            for kind in kinds:
                yield Needed(settings, kind, name, known, set(uses.get("names", "").split()))


def _with_losses(setting: str) -> str:
    """Return the setting with the names of the losses that it stands for."""
    if setting == "loss_type=OURS":
        names = [name for name, loss in LOSSES.items() if loss.is_ours]
    elif setting == "loss_type=OWN_TERM":
        names = [name for name, loss in LOSSES.items() if loss.policy_term is not None]
    else:
        return setting
    return f"loss_type={'/'.join(sorted(names))}"


def missing_from_trl() -> dict[str, str]:
    """Return the settings that need what the installed TRL lacks -> what it lacks first."""
    lacking: dict[str, str] = {}
    for settings, owner, name, known, names in needed():
        try:
            function = inspect.unwrap(pkgutil.resolve_name(f"trl.{owner}.{name}"))
            given, missing = inspect.signature(function).parameters, names - names_in(function.__code__)
        except (AttributeError, ImportError):
            given, missing = {}, {"such function"}
        required: list[str] = []
        for parameter in given:
            if parameter in known or given[parameter].default is inspect.Parameter.empty:
                required.append(parameter)
        if missing:
            problem = f"trl.{owner}.{name}: no {min(missing)}"
        elif known and required != known:
            problem = f"trl.{owner}.{name}({', '.join(given)})"
        else:
            continue
        prefix = f"{owner}+" if owner in ("GRPOTrainer", "RLOOTrainer") else ""
        keys = [f"{prefix}{setting}".removesuffix("+trl-steady") for setting in settings]
        lacking = dict.fromkeys(keys, problem) | lacking  # a setting keeps its first problem
    return lacking
