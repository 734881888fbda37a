"""Declare an option: its default, its text, its valid values, and when it has no effect."""

import math
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple, TypeVar

import trl

_C = TypeVar("_C", bound=type)
_TRL_LOG_PROBS = trl.GRPOConfig  # at import, before `trl-steady run` replaces it


class Range(NamedTuple):
    """Valid values that are not a list of choices."""

    has: Callable[[Any], bool]
    words: str


COUNT = Range(lambda value: value >= 1 and value == int(value), "1, 2, 3, ...")
POSITIVE = Range(lambda value: 0 < value < math.inf, "a finite number above 0")
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or above")
SHARE = Range(lambda value: 0 <= value <= 1, "between 0 and 1")


class Help(str):
    """The text of an option, with what trl-steady checks.

    It is a string because transformers' parser passes all metadata of a field to argparse.
    """

    valid: Range | Collection[object]
    takes_none: bool
    idle: Callable[[Any], str | None] | None


def option(
    default: Any,
    text: str,
    valid: Range | Collection[object] = (True, False),
    *,
    takes_none: bool = False,
    idle: Callable[[Any], str | None] | None = None,
) -> Any:
    """Return a field of a config.

    Args:
        default: The default.
        text: The documentation of the option.
        valid: Its range, or its choices.
        takes_none: True if None is valid. It always is if it is the default.
        idle: From a config, the setting with which the option has no effect; None if it has one.
    """
    known = Help(text)
    known.valid, known.takes_none, known.idle = valid, takes_none or default is None, idle
    return field(default=default, metadata={"help": known})


def documented(kind: _C) -> _C:
    """Put the texts of our options into a config's docstring, in place of "{options}"."""
    wrapper = textwrap.TextWrapper(115, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    texts = [wrapper.fill(f"{name}: {text}") for name, text in _ours(kind)]
    kind.__doc__ = (kind.__doc__ or "").replace("        {options}", "\n".join(texts))
    return kind


def trl_default(name: str) -> Any:
    """Return the default of an option in the installed TRL."""
    return getattr(_TRL_LOG_PROBS, name)


def needs(*names: str) -> Callable[[object], str | None]:
    """Return an `idle` of an option that has no effect while one of these options or properties is off."""

    def missing(args: object) -> str | None:
        return next((f"{name}={getattr(args, name)!r}" for name in names if not getattr(args, name)), None)

    return missing


def refuse_invalid(args: object) -> None:
    """Refuse values of our options that are invalid whatever the other options are.

    Raises:
        ValueError: The message names the option, its value and the valid values.
    """
    for name, known in _ours(args):
        value, valid = getattr(args, name), known.valid
        if not (known.takes_none if value is None else _has(valid, value)):
            words = valid.words if isinstance(valid, Range) else f"one of {', '.join(map(repr, valid))}"
            raise ValueError(
                f"{name}={value!r} cannot work. Set {name} to {words}{', or None' if known.takes_none else ''}."
            )


def idle_options(args: object) -> Iterator[str]:
    """Yield a warning with a fix for each option of ours that is set and has no effect."""
    for name, known in _ours(args):
        value = getattr(args, name)
        if known.idle is not None and value != getattr(type(args), name) and (why := known.idle(args)) is not None:
            yield f"{name}={value!r} cannot act with {why}. Change that, or leave {name} unset."


def _ours(config: Any) -> Iterator[tuple[str, Help]]:
    for each in fields(config):
        text = each.metadata.get("help")
        if isinstance(text, Help):
            yield each.name, text


def _has(valid: Range | Collection[object], value: object) -> bool:
    if not isinstance(valid, Range):
        return any(value == choice for choice in valid)
    try:
        return not isinstance(value, bool) and bool(valid.has(value))  # Python takes True for 1
    except (TypeError, ValueError, LookupError, ArithmeticError):  # a value of another type, such as a string
        return False
