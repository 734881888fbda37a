"""Private state of TRL's trainers. This file knows none of our features."""

import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeAlias

import trl

from trl_steady.trl_bridge.patching import patched

TRLTrainer: TypeAlias = trl.GRPOTrainer | trl.RLOOTrainer
"""A trainer of TRL, with our features or without."""
# where TRL's trainers look up what they call
TRAINER_MODULES = [sys.modules[kind.__module__] for kind in (trl.GRPOTrainer, trl.RLOOTrainer)]


def as_trl_trainer(trainer: object) -> Any:
    """Return the trainer as TRL's, whose private attributes no type declares."""
    return trainer


def trl_class(trainer: object) -> Any:
    """Return the class of TRL that a trainer extends, whose methods are without ours and a script's."""
    return next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.trainer"))


def set_model_card(kind: Any, method: str, **paper: str) -> None:
    """Let the model cards of a trainer class name this method, with the title and id of its paper."""
    kind._name, kind._tag_names, kind._paper = method, ["trl", method.lower()], paper


def generated_completions(generated: Any) -> list[list[int]]:
    """Return the completions from what TRL's generation returns: alone, or first beside other values."""
    if isinstance(generated, tuple):
        return generated[0]
    return generated


def generation_interval(trainer: object) -> int:
    """Return the number of micro-batches between two generations."""
    args = as_trl_trainer(trainer).args  # a rollout that scores a reference replaces the trainer's `num_iterations`
    return args.steps_per_generation * args.num_iterations


def is_before_generation(trainer: object) -> bool:
    """Return True if the next training micro-batch begins with a generation."""
    return as_trl_trainer(trainer)._step % generation_interval(trainer) == 0


def rollout_number(trainer: object) -> int:
    """Return the number of the pass over rollouts to which the current training micro-batch belongs."""
    return as_trl_trainer(trainer)._step // as_trl_trainer(trainer).args.steps_per_generation


def metric_values(trainer: object, name: str) -> list[float]:
    """Return the values of a training metric since the last log. Every process must call this function."""
    metrics = getattr(trainer, "metrics", None)
    if metrics is not None:  # ours, which processes have not exchanged yet
        metrics.settle()
    return as_trl_trainer(trainer)._metrics["train"].get(name, [])


def metrics_are_settled(trainer: object) -> bool:
    """Return True if processes need not communicate to read a training metric."""
    metrics = getattr(trainer, "metrics", None)
    return metrics is None or metrics.is_settled


def metric_count(trainer: object, name: str) -> int:
    """Return how many values of a training metric there are since the last log."""
    metrics = getattr(trainer, "metrics", None)
    if metrics is not None:
        return metrics.count(name)
    return len(as_trl_trainer(trainer)._metrics["train"].get(name, []))


def set_metric(trainer: object, name: str, value: float) -> None:
    """Log a training metric by its last value before a log, not by its mean."""
    as_trl_trainer(trainer)._metrics["train"][name] = [value]


def request_weight_sync(trainer: object) -> None:
    """Let the next generation send the policy to vLLM. TRL sends it only if the number of the step has changed."""
    as_trl_trainer(trainer)._last_loaded_step = -1


@contextmanager
def hold_step(trainer: object) -> Generator[None]:
    """Leave out the optimizer's step inside this context. The scheduler waits too, as after an overflow."""

    optimizer, scheduler = as_trl_trainer(trainer).optimizer, as_trl_trainer(trainer).lr_scheduler
    with patched(optimizer, {"step": _skip}), patched(scheduler, {"step": _skip}):
        yield


@contextmanager
def without_scaler(trainer: object) -> Generator[None]:
    """Take a step without fp16's loss scaler inside this context. The scaler would raise if there are no gradients."""
    optimizer, accelerator = as_trl_trainer(trainer).optimizer, as_trl_trainer(trainer).accelerator
    with patched(optimizer, {"scaler": None}), patched(accelerator, {"unscale_gradients": _skip}):
        yield


def _skip(*_: object, **__: object) -> None:
    """Do nothing in place of a method."""


def is_called_by_transformers(trainer: object) -> bool:
    """Return True if transformers has called the method `log` of a trainer that asks, also through a script's methods.

    All processes write transformers' own logs. A script may call `log` on one of them.
    """
    log = as_trl_trainer(trainer).log
    outermost = getattr(getattr(log, "__func__", log), "__code__", None)  # a decorator's wrapper has another name
    called: CodeType | None = None
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] == "transformers":
            is_log = called is not None and (called is outermost or called.co_name == "log")
            return module == "transformers.trainer" and is_log
        called = frame.f_code
        frame = frame.f_back
    return False
