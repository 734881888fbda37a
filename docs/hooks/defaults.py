"""Griffe extension: make the signature of `GRPOConfig` show the values of its defaults."""

import dataclasses
from typing import Any

import griffe

from trl_steady import GRPOConfig


class Defaults(griffe.Extension):
    """Show values instead of calls such as `trl_default("loss_type")`, and show that TRL's options follow."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the signature that griffe's own extension for dataclasses has made."""
        if pkg.path != "trl_steady":
            return
        parameters = pkg["config.GRPOConfig.__init__"].parameters
        values = {field.name: repr(field.default) for field in dataclasses.fields(GRPOConfig)}
        for parameter in parameters:
            if parameter.name != "self":
                parameter.default = values[parameter.name]
                parameter.kind = griffe.ParameterKind.keyword_only
        kind = griffe.ParameterKind.var_keyword
        parameters.add(griffe.Parameter("trl_options", annotation="Any", kind=kind, default="{}"))
