"""Record of trl-steady's methods that a training run has reached, and of the overrides that may bypass one."""

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


class Reached:
    """The methods of trl-steady that training has reached.

    A subclass, a mixin, a patch or an attribute of the trainer may bypass trl-steady's code. Only a run shows it,
    because a call of `super()` may depend on a condition.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._names = trainer, set[str]()

    def note(self, method: str) -> None:
        """Record that a method of trl-steady runs in training; evaluation may take another path."""
        if self._trainer.model.training:
            self._names.add(method)

    def __contains__(self, method: str) -> bool:
        return method in self._names


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
