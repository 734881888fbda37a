"""Filters for deprecation warnings that only TRL can mend."""

import re
import warnings

__all__ = ["TRLS", "ignore_trls"]

_RENAMED = "`{}` is deprecated and will be removed in v6. Use `{}` instead."
TRLS = tuple(
    (f"transformers.{module}", _RENAMED.format(old, old.replace("gradient", "activation")))
    for module, old in (
        ("training_args", "gradient_checkpointing"),
        ("modeling_utils", "is_gradient_checkpointing"),
        ("modeling_utils", "gradient_checkpointing_disable"),
        ("modeling_utils", "gradient_checkpointing_enable"),
    )
)
"""(module, message) of each FutureWarning that TRL 1.16 causes in transformers 5.23 with its defaults."""


def ignore_trls() -> None:
    """Ignore the warnings of `TRLS`, by exact message and module. Every other warning stays."""
    for module, message in TRLS:
        warnings.filterwarnings("ignore", f"{re.escape(message)}$", FutureWarning, rf"{re.escape(module)}$")
