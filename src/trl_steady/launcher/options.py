"""Options of our configs on the launcher's command line, and among the arguments of a script."""

import contextlib
import inspect
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from trl_steady.config.checks import defaults
from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.methods import METHODS
from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig
from trl_steady.config.shared import SharedOptions
from trl_steady.config.spelling import near
from trl_steady.config.values import CHOICES

__all__ = ["given_to_script", "is_option", "parse_settings", "refuse_dropped", "refuse_unknown"]

_CONFIGS = (PPOConfig, RLOOConfig, GRPOConfig)
_FIELDS = {option.name: option for config in _CONFIGS for option in fields(config) if option.init}
_TYPES = {name: hint for config in _CONFIGS for name, hint in get_type_hints(config).items()}
# The launcher looks for these options among a script's arguments: those that our configs declare and those of METHODS.
# It ignores one-word names (beta, epsilon) and TRL's other options, which a script may use for something else, and
# those of PPO alone, which no script written for TRL reads.
_DECLARED = {name for config in (SharedOptions, RLOOConfig, GRPOConfig) for name in inspect.get_annotations(config)}
_OF_METHODS = {name for method in METHODS for name in method.options if name in defaults(GRPOConfig)}
_OURS = sorted(name for name in _DECLARED | _OF_METHODS if "_" in name)
# The config replaces None in these options.
_FILLED = ("epsilon_high", "importance_sampling_level")
_DEFAULTS = {name: value for config in _CONFIGS for name, value in defaults(config).items()}
_ABSENT = object()


def is_option(name: str) -> bool:
    """Return True if a config of ours has an option of this name."""
    return name in _FIELDS


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of `--set NAME=VALUE`, with values parsed as on TRL's command line.

    `None` or `null` is None for an option that can be None. Commas or blanks separate the items of a list.

    Raises:
        ValueError: The option does not exist, or the value has another type.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no value. Write --set NAME=VALUE.")
        if name not in _FIELDS:
            raise ValueError(f"--set {setting}: GRPOConfig has no option {name!r}.{near(name, _FIELDS, '{}')}")
        try:
            options[name] = _read(name, text)
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}") from None
    return options


def given_to_script(arguments: Sequence[str]) -> dict[str, Any]:
    """Return trl-steady's options among a script's arguments and in the YAML file of its `--config`.

    An argument belongs to the script, and is not returned, if its value is invalid for the option: another type, or
    none of the option's choices.
    """
    given: dict[str, Any] = {}
    path, content = _parsed("config", str, arguments), None
    if isinstance(path, str) and path.endswith((".yaml", ".yml")) and Path(path).is_file():
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):  # the script reports such an error itself
            content = yaml.safe_load(Path(path).read_text())
    in_file = content if isinstance(content, dict) else {}
    for name in sorted(_OURS, key=lambda name: name not in in_file):  # those in the file first
        with contextlib.suppress(ValueError):  # the argument belongs to the script
            value = _given(name, arguments)
            if value is _ABSENT and name in in_file:
                value = _chosen(name, _written(in_file[name]))
            if value is not _ABSENT:
                given[name] = value
    return given


def refuse_unknown(args: SharedOptions, options: Mapping[str, Any]) -> None:
    """Refuse options of the command line that a trainer's config does not have.

    Raises:
        ValueError: The message names the option and the config.
    """
    for name in options.keys() - {own.name for own in fields(args)}:
        raise ValueError(
            f"{name}={_written(options[name])} was given, but {args.METHOD}Config has no option {name!r}. Leave it "
            "out."
        )


def refuse_dropped(
    args: SharedOptions, settings: Mapping[str, Any], given: Mapping[str, Any], target: Sequence[str]
) -> None:
    """Refuse a trainer's config that lost options of the command line.

    Args:
        args: The trainer's config.
        settings: Options of `--set`, with their values after the config's checks.
        given: Options among the script's arguments.
        target: The script, or `-m` and a module.

    Raises:
        ValueError: The message names the option, both values and the fix.
    """
    own = f"{args.METHOD}Config"
    refuse_unknown(args, given)
    for name, value in settings.items():
        if not _same(getattr(args, name), value):
            raise ValueError(
                f"--set {name}={_written(value)} was given, but the trainer's config has "
                f"{name}={getattr(args, name)!r}. The script changes it after it has built the config. Remove that "
                "change."
            )
    for name, value in given.items():
        is_filled = value is None and name in _FILLED
        if name not in settings and not is_filled and not _same(getattr(args, name), value):
            command = f"trl-steady run --set {shlex.quote(f'{name}={_written(value)}')} {shlex.join(target)}"
            raise ValueError(
                f"{target[-1]} was given {name}={value!r} on its command line or in its --config, but the trainer's "
                f"config has {name}={getattr(args, name)!r}: the script does not read the option. Write "
                f"{own}(..., {name}={value!r}) in the script, or run `{command}`, which sets it in any script."
            )


class _Parser(HfArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message.split(": ", 1)[-1])


def _parsed(name: str, of_type: Any, arguments: Sequence[str]) -> Any:
    """Return the value that TRL's parser gives one option from these arguments, `_ABSENT` if the option is missing.

    Raises:
        ValueError: The value does not have the option's type.
    """
    default = _DEFAULTS.get(name)
    option = field(default_factory=lambda: default) if isinstance(default, list | dict) else field(default=default)
    options: Any = make_dataclass("Options", [(name, of_type, option)])
    parser = _Parser(options, add_help=False, allow_abbrev=False)
    parser.set_defaults(**{name: _ABSENT})
    return getattr(parser.parse_known_args(list(arguments))[0], name)


def _given(name: str, arguments: Sequence[str]) -> Any:
    """Return an option's value from these arguments, `_ABSENT` if it is missing.

    Raises:
        ValueError: The value is invalid.
    """
    try:
        value = _parsed(name, _TYPES[name], arguments)
    except ValueError:
        if _TYPES[name] is bool:  # a flag without a value, followed by another argument
            return True
        value = " ".join(_parsed(name, list[str], arguments))
    return _chosen(name, value) if isinstance(value, str) else value


def _chosen(name: str, text: str) -> Any:
    """Return the option's value for this text, in any case of letters.

    Raises:
        ValueError: The text is not a valid value.
    """
    value = _read(name, text)
    if value is None or name not in CHOICES:
        return value
    spelt = {str(choice).lower(): choice for choice in CHOICES[name]}
    if str(value).lower() not in spelt:
        raise ValueError(f"{text!r} is not a choice")
    return spelt[str(value).lower()]


def _read(name: str, text: str) -> Any:
    kinds = get_args(_TYPES[name]) or (_TYPES[name],)
    is_none = text in ("None", "null") or (text.lower() in ("none", "null") and str not in kinds)
    if is_none and NoneType in kinds:
        return None
    if text.startswith("{") and any(get_origin(kind) is dict or kind is dict for kind in kinds):
        return json.loads(text)
    is_list = str not in kinds and any(get_origin(kind) is list for kind in (*kinds, _TYPES[name]))
    words = [word for word in re.split(r"[,\s]+", text.strip("[]() ")) if word] if is_list else []
    arguments = [f"--{name}", *words] if is_list else [f"--{name}={text}"]
    return _parsed(name, _TYPES[name], arguments)


def _same(has: Any, asked: Any) -> bool:
    if isinstance(has, list | tuple) and isinstance(asked, list | tuple):
        return list(has) == list(asked)
    return has == asked


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
