"""Single options: their help texts, and the marks in their annotations that say what is valid and what they need.

name: Annotated[float | None, POSITIVE, Needs("sync_ref_model"), IN_ROLLOUT] = option(None, "Help text.")
"""

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch

_T = TypeVar("_T")


def option(default: _T, text: str) -> _T:
    """Return a field of a config with its help text, where transformers' command line looks for it."""
    return field(default=default, metadata={"help": text})


# marks


class Range(NamedTuple):
    """Valid values that are not a list of choices."""

    has: Callable[[Any], bool]
    words: str
    keywords: Mapping[str, object] = MappingProxyType({})
    """The same for an editor: keywords of JSON schema."""


class Needs:
    """Options and properties that must be on. Without them, an option has no effect."""

    def __init__(self, *names: str) -> None:
        self.names = names


class InRollout:
    """The option shapes a rollout, or the objective for which it was made: a resume inside a window needs its value.

    `only_with` are options without which it does not.
    """

    def __init__(self, *only_with: str) -> None:
        self.only_with = only_with


IN_ROLLOUT = InRollout()


def _has_name(function: Callable[..., Any]) -> bool:
    return "<" not in getattr(function, "__qualname__", "")  # pickle, with which checkpoints save it, needs a name


def _is_filter(value: Any) -> bool:
    if callable(value):
        return _has_name(value)
    if isinstance(value, str):
        return value in ("zero_std", "reward_variance")
    return len(value) == 2 and value[0] < value[1]


def _is_prompt(value: Any) -> bool:
    if callable(value):
        return _has_name(value)
    return bool(str.strip(value))


def _is_engine_arguments(value: Any) -> bool:
    if isinstance(value, dict):
        return True
    return value.startswith("{") and json.loads(value) is not None  # as transformers reads it into an option


def _are_functions(value: Any) -> bool:
    if callable(value) or isinstance(value, str):
        value = [value]
    for member in value:
        is_function = callable(member) and not isinstance(member, torch.nn.Module)
        if not is_function and not isinstance(member, str):
            return False
    return True


def _is_sampling(value: Any) -> bool:
    if isinstance(value, str):  # as transformers reads it
        value = json.loads(value)
    for name, setting in value.items():
        if name == "greedy":
            if not isinstance(setting, bool):
                return False
        elif not _has(_SAMPLING[name], setting):
            return False
    return True


COUNT = Range(lambda value: value >= 1 and value == int(value), "1, 2, 3, ...", {"minimum": 1})
COUNT_OR_0 = Range(lambda value: value >= 0 and value == int(value), "0, 1, 2, ...", {"minimum": 0})
ROUNDS = Range(lambda value: value >= 2 and value == int(value), "2, 3, 4, ...", {"minimum": 2})
POSITIVE = Range(lambda value: 0 < value < math.inf, "a finite number above 0", {"exclusiveMinimum": 0})
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or above", {"minimum": 0})
# a factor of a loss or of a reward
COEFFICIENT = Range(lambda value: 0 <= value <= 3e38, "0 or above, and a number of float32", {"minimum": 0})
SHARE = Range(lambda value: 0 <= value <= 1, "between 0 and 1", {"minimum": 0, "maximum": 1})
BELOW_1 = Range(lambda value: 0 < value < 1, "above 0 and below 1", {"exclusiveMinimum": 0, "exclusiveMaximum": 1})
NUMBER = Range(lambda value: float(value) == value, "a number")
COLUMN = Range(lambda value: bool(str.strip(value)), "the name of a column", {"minLength": 1})
AROUND_1 = Range(
    lambda value: len(value) == 2 and 0 <= value[0] <= 1 <= value[1],
    "(low, high), with low <= 1 <= high",
    {"minItems": 2, "maxItems": 2},
)
FILTERS = Range(
    _is_filter,
    "'zero_std', 'reward_variance', (low, high) with low < high, or a function that is not inside another one",
    {"type": ["string", "array"], "pattern": "^(zero_std|reward_variance)$", "minItems": 2, "maxItems": 2},
)
METRICS = Range(_are_functions, "functions, or their import paths")
_SAMPLING = {
    "temperature": NOT_NEGATIVE,
    "top_p": SHARE,
    "top_k": COUNT_OR_0,
    "min_p": SHARE,
    "repetition_penalty": POSITIVE,
    "max_completion_length": COUNT,
}
SAMPLING = Range(
    _is_sampling, f"a dict with valid values of some of {', '.join(_SAMPLING)} and greedy", {"pattern": r"^\{"}
)
PROMPTS = Range(_is_prompt, "the name of a column, or a function that is not inside another one", {"minLength": 1})
MODEL = Range(lambda value: bool(os.fspath(value)), "a name or path, 'reference', or the address of a server")
ENGINE_ARGUMENTS = Range(_is_engine_arguments, "a dict of arguments of vllm.LLM, or JSON of one", {"pattern": r"^\{"})


@cache
def marked(config: type, kind: type[_T]) -> dict[str, _T]:
    """Return the options of a config whose annotation has a mark of this kind, each with its mark.

    A script's class that declares an option again, such as with another default, inherits the mark.
    """
    marks: dict[str, _T] = {}
    for owner in reversed(_our_config(config).__mro__):
        for name, annotation in inspect.get_annotations(owner).items():
            for mark in getattr(annotation, "__metadata__", ()):
                if isinstance(mark, kind):
                    marks[name] = mark
    return marks


@cache
def own_options(config: type, *others: str) -> dict[str, Any]:
    """Return the options that trl-steady adds or changes, and others, in the order of the config, with their types."""
    ours = _our_config(config)
    names = set(others)
    for owner in ours.__mro__:
        if owner.__module__.startswith("trl_steady."):
            names.update(inspect.get_annotations(owner))
    types = get_type_hints(ours)
    return {setting.name: types[setting.name] for setting in fields(config) if setting.name in names}


def _our_config(config: type) -> type:
    """Return the config of trl-steady that a config is, or extends.

    Annotations of a script's class are not read: they may name what only a type checker imports.
    """
    for owner in config.__mro__:
        if owner.__module__.startswith("trl_steady."):
            return owner
    raise TypeError(f"{config.__name__} extends no config of trl-steady.")


# checks


def refuse_unknown(config: type, given: Iterable[str]) -> None:
    """Raise a TypeError for a name that no parameter of the config's constructor has, with one that is like it."""
    known = inspect.signature(config.__init__, follow_wrapped=False).parameters
    for parameter in known.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return
    for name in given:
        if name not in known:
            message = f"{config.__name__} has no option {name}."
            for similar in get_close_matches(name, known, 1):
                message += f" Did you mean {similar}?"
            raise TypeError(message)


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
        kinds = _kinds(annotation)
        if value is None and NoneType in kinds:
            continue
        choices = _choices(kinds)
        if choices:
            is_valid = value in choices
            valid = f"one of {', '.join(map(repr, choices))}"
        else:
            is_valid = _has(ranges[name], value)
            valid = ranges[name].words
        if not is_valid:
            if NoneType in kinds:
                valid += ", or None"
            raise ValueError(f"{name}={value!r} cannot work. Set {name} to {valid}.")


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    if get_origin(annotation) is Literal:
        return (annotation,)
    return get_args(annotation) or (annotation,)


def _choices(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values that types list; nothing if they list none."""
    if bool in kinds:
        return (True, False)
    if get_origin(kinds[0]) is Literal:
        return get_args(kinds[0])
    return ()


def _has(valid: Range, value: object) -> bool:
    try:
        return not isinstance(value, bool) and bool(valid.has(value))  # Python takes True for 1
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):  # a value of another type
        return False


# options without effect


class Idle(NamedTuple):
    """Why an option has no effect, and what to do."""

    because: str
    fix: str
    """The start of a sentence, such as "Set beta above 0"; "" if nothing but `instead` helps."""
    instead: str = "leave it unset"
    """The end of that sentence names what trains the same as now."""


def why_disabled(config: object, *names: str) -> Idle | None:
    """Return why an option has no effect, if one of these is off; None if all are on."""
    for name in names:
        value = getattr(config, name)
        if not value:
            return Idle(f"{name}={value!r}", f"Set {_on(name, value)}")
    return None


def _on(name: str, off: object) -> str:
    """Return how to switch on an option that has the value `off`, such as "beta above 0"."""
    if off is None:
        return name
    if isinstance(off, bool):
        return f"{name}=True"
    return f"{name} above 0"
