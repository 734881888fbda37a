"""Griffe extension: show the configs as they are at run time, because griffe only reads their source."""

import dataclasses
import inspect
from typing import Any

import griffe

from trl_steady import GRPOConfig, PPOConfig, RLOOConfig
from trl_steady.config.options import own_options

_CONFIGS: tuple[Any, ...] = (GRPOConfig, PPOConfig, RLOOConfig)


class Defaults(griffe.Extension):
    """Put the help texts of the options into the docstrings, and the values of the defaults into the signatures."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change docstrings, and the signatures that griffe's own extension for dataclasses has made."""
        if pkg.path == "trl_steady":
            for kind in _CONFIGS:
                _show(pkg[f"{kind.__module__}.{kind.__name__}".removeprefix("trl_steady.")], kind)


def documentation(kind: Any) -> str:
    """Return the docstring of a config, with a section for its options that are ours before its errors."""
    ours = [each for each in dataclasses.fields(kind) if each.name in own_options(kind)]
    texts = "\n".join(f"    {each.name}: {each.metadata['help']}" for each in ours)
    return (inspect.getdoc(kind) or "").replace("Raises:", f"Args:\n{texts}\n\nRaises:", 1)


def _show(static: griffe.Class, kind: Any) -> None:
    """Change one config. Its signature has the inherited options too, in the order of the docstring."""
    assert static.docstring is not None
    static.docstring.value = documentation(kind)
    init = static["__init__"]
    own = {parameter.name: parameter for parameter in init.parameters}
    init.parameters = griffe.Parameters(own.pop("self"))
    for field in dataclasses.fields(kind):
        if field.name in own:
            parameter = own.pop(field.name)
            parameter.default, parameter.kind = repr(field.default), griffe.ParameterKind.keyword_only
            parameter.annotation = _without_marks(parameter.annotation)
            init.parameters.add(parameter)
    assert not own, f"{kind.__name__} has no fields {', '.join(own)}"
    options = griffe.ParameterKind.var_keyword
    init.parameters.add(griffe.Parameter("trl_options", annotation="Any", kind=options, default="{}"))


def _without_marks(annotation: Any) -> Any:
    """Return the type of an option, without the marks of `Annotated` that say what is valid."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        return annotation.slice.elements[0]
    return annotation
