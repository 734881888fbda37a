"""Options of our configs as `trl-steady run --set` gives them."""

import re
from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser

from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig

_TYPES: dict[str, Any] = {}
for _config in (RLOOConfig, PPOConfig):  # which has all of GRPOConfig
    _hints = get_type_hints(_config)
    for _option in fields(_config):
        if _option.init:
            _TYPES[_option.name] = _hints[_option.name]


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
            raise ValueError(f"--set {setting}: no value. Write --set NAME=VALUE.")
        if name not in _TYPES:
            raise ValueError(f"--set {setting}: no config of ours has an option {name!r}.")
        try:
            options[name] = _read(name, text)
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}") from None
    return options


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.split(": ", 1)[-1])


def _read(name: str, text: str) -> Any:
    annotation = _TYPES[name]
    kinds = get_args(annotation) or (annotation,)
    takes_text = str in kinds
    is_none = text in ("None", "null") or (text.lower() in ("none", "null") and not takes_text)
    if is_none and NoneType in kinds:
        return None
    is_list = any(get_origin(kind) is list for kind in (annotation, *kinds))
    if is_list and not takes_text:
        items = [item for item in re.split(r"[,\s]+", text.strip("[]() ")) if item]
        words = [f"--{name}", *items]
    else:
        words = [f"--{name}={text}"]
    options: Any = make_dataclass("Options", [(name, annotation, field(default=None))])
    parser = _Parser(options, add_help=False, allow_abbrev=False)
    return getattr(parser.parse_args(words), name)
