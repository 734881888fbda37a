"""Copies of TRL's client for a vLLM server, so that a change reaches no other request."""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient
else:
    VLLMClient = object


def copy_client(client: VLLMClient, change: Callable[[Any], None]) -> VLLMClient:
    """Return a copy of a client with a session of its own, after a `change` of each of the session's adapters.

    The attributes of the copy may be replaced.
    """
    adapters: dict[str, Any] = {}
    client = copy.copy(client)
    client.session = copy.copy(client.session)
    for prefix, adapter in cast(Mapping[str, Any], client.session.adapters).items():
        adapters[prefix] = copy.copy(adapter)
        change(adapters[prefix])
    vars(client.session)["adapters"] = adapters
    return client
