"""Declare an option: its default, its text, its valid values, and when it has no effect."""

import inspect
import math
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

import trl

_C = TypeVar("_C", bound=type)
_Valid = Collection[object] | Callable[[Any], bool]


class Help(str):
    """The text of an option, with what trl-steady checks.

    It is a string because transformers' parser passes all metadata of a field to argparse.
    """

    valid: _Valid
    expected: str
    idle: Callable[[Any], str | None] | None


def option(
    default: Any,
    text: str,
    valid: _Valid = (True, False),
    expected: str = "",
    *,
    idle: Callable[[Any], str | None] | None = None,
) -> Any:
    """Return a field of a config.

    Args:
        default: The default.
        text: The documentation of the option.
        valid: Choices, or a function that returns True for a valid value.
        expected: The valid values in words; "" lists the choices. None is valid if this text names it.
        idle: From a config, the setting with which the option has no effect; None if it has one.
    """
    known = Help(text)
    known.valid, known.expected, known.idle = valid, expected, idle
    return field(default=default, metadata={"help": known})


def documented(kind: _C) -> _C:
    """Put the texts of our options into a config's docstring, in place of "{options}"."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("trl_steady.")]
    names = {name for base in ours for name in inspect.get_annotations(base)}
    wrapper = textwrap.TextWrapper(115, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    texts = [wrapper.fill(f"{each.name}: {each.metadata['help']}") for each in fields(kind) if each.name in names]
    kind.__doc__ = (kind.__doc__ or "").replace("        {options}", "\n".join(texts))
    return kind


def defaults(kind: Any) -> dict[str, Any]:
    """Return the options of a config with their defaults."""
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(kind)
    }


# read at import, before `trl-steady run` replaces TRL's configs with trl-steady's
_TRLS_DEFAULTS = {**defaults(trl.RLOOConfig), **defaults(trl.GRPOConfig)}


def trl_default(name: str) -> Any:
    """Return the default of an option in the installed TRL."""
    return _TRLS_DEFAULTS[name]


def count(value: float) -> bool:
    """Return True for 1, 2, 3, ..."""
    return value >= 1 and value == int(value)


def count_or_0(value: float) -> bool:
    """Return True for 0, 1, 2, ..."""
    return value == 0 or count(value)


def positive(value: float) -> bool:
    """Return True for a finite number above 0."""
    return 0 < value < math.inf


def not_negative(value: float) -> bool:
    """Return True for a finite number, 0 or above."""
    return 0 <= value < math.inf


def share(value: float) -> bool:
    """Return True for a number between 0 and 1."""
    return 0 <= value <= 1


def needs(*names: str) -> Callable[[Any], str | None]:
    """Return an `idle` of an option that has no effect while one of these options or properties is off."""

    def missing(args: object) -> str | None:
        return next((f"{name}={getattr(args, name)!r}" for name in names if not getattr(args, name)), None)

    return missing


def refuse_invalid(args: Any) -> None:
    """Refuse values of our options that are invalid whatever the other options are.

    Raises:
        ValueError: The message names the option, its value and the valid values.
    """
    for name, known in _ours(args):
        value = getattr(args, name)
        if not _works(value, known):
            expected = known.expected
            if not expected and not callable(known.valid):
                expected = f"one of {', '.join(map(repr, known.valid))}"
            raise ValueError(f"{name}={value!r} cannot work. Set {name} to {expected}.")


def idle_options(args: Any) -> Iterator[str]:
    """Yield a warning with a fix for each option of ours that is set and has no effect."""
    unset = defaults(args)
    for name, known in _ours(args):
        value = getattr(args, name)
        if known.idle is not None and value != unset[name] and (why := known.idle(args)) is not None:
            yield f"{name}={value!r} cannot act with {why}. Change that, or leave {name} unset."


def _ours(args: Any) -> Iterator[tuple[str, Help]]:
    for each in fields(args):
        text = each.metadata.get("help")
        if isinstance(text, Help):
            yield each.name, text


def _works(value: Any, known: Help) -> bool:
    if value is None:
        return "None" in known.expected
    if not callable(known.valid):
        return any(value == choice for choice in known.valid)
    try:
        return not isinstance(value, bool) and bool(known.valid(value))  # Python takes True for 1
    except (TypeError, ValueError, LookupError, ArithmeticError):  # a value of another type, such as a string
        return False
