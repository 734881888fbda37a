"""Private state of TRL's trainers, and the names of their methods. This file knows none of our parts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_LOSS = ("training_step", "compute_loss", "_compute_loss", "micro_batch_loss")
_ROLLOUT = ("_prepare_inputs", "_generate_and_score_completions", "rollout")
# our method -> the methods on the way to it, ours and TRL's, that a script may override
_WAYS = {
    "compute_loss": _LOSS[:2],
    "micro_batch_loss": _LOSS,
    "log_probs": (*_LOSS, "_get_per_token_logps_and_entropies", "log_probs"),
    "rollout": _ROLLOUT,
    "calculate_rewards": (*_ROLLOUT, "_calculate_rewards"),
    "generate": (*_ROLLOUT, "_generate", "_generate_single_turn", "generate"),
}
OF_ROLLOUTS = frozenset(("rollout", "calculate_rewards", "generate"))
"""Methods that a step on the rollout of a checkpoint does not reach."""


def trls(trainer: object) -> Any:
    """Return the trainer as TRL's, whose private attributes no type declares."""
    return trainer


def set_cards(kind: Any, method: str, **paper: str) -> None:
    """Let the model cards of a trainer class name this method, with the title and id of its paper."""
    kind._name, kind._tag_names, kind._paper = method, ["trl", method.lower()], paper


def completions_of(generated: Any) -> list[list[int]]:
    """Return the completions from what TRL's generation returns: alone, or first beside other values."""
    return generated[0] if isinstance(generated, tuple) else generated


def generation_interval(trainer: object) -> int:
    """Return the number of micro-batches between two generations."""
    args = trls(trainer).args  # a rollout that scores a reference replaces the trainer's `num_iterations`
    return args.steps_per_generation * args.num_iterations


def is_before_generation(trainer: object) -> bool:
    """Return True if the next training micro-batch begins with a generation."""
    return trls(trainer)._step % generation_interval(trainer) == 0


def rollout_number(trainer: object) -> int:
    """Return the number of the pass over rollouts to which the current training micro-batch belongs."""
    return trls(trainer)._step // trls(trainer).args.steps_per_generation


def logged(trainer: object, name: str) -> list[float]:
    """Return the values of a training metric since the last log. Every process must call this function."""
    metrics = getattr(trainer, "metrics", None)
    if metrics is not None:  # ours, which processes have not exchanged yet
        metrics.settle()
    return trls(trainer)._metrics["train"].get(name, [])


def is_settled(trainer: object) -> bool:
    """Return True if processes need not communicate to read a training metric."""
    metrics = getattr(trainer, "metrics", None)
    return metrics is None or metrics.is_settled


def logged_count(trainer: object, name: str) -> int:
    """Return how many values of a training metric there are since the last log."""
    metrics = getattr(trainer, "metrics", None)
    return len(trls(trainer)._metrics["train"].get(name, [])) if metrics is None else metrics.count(name)


def log_last(trainer: object, name: str, value: float) -> None:
    """Log a training metric by its last value before a log, not by its mean."""
    trls(trainer)._metrics["train"][name] = [value]


def forget_sync(trainer: object) -> None:
    """Let the next generation send the policy to vLLM. TRL sends it only if the number of the step has changed."""
    trls(trainer)._last_loaded_step = -1


@contextmanager
def overridden(target: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of an object inside this context."""
    attributes = vars(target)
    before = dict(attributes)
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def overrides(trainer: object, method: str) -> list[str]:
    """Return the names of a script's methods on the way to one of ours, such as "__main__.Mine.compute_loss"."""
    kind = type(trainer)
    found = [f"{kind.__qualname__}().{name}" for name in _WAYS[method] if name in vars(trainer)]
    for name in _WAYS[method]:
        for base in kind.__mro__:
            module = getattr(vars(base).get(name), "__module__", "")
            if name in vars(base) and module.split(".")[0] not in ("trl_steady", "trl", "transformers"):
                found.append(f"{base.__module__}.{base.__qualname__}.{name}")
    return found
