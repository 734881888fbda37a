"""Requests of a feature to an inference engine, and the results of one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class EngineExtra(NamedTuple):
    """A kind of data that an engine can return in addition to tokens."""

    option: str
    """trl-steady's option that needs the data."""
    label: str
    """Name of the data in messages."""
    flag: str
    """Flag of vLLM with which the engine must be started."""
    field: str
    """Field of a completion that holds the data."""
    fix_hint: str
    """A sentence that says what to do if vLLM returns no data."""
    compact: Callable[[Any], Any] = lambda value: value
    """Makes a completion's data smaller before they are stored and sent to other processes."""
    needs_tokens_endpoint: bool = False
    """True if a server's /v1/completions does not return the data, but its endpoint for tokens and images does."""


class GenerationResult(NamedTuple):
    """The result of a request to a server."""

    output: dict[str, Any]
    """The result of TRL's client: completions and their log-probs."""
    extras: dict[str, list[Any]]
    """Field of an `EngineExtra` -> the data of each completion."""


SendRequest = Callable[[Mapping[str, Any]], GenerationResult]
"""Sends a request to a server, and waits for the result.

A request is the arguments of TRL's client, and perhaps a `first_seed`.
"""


class NotServedError(Exception):
    """Says why an engine cannot serve an adapter alone."""


class AdapterSync(Protocol):
    """Sends a policy's adapter to an engine, in place of all weights. Every process calls the methods.

    `prepare` runs before the engine is built, then `send` once it is built and at each sync. If one of them fails at
    first, `is_required` decides between an error and merged weights.
    """

    def is_required(self, engine: Any) -> bool:
        """Return True if the engine cannot have merged weights instead, or must not."""
        ...

    def prepare(self, engine: Any) -> dict[str, object]:
        """Return options with which a colocated engine must be built. Raises a `NotServedError` if it cannot serve."""
        ...

    def send(self, engine: Any) -> object | None:
        """Send the adapter as it is now. Raises an error if the engine does not take it.

        Returns the `lora_request` with which a colocated engine generates from now on; None for a server.
        """
