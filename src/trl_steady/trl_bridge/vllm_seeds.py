"""Send requests to vLLM with a seed for each completion. This file knows how TRL asks a colocated engine and a server.

The seeds of one call are consecutive numbers, so that two completions of a call never share one.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.vllm_client import copy_client

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient
else:
    VLLMClient = object

FIRST_SEED = "first_seed"
"""Key of a request to a server: the seed of its first completion. It is no argument of TRL's client."""


def sample_from(trainer: Trainer, first_seed: int) -> AbstractContextManager[None]:
    """Return a context in which the trainer's engine samples its rows with the seeds from `first_seed` on."""
    return patched(trainer.vllm_generation, {"first_seed": first_seed})


def with_seeds(generate: Callable[..., Any], first_seed: int) -> Callable[..., Any]:
    """Wrap a colocated engine's `generate`, so that prompt number i is sampled with the seed `first_seed + i`."""

    def generate_with_seeds(prompts: Sequence[Any], *, sampling_params: Any, **others: object) -> Any:
        params_of_prompts: list[Any] = []
        for i in range(len(prompts)):
            params = copy.copy(sampling_params)  # as vLLM makes those of several completions of a prompt
            params.seed = first_seed + i
            params_of_prompts.append(params)
        return generate(prompts, sampling_params=params_of_prompts, **others)

    return generate_with_seeds


def client_for(client: VLLMClient, request: Mapping[str, Any]) -> VLLMClient:
    """Return a copy of a client that can `ask` this request. Its attributes may be replaced."""
    if FIRST_SEED not in request:
        return copy.copy(client)
    connections = len(request["prompts"])  # requests logs a warning for each one more than it keeps
    return copy_client(client, lambda adapter: adapter.init_poolmanager(connections, connections))


def ask(client: VLLMClient, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what TRL's client returns for a request.

    If the request has a first seed, the prompts are sent one by one. vLLM would otherwise take the same seed for all
    of them. It samples completion number i of a prompt with the prompt's seed plus i.
    """
    arguments = dict(request)
    first_seed = arguments.pop(FIRST_SEED, None)
    if first_seed is None:
        return client.generate(**arguments)
    of_prompts: list[dict[str, Any]] = []
    for i, prompt in enumerate(arguments["prompts"]):
        seed = first_seed + i * arguments["n"]
        of_prompt = {**arguments, "prompts": [prompt]}
        of_prompt["generation_kwargs"] = {**(arguments.get("generation_kwargs") or {}), "seed": seed}
        if arguments.get("features") is not None:
            of_prompt["features"] = [arguments["features"][i]]
        of_prompts.append(of_prompt)
    with ThreadPoolExecutor(len(of_prompts)) as threads:  # all at once, as in one request
        outputs = list(threads.map(lambda of_prompt: client.generate(**of_prompt), of_prompts))
    return _joined(outputs)


def _joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outputs of TRL's client for several prompts as one."""
    joined: dict[str, Any] = {}
    for name in outputs[0]:
        values = [output[name] for output in outputs]
        joined[name] = None
        if values[0] is not None:  # log-probs that were not asked for
            joined[name] = [value for of_prompt in values for value in of_prompt]
    return joined


def engine_seed(seed: int, engine: int, engines: int) -> int:
    """Return the seed of a colocated engine, from the user's seed: another one for each engine and each seed."""
    return (seed * engines + engine) % 2**32  # NumPy takes no larger one
