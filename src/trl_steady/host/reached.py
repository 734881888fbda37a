"""Record of trl-steady's methods that a training run has reached, and of the override that bypasses one."""

import inspect
from collections.abc import Collection
from typing import Any

import trl

__all__ = ["Reached", "is_known", "trls_name"]

# TRL's method -> trl-steady's public method that it calls, which a subclass may override instead
_HOOKS = {
    "_compute_loss": "micro_batch_loss",
    "_get_per_token_logps_and_entropies": "log_probs",
    "_generate_and_score_completions": "rollout",
    "_generate_single_turn": "generate",
}
# TRL's method -> the method that calls it while a micro-batch is processed
_CALLERS = {
    "_compute_loss": "compute_loss",
    "_get_per_token_logps_and_entropies": "_compute_loss",
    "_calculate_rewards": "_generate_and_score_completions",
    "_generate_single_turn": "_generate_and_score_completions",
}
# TRL's method -> the method of TRL that calls it
_ABOVE = {
    "compute_loss": "training_step",
    "_generate_and_score_completions": "_prepare_inputs",
    "_generate_single_turn": "_generate",
}
# read at import, before `trl-steady run` replaces TRL's trainer
_THEIRS = {base.__module__ for kind in (trl.GRPOTrainer, trl.RLOOTrainer) for base in kind.__mro__}
# other names of trl-steady for TRL's methods
_TRLS = {**{ours: trls for trls, ours in _HOOKS.items()}, "calculate_rewards": "_calculate_rewards"}
_IN_ROLLOUTS = {"_generate_and_score_completions", "_calculate_rewards", "_generate_single_turn"}


def trls_name(method: str) -> str:
    """Return the name of TRL's method that calls a public method of trl-steady."""
    return _TRLS.get(method, method)


class Reached:
    """The methods of trl-steady that training has reached, by TRL's names or by trl-steady's.

    A subclass, a mixin, a patch or an attribute of the trainer may bypass trl-steady's code. This is known only at run
    time, because a call of `super()` may depend on a condition.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._names = trainer, set[str]()

    def note(self, method: str) -> None:
        """Record that a method of trl-steady runs in training; evaluation may take another path."""
        if self._trainer.model.training:
            self._names.add(method)

    def missing(self, methods: Collection[str], *, has_generated: bool) -> list[str]:
        """Return the first methods of TRL that micro-batches did not reach on the way to `methods`.

        Args:
            methods: Names of trl-steady.
            has_generated: True if this run has made a rollout. Otherwise the methods of rollouts do not count, because
                a resume inside a generation window continues with the rollout of the checkpoint.
        """
        found: dict[str, None] = {}
        for method in map(trls_name, methods):
            if method in self or (method in _IN_ROLLOUTS and not has_generated):
                continue
            while method in _CALLERS and _CALLERS[method] not in self:
                method = _CALLERS[method]
            found[method] = None
        return list(found)

    def why(self, method: str) -> tuple[str, str]:
        """Return the reason why micro-batches do not reach a method, and a fix."""
        kind = type(self._trainer)
        for name in filter(None, (method, _HOOKS.get(method), _ABOVE.get(method))):
            if name in vars(self._trainer):
                return (
                    f"{_name(kind)} has an attribute {name} that does not call the class's method",
                    "Call the class's method in it",
                )
            classes = [base for base in kind.__mro__ if name in vars(base) and not is_known(vars(base)[name])]
            patched = [base for base in classes if _is_ours(base)]
            if patched:
                whole = f"{_name(patched[0])}.{name}"
                return f"{_name(vars(patched[0])[name])} replaces {whole} without calling it", f"Call {whole} in it"
            if classes:
                whose = " and ".join(map(_name, classes))
                verb = "override" if len(classes) > 1 else "overrides"
                return f"{whose} {verb} {name} without calling super()", f"Call super().{name}(...)"
        return f"{_name(kind)} trains without calling {method}", f"Call {method} in the method that overrides TRL's"

    def calls_super(self, method: str) -> bool:
        """Return True if all overrides on the way to a method call `super()`, perhaps under a condition."""
        names = filter(None, (method, _HOOKS.get(method), _ABOVE.get(method)))
        own = [vars(base).get(name) for name in names for base in type(self._trainer).__mro__]
        codes = [getattr(inspect.unwrap(each), "__code__", None) for each in own if each and not is_known(each)]
        return bool(codes) and all(code and "super" in code.co_names for code in codes)

    def __contains__(self, method: str) -> bool:
        return _HOOKS.get(method, method) in self._names


def is_known(method: object) -> bool:
    """Return True if a method is trl-steady's or one that trl-steady overrides, and not a script's.

    A script's wrapper of such a method counts as the method, if `functools.wraps` has made it look like it.
    """
    function = getattr(method, "__func__", method)
    return _is_ours(function) or getattr(function, "__module__", "") in _THEIRS


def _is_ours(named: object) -> bool:
    return getattr(named, "__module__", "").split(".")[0] == "trl_steady"


def _name(named: object) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', named)}"
