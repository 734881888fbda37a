"""Single options: their help texts, valid values, and the settings without which they have no effect."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def option(default: _T, text: str) -> _T:
    """Return a field of a config with its help text, where transformers' command line looks for it."""
    return field(default=default, metadata={"help": text})


class Needs:
    """Options and properties without which an option has no effect. It stands in the annotation of the option."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Range(NamedTuple):
    """Valid values that are not a list of choices. It stands in the annotation of an option."""

    has: Callable[[Any], bool]
    words: str
    keywords: Mapping[str, object] = MappingProxyType({})
    """The same for an editor: keywords of JSON schema."""


COUNT = Range(lambda value: value >= 1 and value == int(value), "1, 2, 3, ...", {"minimum": 1})
POSITIVE = Range(lambda value: 0 < value < math.inf, "a finite number above 0", {"exclusiveMinimum": 0})
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or above", {"minimum": 0})
SHARE = Range(lambda value: 0 <= value <= 1, "between 0 and 1", {"minimum": 0, "maximum": 1})
NUMBER = Range(lambda value: float(value) == value, "a number")


def _is_filter(value: Any) -> bool:
    if callable(value):
        return "<" not in getattr(value, "__qualname__", "")  # pickle, with which checkpoints save it, needs a name
    if isinstance(value, str):
        return value in ("zero_std", "reward_variance")
    return len(value) == 2 and value[0] < value[1]


ROUNDS = Range(lambda value: value >= 2 and value == int(value), "2, 3, 4, ...", {"minimum": 2})
FILTERS = Range(
    _is_filter,
    "'zero_std', 'reward_variance', (low, high) with low < high, or a function that is not inside another one",
    {"type": ["string", "array"], "pattern": "^(zero_std|reward_variance)$", "minItems": 2, "maxItems": 2},
)
ENGINE_ARGUMENTS = Range(
    # JSON as transformers reads it into an option
    lambda value: isinstance(value, dict) or (value[:1] == "{" and json.loads(value) is not None),
    "a dict of arguments of vllm.LLM, or JSON of one",
    {"pattern": r"^\{"},
)


@cache
def own_options(config: type, *others: str) -> dict[str, Any]:
    """Return the options that trl-steady adds or changes, and others, in the order of the config, with their types."""
    ours = [kind for kind in config.__mro__ if kind.__module__.startswith("trl_steady.")]
    names = {name for kind in ours for name in inspect.get_annotations(kind)}.union(others)
    types = get_type_hints(config)
    return {each.name: types[each.name] for each in fields(config) if each.name in names}


@cache
def marked(config: type, kind: type[_T]) -> dict[str, _T]:
    """Return the options whose annotation has a mark of a kind, a `Range` or `Needs`, with that mark."""
    hints = get_type_hints(config, include_extras=True).items()
    return {name: mark for name, hint in hints for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind)}


def refuse_unknown(config: type, given: Iterable[str]) -> None:
    """Raise a TypeError for a name that no parameter of the config's constructor has, with one that is like it."""
    known = inspect.signature(config.__init__, follow_wrapped=False).parameters
    is_open = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name in () if is_open else {*given} - known.keys():
        meant = "".join(f" Did you mean {each}?" for each in get_close_matches(name, known, 1))
        raise TypeError(f"{config.__name__} has no option {name}.{meant}")


def refuse_invalid(config: object, ranges: Mapping[str, Range]) -> None:
    """Refuse values of options that are invalid whatever the other options are.

    Args:
        config: A config whose types say where a bool, a choice or None is valid.
        ranges: The valid values of our other options, and of TRL's that our methods calculate with, by name.

    Raises:
        ValueError: The message names the option, its value and the valid values.
    """
    for name, annotation in own_options(type(config), *ranges).items():
        value = getattr(config, name)
        kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation) or (annotation,)
        choices = (True, False) if bool in kinds else get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
        if (value is None and NoneType in kinds) or any(value == choice for choice in choices):
            continue
        if choices or not _has(ranges[name], value):
            valid = f"one of {', '.join(map(repr, choices))}" if choices else ranges[name].words
            suffix = ", or None" if NoneType in kinds else ""
            raise ValueError(f"{name}={value!r} cannot work. Set {name} to {valid}{suffix}.")


def first_disabled(config: object, *names: str) -> str | None:
    """Return the first of these options or properties that is off, such as "beta=0.0"; None if all are on."""
    return next((f"{name}={getattr(config, name)!r}" for name in names if not getattr(config, name)), None)


def _has(valid: Range, value: object) -> bool:
    try:
        return not isinstance(value, bool) and bool(valid.has(value))  # Python takes True for 1
    except (TypeError, ValueError, LookupError, ArithmeticError):  # a value of another type, such as a string
        return False
