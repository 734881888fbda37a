"""Warnings that point at the user's script."""

import inspect
import traceback
import warnings

_PACKAGES = {"trl_steady", "trl", "transformers", "accelerate", "torch", "contextlib", "dataclasses"}


def warn_user(message: str) -> None:
    """Give a warning that points at the line of the user's script, not at one of the packages that it calls."""
    for level, (frame, _) in enumerate(traceback.walk_stack(inspect.currentframe()), 1):
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        place = frame.f_code.co_filename, frame.f_code.co_name
        is_construction = place == ("<string>", "__init__") or place[1] == "__post_init__"  # of a dataclass
        if package not in _PACKAGES and not is_construction:
            return warnings.warn(message, UserWarning, stacklevel=level)
    warnings.warn(message, UserWarning, stacklevel=2)
