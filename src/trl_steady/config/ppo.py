# the KL's estimator may be unset here
# pyright: reportIncompatibleVariableOverride=false
"""`GRPOConfig` with the options of PPO's critic, and without those of GRPO's groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.options import (
    COEFFICIENT,
    COUNT,
    COUNT_OR_0,
    IN_ROLLOUT,
    POSITIVE,
    SHARE,
    Idle,
    Needs,
    Range,
    option,
)
from trl_steady.losses import LOSSES

# about the advantages of groups
_GROUP_OPTIONS = ("scale_rewards", "multi_objective_aggregation", "advantage_baseline", "step_advantage")
_START = Range(os.fspath, "'policy', 'reward' or a path", {"minLength": 1})


class _OneCompletion(int):
    """The number 1, which is not below 2.

    TRL's `__post_init__` refuses `num_generations < 2` amid checks that PPO needs, so that they cannot be run without
    this one. No other number divides every batch size, as the next check demands.
    """

    def __lt__(self, other: int) -> bool:
        return False


@dataclass
class PPOConfig(GRPOConfig):
    """`GRPOConfig` for PPO with a critic (arXiv 1707.06347), as InstructGPT trains (arXiv 2203.02155).

    Advantages are those of a learned critic, one per token (GAE, arXiv 1506.02438), so one completion of a prompt is
    enough. All other options are those of `GRPOConfig`, among them TRL's.

    Raises:
        ValueError: As in `GRPOConfig`. The loss has one advantage per sequence.

    Warns:
        UserWarning: As in `GRPOConfig`.
    """

    METHOD = "PPO"
    num_generations: Annotated[int, COUNT] = option(
        1, "Completions of a prompt in a rollout. The critic needs no group."
    )
    gamma: Annotated[float, SHARE, IN_ROLLOUT] = option(1.0, "Discount of later rewards, per action token.")
    lam: Annotated[float, SHARE, IN_ROLLOUT] = option(0.95, "GAE's lambda of the policy's advantages.")
    value_lam: Annotated[float | None, SHARE, IN_ROLLOUT] = option(
        None, "Lambda of the critic's targets (decoupled GAE, arXiv 2503.01491, uses 1.0). None: `lam`."
    )
    kl_coef: Annotated[float, COEFFICIENT, IN_ROLLOUT] = option(
        0.05,
        "Each action token's reward loses this coefficient times log policy - log reference at rollout (k1; "
        "InstructGPT). 0: no KL in the reward.",
    )
    kl_target: Annotated[float | None, POSITIVE, Needs("kl_coef")] = option(
        None,
        "After each rollout, `kl_coef` moves toward this KL to the reference, in nats per answer (arXiv 1909.08593, "
        "section 2.2). None: it stays.",
    )
    kl_horizon: Annotated[int, COUNT, Needs("kl_target")] = option(
        10000, "With `kl_target`, number of answers in which `kl_coef` adapts."
    )
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Needs("beta")] = option(
        None, 'As in GRPO, for the KL that `beta` adds to the loss; unset, `"k3"`. The KL in the reward is always k1.'
    )
    cliprange_value: Annotated[float | None, POSITIVE] = option(
        0.2, "How far a value may move from its value at rollout before its loss is clipped. None: no clip."
    )
    value_learning_rate: Annotated[float | None, COEFFICIENT] = option(
        None, "Learning rate of the critic, under the scheduler of the policy. None: that of the policy."
    )
    value_warmup_steps: Annotated[int, COUNT_OR_0] = option(
        0, "Number of first optimizer steps in which only the critic learns."
    )
    value_init: Annotated[str, _START] = option(
        "policy",
        'Start of the critic: `"policy"` (a copy of the policy), `"reward"` (the reward model) or the path of a '
        "saved critic. Its head begins at 0, unless it is loaded.",
    )
    whiten_advantages: Annotated[bool, IN_ROLLOUT] = option(
        True, "Shift and scale advantages to mean 0 and variance 1, over all processes."
    )
    whiten_rewards: Annotated[bool, IN_ROLLOUT] = option(
        False, "Scale the tokens' rewards, with their KL, to variance 1 over all processes. Their mean stays."
    )
    bootstrap_truncated: Annotated[bool, IN_ROLLOUT] = option(
        False, "The critic's value follows an answer that was cut off. False: 0 follows it, as an answer that ended."
    )
    missing_eos_penalty: Annotated[float | None, COEFFICIENT, IN_ROLLOUT] = option(
        None, "Subtract this from the score of an answer without an end-of-sequence token. None: subtract nothing."
    )
    ptx_coef: Annotated[float, COEFFICIENT] = option(
        0.0, "Weight of the language-model loss on `ptx_dataset` (InstructGPT, arXiv 2203.02155, equation 2)."
    )

    def _idle_because(self) -> dict[str, Idle | None]:
        reasons = super()._idle_because()
        if self.mask_truncated_completions:
            for name in ("bootstrap_truncated", "missing_eos_penalty"):
                reasons[name] = Idle("mask_truncated_completions=True", "Set mask_truncated_completions=False")
        for name in _GROUP_OPTIONS:
            reasons[name] = Idle("the critic gives the advantages", "")
        return reasons

    def _fill_unset(self) -> None:
        super()._fill_unset()
        self.value_init = os.fspath(self.value_init)
        if self.kl_estimator is None and self.beta:
            self.kl_estimator = "k3"

    def _run_trl_checks(self) -> None:
        given = self.num_generations
        if given == 1:
            self.num_generations = _OneCompletion(1)
        try:
            super()._run_trl_checks()
        finally:
            self.num_generations = given

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        level = self.importance_sampling_level or "token"
        if not self.loss.takes_token_advantages(level):
            ours = [repr(name) for name, loss in LOSSES.items() if loss.is_ours and loss.advantages == "token"]
            yield (
                f"loss_type={self.loss_type!r} with importance_sampling_level={level!r} does not work with PPO: only "
                "the mean of a sequence's advantages would count. Leave importance_sampling_level unset, and set "
                f"loss_type to one of TRL's or to {' or '.join(ours)}."
            )
        if self.beta_column and self.kl_coef:
            yield f"beta_column={self.beta_column!r} scales beta, not kl_coef={self.kl_coef}. Set kl_coef=0 and beta."
        if self.steps_in_backward:
            yield (
                f"optim={self.steps_in_backward!r} takes its steps in backward, where policy and critic cannot be "
                "told apart. Set another optimizer."
            )

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return super().has_reference or self.kl_coef != 0

    @property
    def measures_kl(self) -> bool:
        """True if the KL to the reference is measured."""
        return super().measures_kl or self.kl_coef != 0
