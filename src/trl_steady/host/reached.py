"""Which of our methods a training run has reached, and who keeps it from reaching one."""

import inspect
from collections.abc import Collection

import trl

__all__ = ["Reached", "is_known"]

# TRL's method -> the method of ours that it hands on to, which a subclass may override in its place
_HOOKS = {
    "_compute_loss": "micro_batch_loss",
    "_get_per_token_logps_and_entropies": "log_probs",
    "_generate_and_score_completions": "rollout",
    "_generate_single_turn": "generate",
}
# TRL's method -> the nearest one before it on the way of a micro-batch
_CALLERS = {
    "_compute_loss": "compute_loss",
    "_get_per_token_logps_and_entropies": "_compute_loss",
    "_calculate_rewards": "_generate_and_score_completions",
    "_generate_single_turn": "_generate_and_score_completions",
}
# TRL's method -> the method of TRL that calls it and that we do not override
_ABOVE = {
    "compute_loss": "training_step",
    "_generate_and_score_completions": "_prepare_inputs",
    "_generate_single_turn": "_generate",
}
# read at import: `trl-steady run` puts ours in the place of TRL's
_THEIRS = {base.__module__ for base in trl.GRPOTrainer.__mro__}
_IN_ROLLOUTS = {"_generate_and_score_completions", "_calculate_rewards", "_generate_single_turn"}


class Reached:
    """The methods of ours that training has reached, by TRL's names or by ours.

    A subclass, a mixin, a patch or an attribute of the trainer may keep a micro-batch from our code. All of them show
    at run time, and only there: a call of `super()` may depend on a condition.
    """

    def __init__(self, trainer: trl.GRPOTrainer) -> None:
        self._trainer, self._names = trainer, set[str]()

    def note(self, method: str) -> None:
        """Note that a method of ours runs; only in training, since evaluation may take another way."""
        assert self._trainer.model is not None
        if self._trainer.model.training:
            self._names.add(method)

    def missing(self, methods: Collection[str], *, has_generated: bool) -> list[str]:
        """Return the methods at which a micro-batch has left the way to one of `methods`.

        Args:
            methods: TRL's names.
            has_generated: True if a rollout was made since training began. Without one the methods of rollouts do not
                count: a resume inside a generation window goes on with the rollout of the checkpoint.
        """
        found: dict[str, None] = {}
        for method in methods:
            if method in self or (method in _IN_ROLLOUTS and not has_generated):
                continue
            while method in _CALLERS and _CALLERS[method] not in self:
                method = _CALLERS[method]
            found[method] = None
        return list(found)

    def why(self, method: str) -> tuple[str, str]:
        """Return what keeps micro-batches from a method that is missing, and what to do about it."""
        kind = type(self._trainer)
        for name in filter(None, (method, _HOOKS.get(method), _ABOVE.get(method))):
            if name in vars(self._trainer):
                return f"{_name(kind)} has an attribute {name} that does not call the method", "Call the method in it"
            classes = [base for base in kind.__mro__ if name in vars(base) and not is_known(vars(base)[name])]
            patched = [base for base in classes if _is_ours(base)]
            if patched:
                whole = f"{_name(patched[0])}.{name}"
                return f"{_name(vars(patched[0])[name])} replaces {whole} without calling it", f"Call {whole} in it"
            if classes:
                whose = " and ".join(map(_name, classes))
                verb = "override" if len(classes) > 1 else "overrides"
                return f"{whose} {verb} {name} without calling super()", f"Call super().{name}(...)"
        return f"{_name(kind)} trains without calling {method}", f"Call {method} where it overrides what TRL calls"

    def calls_super(self, method: str) -> bool:
        """Return whether all overrides on the way to a method call `super()`, perhaps under a condition."""
        names = filter(None, (method, _HOOKS.get(method), _ABOVE.get(method)))
        own = [vars(base).get(name) for name in names for base in type(self._trainer).__mro__]
        codes = [getattr(inspect.unwrap(each), "__code__", None) for each in own if each and not is_known(each)]
        return bool(codes) and all(code and "super" in code.co_names for code in codes)

    def __contains__(self, method: str) -> bool:
        return _HOOKS.get(method, method) in self._names


def is_known(method: object) -> bool:
    """Return whether a method in a class is ours or one that ours override, and not a script's."""
    function = getattr(method, "__func__", method)
    return _is_ours(function) or getattr(function, "__module__", "") in _THEIRS


def _is_ours(named: object) -> bool:
    return getattr(named, "__module__", "").split(".")[0] == "trl_steady"


def _name(named: object) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', named)}"
