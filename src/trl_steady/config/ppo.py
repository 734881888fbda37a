"""`GRPOConfig` with the options of PPO's critic, and without those of GRPO's groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.options import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    documented,
    needs,
    option,
)

# options about the advantages of groups -> their defaults
_OF_GROUPS = {
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "step_advantage": "return_to_go",
}


class _Alone(int):
    """A hack: one completion of a prompt, which TRL's config does not find too few, because 1 < 2 is False."""

    def __lt__(self, other: int) -> bool:
        return False


def _is_masked(args: "PPOConfig") -> str | None:
    return "mask_truncated_completions=True" if args.mask_truncated_completions else None


@documented
@dataclass
class PPOConfig(GRPOConfig):
    """`GRPOConfig` for PPO with a critic (arXiv 1707.06347), as InstructGPT trains (arXiv 2203.02155).

    Advantages are those of a learned critic, one per token (GAE, arXiv 1506.02438), so one completion of a prompt is
    enough. All other options are those of `GRPOConfig`, among them TRL's.

    Args:
        {options}

    Raises:
        ValueError: As in `GRPOConfig`. The loss has one advantage per sequence.

    Warns:
        UserWarning: As in `GRPOConfig`.
    """

    METHOD = "PPO"
    num_generations: int | None = option(1, "Completions of a prompt in a rollout. The critic needs no group.", COUNT)
    gamma: float = option(1.0, "Discount of later rewards, per action token.", SHARE)
    lam: float = option(0.95, "GAE's lambda of the policy's advantages.", SHARE)
    value_lam: float | None = option(
        None, "Lambda of the critic's targets (decoupled GAE, arXiv 2503.01491, uses 1.0). None: `lam`.", SHARE
    )
    kl_coef: float = option(
        0.05,
        "Each action token's reward loses this coefficient times log policy - log reference at rollout (k1; "
        "InstructGPT). 0: no KL in the reward.",
        NOT_NEGATIVE,
    )
    kl_target: float | None = option(
        None,
        "After each rollout, `kl_coef` moves toward this KL to the reference, in nats per answer (arXiv 1909.08593, "
        "section 2.2). None: it stays.",
        POSITIVE,
        idle=needs("kl_coef"),
    )
    kl_horizon: int = option(
        10000,
        "With `kl_target`, number of answers in which `kl_coef` adapts.",
        COUNT,
        idle=needs("kl_target"),
    )
    kl_estimator: str | None = option(
        None,
        'As in GRPO, for the KL that `beta` adds to the loss; unset, `"k3"`. The KL in the reward is always k1.',
        ("k1", "k2", "k3"),
        idle=needs("beta"),
    )
    cliprange_value: float | None = option(
        0.2,
        "How far a value may move from its value at rollout before its loss is clipped. None: no clip.",
        POSITIVE,
        takes_none=True,
    )
    value_learning_rate: float | None = option(
        None,
        "Learning rate of the critic, under the scheduler of the policy. None: that of the policy.",
        NOT_NEGATIVE,
    )
    value_warmup_steps: int = option(
        0,
        "Number of first optimizer steps in which only the critic learns.",
        Range(lambda value: value >= 0 and value == int(value), "0, 1, 2, ..."),
    )
    value_init: str = option(
        "policy",
        'Start of the critic: `"policy"` (a copy of the policy), `"reward"` (the reward model) or the path of a '
        "saved critic. Its head begins at 0, unless it is loaded.",
        Range(os.fspath, "'policy', 'reward' or a path"),
    )
    whiten_advantages: bool = option(True, "Shift and scale advantages to mean 0 and variance 1, over all processes.")
    whiten_rewards: bool = option(
        False, "Scale the tokens' rewards, with their KL, to variance 1 over all processes. Their mean stays."
    )
    bootstrap_truncated: bool = option(
        False,
        "The critic's value follows an answer that was cut off. False: 0 follows it, as an answer that ended.",
        idle=_is_masked,
    )
    missing_eos_penalty: float | None = option(
        None,
        "Subtract this from the score of an answer without an end-of-sequence token. None: subtract nothing.",
        NOT_NEGATIVE,
        idle=_is_masked,
    )
    ptx_coef: float = option(
        0.0,
        "Weight of the language-model loss on `ptx_dataset` (InstructGPT, arXiv 2203.02155, equation 2).",
        NOT_NEGATIVE,
    )

    def _fill_unset(self) -> None:
        super()._fill_unset()
        self.value_init = os.fspath(self.value_init)
        if self.kl_estimator is None and self.beta:
            self.kl_estimator = "k3"

    def _run_trl_checks(self) -> None:
        given = self.num_generations
        self.num_generations = _Alone(1) if given == 1 else given
        try:
            super()._run_trl_checks()
        finally:
            self.num_generations = given

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        level = self.importance_sampling_level or "token"
        if not self.loss.takes_token_advantages(level):
            yield (
                f"loss_type={self.loss_type!r} with importance_sampling_level={level!r} does not work with PPO: only "
                "the mean of a sequence's advantages would count. Leave importance_sampling_level unset, and set "
                "loss_type to one of TRL's or to 'gspo_token'."
            )
        if self.fp16:
            yield "fp16=True does not work with PPO: policy and critic would share one loss scale. Set bf16=True."
        if self.steps_in_backward:
            yield (
                f"optim={self.steps_in_backward!r} takes its steps in backward, where policy and critic cannot be "
                "told apart. Set another optimizer."
            )

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return self.beta != 0 or self.kl_coef != 0

    @property
    def cannot_act(self) -> list[str]:
        """Warnings about options that have no effect, or probably not the intended one, each with a fix."""
        return super().cannot_act + [
            f"{name}={getattr(self, name)!r} cannot act: the critic gives the advantages. Leave {name} unset."
            for name, default in _OF_GROUPS.items()
            if getattr(self, name) != default
        ]
