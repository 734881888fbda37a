"""`GRPOConfig` with the options of PPO's critic, and without those of GRPO's groups."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.options import (
    count,
    count_or_0,
    documented,
    needs,
    not_negative,
    option,
    positive,
    share,
    trl_default,
)
from trl_steady.host.mistakes import refuse_names_of_other_ppos
from trl_steady.losses.table import LOSSES


class _Alone(int):
    """A hack: one completion of a prompt, which TRL's config does not find too few, because 1 < 2 is False."""

    def __lt__(self, other: int) -> bool:
        return False


def _is_start(value: str | os.PathLike[str]) -> bool:
    path = os.fspath(value)
    is_known = path in ("policy", "reward") or os.path.isdir(path)
    return is_known or bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path))


def _by_length(args: "PPOConfig") -> str | None:
    return None if args.lam_length_alpha is None else f"lam_length_alpha={args.lam_length_alpha}"


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
        ValueError: As in `GRPOConfig`. The loss has one advantage per sequence. An option is one of another package's
            PPO; the message has the name to use.

    Warns:
        UserWarning: As in `GRPOConfig`. `kl_coef` and `beta` both hold the policy near the reference.
    """

    METHOD = "PPO"
    num_generations: int | None = option(
        1,
        "Completions of a prompt in a rollout. The critic needs no group.",
        count,
        "1 or more completions of a prompt",
    )
    gamma: float = option(1.0, "Discount of later rewards, per action token.", share, "between 0 and 1")
    lam: float = option(0.95, "GAE's lambda of the policy's advantages.", share, "between 0 and 1", idle=_by_length)
    value_lam: float | None = option(
        None,
        "Lambda of the critic's targets (decoupled GAE, arXiv 2503.01491, uses 1.0). None: `lam`.",
        share,
        "between 0 and 1, or None for lam",
    )
    lam_length_alpha: float | None = option(
        None,
        "The policy's lambda is 1 - 1 / (alpha * length), at least 0, with the number of action tokens as length "
        "(VAPO, arXiv 2504.05118, uses 0.05). None: `lam`.",
        positive,
        "a finite number above 0, or None for lam",
    )
    kl_coef: float = option(
        0.05,
        "Each action token's reward loses this coefficient times log policy - log reference at rollout (k1; "
        "InstructGPT). 0: no KL in the reward.",
        not_negative,
        "a finite number, 0 or above",
    )
    kl_target: float | None = option(
        None,
        "After each rollout, `kl_coef` moves toward this KL to the reference, in nats per answer (arXiv 1909.08593, "
        "section 2.2). None: it stays.",
        positive,
        "above 0, in nats an answer, or None for a fixed kl_coef",
        idle=needs("kl_coef"),
    )
    kl_horizon: int = option(
        10000,
        "With `kl_target`, number of answers in which `kl_coef` adapts.",
        count,
        "1 answer or more",
        idle=needs("kl_target"),
    )
    beta: float = option(
        0.0,
        "Coefficient of a KL in the loss, as in GRPO, beside or in place of `kl_coef`.",
        not_negative,
        "a finite number, 0 or above",
    )
    kl_estimator: str | None = option(
        None,
        'As in GRPO, for the KL that `beta` adds to the loss; unset, `"k3"`. The KL in the reward is always k1.',
        ("k1", "k2", "k3"),
        "'k1', 'k2', 'k3' or None",
        idle=needs("beta"),
    )
    cliprange_value: float | None = option(
        0.2,
        "How far a value may move from its value at rollout before its loss is clipped. None: no clip.",
        positive,
        "a finite number above 0, or None for no clip",
    )
    value_learning_rate: float | None = option(
        None,
        "Learning rate of the critic, under the scheduler of the policy. None: that of the policy.",
        not_negative,
        "a finite number, 0 or above, or None for learning_rate",
    )
    value_warmup_steps: int = option(
        0, "Number of first optimizer steps in which only the critic learns.", count_or_0, "0 or more optimizer steps"
    )
    value_updates: int = option(
        1, "Updates of the critic in each optimizer step, all on the step's samples.", count, "1 or more"
    )
    value_init: str = option(
        "policy",
        'Start of the critic: `"policy"` (a copy of the policy), `"reward"` (the reward model) or the path of a '
        "saved critic. Its head begins at 0, unless it is loaded.",
        _is_start,
        "'policy', 'reward', an existing folder, or 'owner/name' of a model on the hub",
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
        not_negative,
        "a finite number, 0 or above (it is subtracted), or None for no penalty",
        idle=_is_masked,
    )
    ptx_coef: float = option(
        0.0,
        "Weight of the language-model loss on `ptx_dataset` (InstructGPT, arXiv 2203.02155, equation 2).",
        not_negative,
        "a finite number, 0 or above",
    )

    def __new__(cls, *_: object, **options: object) -> "PPOConfig":
        """Refuse options of other packages' PPO with the name to use."""
        refuse_names_of_other_ppos(options, {each.name for each in fields(cls)})
        return super().__new__(cls)

    def _fill_unset(self) -> None:
        super()._fill_unset()
        self.value_init = os.fspath(self.value_init)
        if self.kl_estimator is None and self.beta:
            self.kl_estimator = "k3"

    def _run_trls_checks(self) -> None:
        given = self.num_generations
        self.num_generations = _Alone(1) if given == 1 else given
        try:
            super()._run_trls_checks()
        finally:
            self.num_generations = given

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        level = self.importance_sampling_level or "token"
        if not self.loss.takes_token_advantages(level):
            tokens = [name for name, loss in LOSSES.items() if loss.takes_token_advantages(loss.level or "token")]
            yield (
                f"loss_type={self.loss_type!r} with importance_sampling_level={level!r} does not work with PPO: only "
                "the mean of the critic's advantages over a sequence would count. Leave importance_sampling_level "
                f"unset, and set loss_type to one of {', '.join(map(repr, tokens))}."
            )
        if self.fp16:
            yield (
                "fp16=True does not work with PPO: its loss scale is one for policy and critic, whose gradients are "
                "clipped apart. Set bf16=True."
            )
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
        messages = super().cannot_act
        of_groups = {name: trl_default(name) for name in ("scale_rewards", "multi_objective_aggregation")}
        of_groups["step_advantage"] = "return_to_go"
        for name, default in of_groups.items():
            if getattr(self, name) != default:
                messages.append(
                    f"{name}={getattr(self, name)!r} cannot act: the critic gives the advantages. Leave {name} unset."
                )
        if self.kl_coef != 0 and self.beta != 0:
            messages.append(
                f"The policy is held near the reference twice, by kl_coef={self.kl_coef} in the reward and by beta="
                f"{self.beta} in the loss. Set one of them to 0, unless you mean both."
            )
        return messages
