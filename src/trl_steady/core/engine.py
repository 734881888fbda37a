"""Requests of a feature to an inference engine, and the results of one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class EngineOutput(NamedTuple):
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
    """Field of an `EngineOutput` -> the data of each completion."""


SendRequest = Callable[[Mapping[str, Any]], GenerationResult]
"""Sends a request to a server, and waits for the result. A request is the arguments of TRL's client."""


class AdapterSync(Protocol):
    """Sends a policy's adapter to an engine, in place of all weights. Every process calls the methods.

    While an engine is built: `why_not`, `flags`, `send`, `attach`. Then `send` at each sync. If the engine cannot take
    the adapter, `is_required` decides between an error and merged weights.
    """

    option: str
    """The option and its value, for messages."""

    def is_required(self, engine: Any) -> bool:
        """Return True if the engine cannot have merged weights instead."""
        ...

    def why_not(self, engine: Any) -> str | None:
        """Return why the engine, which is not built yet, cannot serve the adapter; None if it may."""

    def flags(self, engine: Any) -> dict[str, object]:
        """Return the options of vLLM that a colocated engine needs."""
        ...

    def send(self, engine: Any) -> None:
        """Send the adapter as it is now. Raises an error if the engine does not take it."""

    def attach(self, engine: Any) -> None:
        """Let the engine generate with the adapter from now on."""
