"""Filters for deprecation warnings that only TRL can mend."""

import re
import warnings

__all__ = ["TRLS", "ignore_trls"]

_RENAMED = "`{}` is deprecated and will be removed in v6. Use `{}` instead."
TRLS = (
    ("transformers.training_args", _RENAMED.format("gradient_checkpointing", "activation_checkpointing")),
    ("transformers.modeling_utils", _RENAMED.format("is_gradient_checkpointing", "is_activation_checkpointing")),
    (
        "transformers.modeling_utils",
        _RENAMED.format("gradient_checkpointing_disable", "activation_checkpointing_disable"),
    ),
    (
        "transformers.modeling_utils",
        _RENAMED.format("gradient_checkpointing_enable", "activation_checkpointing_enable"),
    ),
)
"""(module, message) of each FutureWarning that TRL 1.16 causes in transformers 5.23 with its defaults."""


def ignore_trls() -> None:
    """Ignore the warnings of `TRLS`, by exact message and module. Every other warning stays."""
    for module, message in TRLS:
        warnings.filterwarnings("ignore", f"{re.escape(message)}$", FutureWarning, rf"{re.escape(module)}$")
