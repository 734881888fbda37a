"""The overrides on the way to methods of trl-steady, which a training may therefore not reach. It knows only names."""

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
