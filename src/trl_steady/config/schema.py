"""JSON schema (draft 7) of options in a YAML file, from the dataclasses that transformers' parser fills."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from trl_steady.config.options import Range, marked
from trl_steady.config.shared import SharedOptions

Schema = dict[str, Any]


def _any_case(*words: str) -> str:
    """Return a pattern for words, with letters of any case."""
    patterns: list[str] = []
    for word in words:
        pattern = ""
        for character in word:
            if character.isalpha():
                pattern += f"[{character.upper()}{character}]"
            else:
                pattern += character
        patterns.append(pattern)
    return "|".join(patterns)


# Python's types -> the type in JSON, and the strings that the parser turns into it. YAML 1.1 takes 1e-5 for a string,
# and editors, which read YAML 1.2, take yes and 1_000 for strings.
_READ: dict[type[Any], tuple[str, str]] = {
    int: ("integer", r"[-+]?\d[\d_]*"),
    float: ("number", r"[-+]?((\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|inf)"),
    bool: ("boolean", _any_case("true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0")),
}
_JSON: dict[type[Any], str] = {str: "string", list: "array", tuple: "array", dict: "object", NoneType: "null"}


def properties(kind: type[Any]) -> dict[str, Schema]:
    """Return the schema of each option of a dataclass, by name. Ranges are those of our configs."""
    types = get_type_hints(kind)
    ranges: Mapping[str, Range] = {}
    if issubclass(kind, SharedOptions):
        ranges = marked(kind, Range)
    found: dict[str, Schema] = {}
    for option in fields(kind):
        if not option.init:
            continue
        schema = values(types[option.name], option.metadata.get("choices"))
        if option.name in ranges:
            schema.update(ranges[option.name].keywords)
        schema.update(_about(option))
        found[option.name] = schema
    return found


def values(annotation: object, choices: Iterable[object] | None = None, *, in_list: bool = False) -> Schema:
    """Return the schema of an option's values. In a list, the parser reads no strings."""
    origin = get_origin(annotation)
    kinds: tuple[object, ...] = get_args(annotation)  # of a union
    if origin in (None, Literal, list, tuple, dict):
        kinds = (annotation,)
    may_be_none = NoneType in kinds
    for kind in kinds:
        if get_origin(kind) is Literal and str not in kinds:
            choices = get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, Enum):
            choices = [member.value for member in kind]
    if choices is not None:
        valid = list(choices)
        if may_be_none:
            valid.append(None)
        return {"enum": valid}
    names: list[str] = []
    found: Schema = {"type": names}
    for kind in kinds:
        base = cast(type[Any], get_origin(kind) or kind)
        if base in _READ:
            name, text = _READ[base]
            names.append(name)
            if str not in kinds and not in_list:
                names.append("string")
                if may_be_none and base is not bool:
                    text += f"|{_any_case('none', 'null')}"
                found["pattern"] = f"^({text})$"
                found["patternErrorMessage"] = f"Expected a value of type {name}."  # of yaml-language-server
        elif base in _JSON or is_dataclass(base):
            names.append(_JSON.get(base, "object"))
        elif get_origin(kind) is Literal:  # False, beside strings
            names.append("boolean")
        else:  # a class of a script's own
            return {}
        if base in (list, tuple):
            found["items"] = values(get_args(kind)[0], in_list=True)
        if in_list and is_dataclass(kind):
            found |= {"properties": properties(cast(type[Any], kind)), "additionalProperties": False}
    return found


def merged(schemas: Iterable[Mapping[str, Schema]]) -> dict[str, Schema]:
    """Return the options of several dataclasses. Values may have the type that any of them gives to an option."""
    found: dict[str, Schema] = {}
    for schema in schemas:
        for name, new in schema.items():
            found[name] = _union(found.get(name, new), new)
    return found


def _union(old: Schema, new: Schema) -> Schema:
    """Return the schema of an option that two dataclasses have."""
    both = {**new, **old}  # so that a range of one is that of all
    for key in ("type", "enum"):
        if key in old and key in new:
            both[key] = list(dict.fromkeys(old[key] + new[key]))
    if "pattern" in both:  # the one for None too
        both["pattern"] = max(old.get("pattern", ""), new.get("pattern", ""), key=len)
    if old.get("default") != new.get("default"):
        both.pop("default", None)
    if ("enum" in old) != ("enum" in new):  # choices of one script
        del both["enum"]
    return both


def _about(option: "Field[Any]") -> Schema:
    """Return the first sentence of the help, and the default, if JSON has it."""
    about: Schema = {}
    text = option.metadata.get("help")
    if text:
        about["description"] = re.split(r"(?<=[^.]..[.])\s", " ".join(text.split()), maxsplit=1)[0]
    default = getattr(option.default, "value", option.default)
    if default is None or isinstance(default, (bool, int, float, str)):
        about["default"] = default
    return about
