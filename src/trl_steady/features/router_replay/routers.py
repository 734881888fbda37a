"""Find the routers of a mixture of experts by the names of their classes and modules."""

import re
from collections.abc import Iterator
from typing import cast

from torch import nn

# Modules that wrap another one, or several of which one is used
_WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)"
    r"(?=\.|$)"
)
# transformers names all its routers so, in `_can_record_outputs` of its models too; the experts are their neighbours
_ROUTER = re.compile("Router$|Gate$|Gating$")
# Routers that choose by a fixed table of tokens, and leave nothing to replay
_FIXED = re.compile("HashRouter$")
# Routers that return scores, from which the module that holds them chooses
_SCORES_ONLY = re.compile("^DbrxRouter$")


def find_routers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the routers of a model in the order of its layers.

    A router stands beside experts and has the class name of one. If experts have no such neighbour, then the module
    that holds them is their router, as in models that route by a linear layer. A run of a router that never calls
    `topk` raises an error, so that an unknown way to choose is not missed.

    Returns:
        Name without wrappers -> modules. A name has several modules if one of them is used at a time (PEFT's
        `modules_to_save`).
    """
    named = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    plain = {name: _WRAPPERS.sub("", name) for name in named}
    parents = {name: plain.get(name.rpartition(".")[0]) for name in named}
    holders = {
        parents[name]
        for name, module in named.items()
        if parents[name] != plain[name] and _are_experts(name.rpartition(".")[2], module)
    }
    choosing = {
        name: f"{plain[name]}."
        for name, module in named.items()
        if plain[name].rpartition(".")[0] in holders
        and _ROUTER.search(type(module).__name__)
        and not _SCORES_ONLY.search(type(module).__name__)
    }
    alone = {holder for holder in holders if not any(path.startswith(f"{holder}.") for path in choosing.values())}
    routers: dict[str, list[nn.Module]] = {}
    for name, module in named.items():
        if plain[name] in alone or (name in choosing and not _FIXED.search(type(module).__name__)):
            routers.setdefault(plain[name], []).append(module)
    return routers


def _are_experts(name: str, module: nn.Module) -> bool:
    return ("experts" in name and "shared" not in name) or "Experts" in type(module).__name__
