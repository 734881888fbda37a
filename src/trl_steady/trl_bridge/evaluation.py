"""Evaluations: their rows, their sampling, and functions that are called as TRL calls reward functions.

This file knows how TRL's trainers evaluate and sample, and how accelerate divides the batches of an evaluation.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.trainer_utils import has_length

from trl_steady.core.feature import Trainer
from trl_steady.core.types import Rollout
from trl_steady.trl_bridge.patching import patched
from trl_steady.trl_bridge.rewards import start_async_loop, wrap_reward_functions
from trl_steady.trl_bridge.trl_state import as_trl_trainer, trl_class


def rows_of(loader: object, processes: int) -> int | None:
    """Return the number of rows that an evaluation draws; None if no process gets a row twice, or if it is not known.

    accelerate fills up the last batches of several processes with the first rows. A stream has no length.
    """
    sampler: Any = loader
    while hasattr(sampler, "batch_sampler"):  # accelerate's is around torch's
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    if processes == 1 or not has_length(sampler):
        return None
    return len(sampler)


def name_after_set(trainer: Trainer, prefix: str) -> None:
    """Name the metrics of an evaluation after its set, before they are logged. Every process must call this function.

    TRL logs `reward` as `eval_reward` for each of several sets, and transformers the loss as `eval_NAME_loss`.
    """
    set_name = prefix.removeprefix("eval_")
    if set_name == prefix:
        return
    trainer.metrics.log({}, is_collective=True)
    logged = trainer.logged_values["eval"]
    for name in list(logged):
        logged[f"{set_name}_{name}"] = logged.pop(name)


_LIKELIEST = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
"""Samples the likeliest token, as temperature 0 does, which a vLLM that returns its sampling mask refuses."""


@contextmanager
def sample_as(trainer: Trainer, options: Mapping[str, Any]) -> Generator[None]:
    """Let a trainer and its engine sample with these options of TRL inside this context. "greedy" is a temperature 0.

    A `rollout_func` finds them where it finds those of the training, on the trainer and in its `args`.
    """
    changed = dict(options)
    if changed.pop("greedy", False):
        changed["temperature"] = 0.0
    targets: list[tuple[object, dict[str, Any]]] = [(trainer, changed), (trainer.args, changed)]
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        sampled = dict(changed)
        if changed.get("temperature") == 0 and trainer.args.keep_sampling_mask:
            sampled |= _LIKELIEST
        own = _with_limit_named(sampled, "max_tokens")
        others = {name: value for name, value in engine.generation_kwargs.items() if name not in own}
        targets.append((engine, {**sampled, "generation_kwargs": others}))
    else:
        own = _with_limit_named(changed, "max_new_tokens")
        if own.get("temperature") == 0:
            own |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        elif "temperature" in own:
            own["do_sample"] = True
        kwargs = {**as_trl_trainer(trainer).generation_kwargs, **own}
        targets += [(as_trl_trainer(trainer).generation_config, own), (trainer, {"generation_kwargs": kwargs})]
    with ExitStack() as stack:
        for target, values in targets:
            stack.enter_context(patched(target, values))
        yield


def _with_limit_named(options: Mapping[str, Any], limit: str) -> dict[str, Any]:
    """Return options of TRL by the names of an engine, which differ in that of the limit of tokens only."""
    own = dict(options)
    if "max_completion_length" in own:
        own[limit] = own.pop("max_completion_length")
    return own


def call_as_rewards(
    trainer: Trainer,
    functions: Sequence[Callable[..., Any]],
    names: Sequence[str],
    rollout: Rollout,
    completion_ids: list[list[int]],
    read: Callable[[Any], tuple[float | None, Any]],
) -> list[list[Any]]:
    """Return what functions return for the completions of a rollout on this process, called as TRL calls rewards.

    TRL passes columns, environments and its loggers, runs async functions together, and checks lengths. Every process
    must call this function.

    Args:
        trainer: The trainer.
        functions: K functions with the signature of reward functions.
        names: (K,) their names.
        rollout: The rollout, whose rewards are known.
        completion_ids: (B,) the token ids of its completions.
        read: Reads a value that a function has returned, as a number, or None, and something else.

    Returns:
        (K, B) what `read` has returned.
    """
    found: dict[int, list[Any]] = {}

    def record(number: int, returned: Any) -> list[float | None]:
        found[number] = [read(value) for value in returned]
        return [value for value, _ in found[number]]

    def zeros(prompts: list[Any], **_: object) -> list[float]:
        return [0.0] * len(prompts)

    start_async_loop(trainer)
    called = {
        # TRL warns if all functions return None for a completion
        "reward_funcs": [*wrap_reward_functions(functions, [record]), zeros],
        "reward_func_names": [*names, "zeros"],
        "reward_processing_classes": [None] * (len(functions) + 1),
    }
    with patched(trainer, called):
        trl_class(trainer)._calculate_rewards(
            trainer, rollout.inputs, rollout.prompts, rollout.completions, completion_ids
        )
    return [found[number] for number in range(len(functions))]
