"""Changes of what TRL computes in a rollout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_steady.host.names import overridden

__all__ = ["building_reference", "scoring_reference"]


@contextmanager
def building_reference(args: Any) -> Iterator[None]:
    """Let TRL's constructor make a reference although the loss has no KL."""
    with overridden(args, {} if args.beta else {"beta": 1.0}):
        yield


@contextmanager
def scoring_reference(trainer: Any) -> Iterator[None]:
    """Let TRL's rollout score the old policy and the reference, which its loss may not need."""
    # TRL skips the old policy if a rollout feeds one update, so that the ratio is 1
    beyond = trainer.args.gradient_accumulation_steps + 1
    with overridden(trainer, {"num_iterations": beyond, "beta": trainer.beta or 1.0}):
        yield
