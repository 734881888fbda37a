"""Find the routers of a mixture of experts by the functions that the code of its modules calls."""

# pyright: reportUnknownMemberType=false
# torch's annotations are partial

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import cast

from torch import nn

__all__ = ["find_routers", "topk_sites"]

# Modules that wrap another one, or several of which one is used
_WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)"
    r"(?=\.|$)"
)
# Routers that choose by a fixed table of tokens, and leave nothing to replay
_FIXED = ("HashRouter",)


def find_routers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the routers of a model in the order of its layers.

    A router is a module that calls `topk`, and that holds experts or has the same parent module as experts.

    Returns:
        Name without wrappers -> modules. A name has several modules if one of them is used at a time (PEFT's
        `modules_to_save`).

    Raises:
        ValueError: the model has experts that no such module chooses. The message names the module that holds them.
    """
    named = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    plain = {name: _WRAPPERS.sub("", name) for name in named}
    holders: set[str] = set()
    for name, module in named.items():
        around = plain.get(name.rpartition(".")[0])
        if around is not None and around != plain[name] and _are_experts(name.rpartition(".")[2], module):
            holders.add(around)
    routers: dict[str, list[nn.Module]] = {}
    for name, module in named.items():
        if not holders.isdisjoint((plain[name], plain[name].rpartition(".")[0])) and topk_sites(type(module)):
            routers.setdefault(plain[name], []).append(module)
    for holder in sorted(holders):
        inside = [name for name in named if f"{plain[name]}.".startswith(f"{holder}.")]
        if not any(plain[name] in routers or type(named[name]).__name__.endswith(_FIXED) for name in inside):
            raise ValueError(
                f"{holder} of {type(model).__name__} holds experts and does not choose them by topk, the call in "
                "which routes are recorded and replayed."
            )
    return routers


def _are_experts(name: str, module: nn.Module) -> bool:
    return ("experts" in name and "shared" not in name) or "Experts" in type(module).__name__.replace("Shared", "")


@functools.cache
def topk_sites(kind: type) -> int:
    """Count how often the code of a class names `topk`."""
    own = (each for each in kind.__mro__ if not each.__module__.startswith("torch."))
    functions = (inspect.unwrap(value) for each in own for value in vars(each).values() if inspect.isfunction(value))
    return sum(_sites(function.__code__) for function in functions)


def _sites(code: CodeType) -> int:
    inner = sum(_sites(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return inner + sum(instruction.argval == "topk" for instruction in dis.get_instructions(code))
