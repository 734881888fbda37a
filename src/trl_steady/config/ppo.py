"""`GRPOConfig` with the options of PPO's critic, and without those of GRPO's groups."""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trl_steady.config.grpo import GRPOConfig
from trl_steady.config.idle import idle_warnings
from trl_steady.config.shared import documented, option
from trl_steady.losses.table import LOSSES

__all__ = ["PPOConfig", "refuse_other_names"]

# what to set here -> names in TRL's former PPO, in verl and in OpenRLHF
_NAMES = {
    "model": "policy pretrain sft_model_path",
    "args": "config",
    "processing_class": "tokenizer",
    "train_dataset": "dataset prompt_data",
    "reward_funcs": "reward_model reward_model_path reward_pretrain",
    "value_model": "critic_pretrain",
    "kl_coef (the reference is the model as it was at the start)": "ref_model ref_policy",
    "kl_coef (the KL in the reward is always k1)": "init_kl_coef kl_penalty kl_estimator_in_reward",
    "kl_target (kl_coef follows it; no update is stopped early)": "adap_kl_ctrl early_stopping target target_kl",
    "kl_horizon": "horizon",
    "beta and kl_estimator": "kl_loss_coef kl_loss_type use_kl_loss",
    "epsilon and epsilon_high": "clip_ratio clip_ratio_high clip_ratio_low cliprange eps_clip eps_clip_low_high",
    "num_iterations": "max_epochs num_ppo_epochs ppo_epochs",
    "steps_per_generation and gradient_accumulation_steps": "mini_batch_size num_mini_batches ppo_mini_batch_size",
    "per_device_train_batch_size": "batch_size forward_batch_size local_rollout_forward_batch_size",
    "num_generations": "n_samples_per_prompt",
    "max_completion_length": "generate_max_len response_length",
    "lam": "gae_lambda lambd",
    "value_learning_rate (the value loss has no weight)": "critic_learning_rate vf_coef",
    "value_warmup_steps": "critic_warmup freezing_actor_steps",
    "cliprange_value": "value_clip",
    "entropy_coef": "entropy_coeff entropy_loss_coef",
    "generation_kwargs": "stop_token stop_token_id",
}
_ALIASES = {name: ours for ours, names in _NAMES.items() for name in names.split()}


def refuse_other_names(given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Refuse arguments that are named as in another package's PPO, which Python would only call unexpected.

    Args:
        given: Arguments of `PPOConfig` or of `PPOTrainer`, by name.
        known: Names that are taken, whatever they mean elsewhere.

    Raises:
        ValueError: The message has the name to use.
    """
    for name in sorted(given.keys() & _ALIASES.keys() - set(known)):
        value, ours = given[name], _ALIASES[name]
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        where = "PPOConfig" if hasattr(PPOConfig, ours.split()[0]) else "PPOTrainer"
        raise ValueError(f"{name}={shown} is an option of another package's PPO. Set {ours} in {where}.")


class _Alone(int):
    """Number of completions of a prompt, which TRL's config does not find too small."""

    def __lt__(self, other: int) -> bool:
        return False


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
    _DEPTH: ClassVar[int] = 4
    num_generations: int | None = option(1, "Completions of a prompt in a rollout. The critic needs no group.")
    gamma: float = option(1.0, "Discount of later rewards, per action token.")
    lam: float = option(0.95, "GAE's lambda of the policy's advantages.")
    value_lam: float | None = option(
        None, "Lambda of the critic's targets (decoupled GAE, arXiv 2503.01491, uses 1.0). None: `lam`."
    )
    lam_length_alpha: float | None = option(
        None,
        "The policy's lambda is 1 - 1 / (alpha * length), at least 0, with the number of action tokens as length "
        "(VAPO, arXiv 2504.05118, uses 0.05). None: `lam`.",
    )
    kl_coef: float = option(
        0.05,
        "Each action token's reward loses this coefficient times log policy - log reference at rollout (k1; "
        "InstructGPT). 0: no KL in the reward.",
    )
    kl_target: float | None = option(
        None,
        "After each rollout, `kl_coef` moves toward this KL to the reference, in nats per answer (arXiv 1909.08593, "
        "section 2.2). None: it stays.",
    )
    kl_horizon: int = option(10000, "With `kl_target`, number of answers in which `kl_coef` adapts.")
    beta: float = option(0.0, "Coefficient of a KL in the loss, as in GRPO, beside or in place of `kl_coef`.")
    kl_estimator: str | None = option(
        None, 'As in GRPO, for the KL that `beta` adds to the loss; unset, `"k3"`. The KL in the reward is always k1.'
    )
    cliprange_value: float | None = option(
        0.2, "How far a value may move from its value at rollout before its loss is clipped. None: no clip."
    )
    value_learning_rate: float | None = option(
        None, "Learning rate of the critic, under the scheduler of the policy. None: that of the policy."
    )
    value_warmup_steps: int = option(0, "Number of first optimizer steps in which only the critic learns.")
    value_updates: int = option(1, "Updates of the critic in each optimizer step, all on the step's samples.")
    value_init: str = option(
        "policy",
        'Start of the critic: `"policy"` (a copy of the policy), `"reward"` (the reward model) or the path of a '
        "saved critic. Its head begins at 0, unless it is loaded.",
    )
    whiten_advantages: bool = option(True, "Shift and scale advantages to mean 0 and variance 1, over all processes.")
    whiten_rewards: bool = option(
        False, "Scale the tokens' rewards, with their KL, to variance 1 over all processes. Their mean stays."
    )
    bootstrap_truncated: bool = option(
        False, "The critic's value follows an answer that was cut off. False: 0 follows it, as an answer that ended."
    )
    missing_eos_penalty: float | None = option(
        None, "Subtract this from the score of an answer without an end-of-sequence token. None: subtract nothing."
    )
    ptx_coef: float = option(
        0.0, "Weight of the language-model loss on `ptx_dataset` (InstructGPT, arXiv 2203.02155, equation 2)."
    )

    def __new__(cls, *_: Any, **options: Any) -> "PPOConfig":
        """Refuse options of other packages' PPO with the name to use."""
        refuse_other_names(options, {own.name for own in fields(cls)})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.value_init, os.PathLike):
            self.value_init = os.fspath(self.value_init)
        if self.kl_estimator is None and self.beta:
            self.kl_estimator = "k3"
        given = self.num_generations
        if given == 1 and not isinstance(given, bool):
            self.num_generations = _Alone(1)
        try:
            super().__post_init__()
        finally:
            self.num_generations = given
        self._refuse_contradictions()
        if self.kl_coef != 0 and self.beta != 0:
            warnings.warn(
                f"kl_coef={self.kl_coef} and beta={self.beta} hold the policy near the reference twice: in the reward "
                "and in the loss. Set one of them to 0, unless you mean both.",
                UserWarning,
                stacklevel=3,
            )

    def _refuse_contradictions(self) -> None:
        level = self.importance_sampling_level or "token"
        if not self.loss.takes_token_advantages(level):
            is_by_loss = self.loss.advantages == "sequence"
            it = f"loss_type={self.loss_type!r}" if is_by_loss else f"importance_sampling_level={level!r}"
            tokens = [name for name, own in LOSSES.items() if own.takes_token_advantages(own.level or "token")]
            raise ValueError(
                f"{it} does not work with PPO: all tokens of a sequence share the gradient of one ratio, so only the "
                "mean of the critic's advantages would count. Set importance_sampling_level='token' and loss_type to "
                f"one of {', '.join(map(repr, tokens))}; 'gspo_token' keeps the sequence's ratio."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} normalises rewards within groups, "
                "which PPO does not need. Leave it unset, and weigh reward functions with reward_weights."
            )
        if self.fp16:
            raise ValueError(
                "fp16=True does not work with PPO: its loss scale is one for policy and critic, whose gradients are "
                "clipped apart. Set bf16=True."
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"kl_target={self.kl_target} with kl_coef=0: a coefficient of 0 cannot adapt. Set kl_coef above 0."
            )
        if self.steps_in_backward:
            raise ValueError(
                f"optim={self.steps_in_backward!r} takes its steps in backward, where policy and critic cannot be "
                "told apart. Set another optimizer."
            )

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return self.beta != 0 or self.kl_coef != 0

    @property
    def cannot_act(self) -> list[str]:
        """Warnings about options that have no effect, each with a fix."""
        return [*super().cannot_act, *idle_warnings(self, self._idle_rows())]

    def _idle_rows(self) -> Iterator[tuple[list[str], str]]:
        critic = "a critic no group gives the advantages. Set whiten_advantages or whiten_rewards"
        yield ["scale_rewards", "step_advantage"], critic
        if self.lam_length_alpha is not None:
            yield ["lam"], f"lam_length_alpha={self.lam_length_alpha} the length decides. Set lam_length_alpha=None"
        if self.kl_target is None:
            yield ["kl_horizon"], "kl_target=None kl_coef does not move. Set kl_target"
        if self.mask_truncated_completions:
            why = "mask_truncated_completions=True such an answer has no tokens in the loss. Set it to False"
            yield ["bootstrap_truncated", "missing_eos_penalty"], why
