"""Griffe extension: show the configs as they are at run time, because griffe only reads their source."""

import dataclasses
import inspect
from typing import Any

import griffe

from trl_steady import GRPOConfig, PPOConfig, RLOOConfig

_CONFIGS: tuple[Any, ...] = (GRPOConfig, PPOConfig, RLOOConfig)


class Defaults(griffe.Extension):
    """Put the texts of the options into the docstrings, and the values of the defaults into the signatures.

    In the source, a docstring has "{options}", and a default is a call such as `option(None, "...")`.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change docstrings, and the signatures that griffe's own extension for dataclasses has made."""
        if pkg.path == "trl_steady":
            for kind in _CONFIGS:
                _show(pkg[f"{kind.__module__}.{kind.__name__}".removeprefix("trl_steady.")], kind)


def _show(static: griffe.Class, kind: Any) -> None:
    """Change one config. Its signature has the inherited options too, in the order of the docstring."""
    assert static.docstring is not None
    static.docstring.value = inspect.getdoc(kind) or ""
    init = static["__init__"]
    own = {parameter.name: parameter for parameter in init.parameters}
    init.parameters = griffe.Parameters(own.pop("self"))
    for field in dataclasses.fields(kind):
        if field.name in own:
            parameter = own.pop(field.name)
            parameter.default, parameter.kind = repr(field.default), griffe.ParameterKind.keyword_only
            init.parameters.add(parameter)
    assert not own, f"{kind.__name__} has no fields {', '.join(own)}"
    options = griffe.ParameterKind.var_keyword
    init.parameters.add(griffe.Parameter("trl_options", annotation="Any", kind=options, default="{}"))
