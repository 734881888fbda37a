"""Signs of a symptom in a log, by what they look at.

`symptoms.toml` names the function of each symptom, and its arguments. Each function returns what it found, or None.
It raises KeyError if the log lacks a metric or a setting that it needs.
"""

from collections.abc import Callable
from types import ModuleType

from trl_steady.report.signs import common, engine, evaluation, flat, gradient, groups, length, policy, reward, setup
from trl_steady.report.signs.common import Found

__all__ = ["Found", "function"]

_MODULES: tuple[ModuleType, ...] = (common, reward, evaluation, groups, flat, policy, length, gradient, engine, setup)


def function(name: str) -> Callable[..., Found | None]:
    """Return the function of this name."""
    for module in _MODULES:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"symptoms.toml names {name}, which is in no file of signs/.")
