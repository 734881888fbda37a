"""Options of our configs as `trl-steady run --set` gives them."""

import re
from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser

from trl_steady.config.ppo import PPOConfig
from trl_steady.config.rloo import RLOOConfig

_TYPES = {
    option.name: get_type_hints(config)[option.name]
    for config in (RLOOConfig, PPOConfig)  # which has all of GRPOConfig
    for option in fields(config)
    if option.init
}


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of `--set NAME=VALUE`, with values parsed as on TRL's command line.

    `None` or `null` is None for an option that can be None. Commas or blanks separate the items of a list.

    Raises:
        ValueError: The option does not exist, or the value has another type.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in _TYPES:
            wrong = f"no config of ours has an option {name!r}" if equals else "no value. Write --set NAME=VALUE"
            raise ValueError(f"--set {setting}: {wrong}.")
        try:
            options[name] = _read(name, text)
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}") from None
    return options


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.split(": ", 1)[-1])


def _read(name: str, text: str) -> Any:
    kinds = get_args(_TYPES[name]) or (_TYPES[name],)
    if NoneType in kinds and (text in ("None", "null") or (text.lower() in ("none", "null") and str not in kinds)):
        return None
    words = [f"--{name}={text}"]
    if str not in kinds and any(get_origin(kind) is list for kind in (*kinds, _TYPES[name])):
        words = [f"--{name}", *(word for word in re.split(r"[,\s]+", text.strip("[]() ")) if word)]
    options: Any = make_dataclass("Options", [(name, _TYPES[name], field(default=None))])
    return getattr(_Parser(options, add_help=False, allow_abbrev=False).parse_args(words), name)
