"""Table of the methods that trl-steady adds to TRL's trainers, each with its setting, its paper and its docs page."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Method(NamedTuple):
    """One row of `trl-steady methods`."""

    kind: str
    """What the method changes. "passes" are the ways to compute forward passes."""
    name: str
    setting: str
    """The options in Python. The command line and YAML use the same names."""
    paper: str
    """arXiv number and section, or "" if the method follows no paper."""
    page: str
    """Path of the page below docs/."""
    acts_in: tuple[str, ...]
    """Methods of the trainer that implement it. Training must reach all of them."""

    @property
    def options(self) -> list[str]:
        """Names of the options and arguments in `setting`."""
        return re.findall(r"\b([a-z_]+)(?=[=>])", self.setting)

    def settings(self, args: object) -> list[str]:
        """Return the options with their values in a config, such as "beta=0.1", or `setting` if it names no option."""
        return [f"{name}={getattr(args, name)!r}" for name in self.options if hasattr(args, name)] or [self.setting]

    def is_on(self, trainer: Any) -> bool:
        """Return True if a trainer trains otherwise than TRL's because of the method."""
        args, (option, value) = trainer.args, re.findall(r"\b([a-z_]+)[=>]([^,]*)", self.setting)[0]
        if option == "reward_funcs":
            return trainer.reward_model is not None
        if option == "skip_old_pass":  # None leaves it to the trainer
            return trainer.skips_old_pass
        if not hasattr(args, option):  # it is of another trainer, or an argument
            return False
        if option in _IS_ON:
            return bool(_IS_ON[option](args))
        given = getattr(args, option)
        if value.startswith(('"', "True")):
            return str(given) == value.strip('"')
        return given is not None if getattr(type(args), option) is None else bool(given)


# first option of a setting -> whether the method is on with a config, if the option alone does not tell
_IS_ON: dict[str, Callable[[Any], object]] = {
    "use_bias_correction_kl": lambda args: (
        args.beta != 0 and args.use_bias_correction_kl and args.importance_sampling_level == "sequence"
    ),
    "kl_ratio_denominator": lambda args: "kl_ratio_denominator" in args.sampler_options,
    "kl_estimator": lambda args: args.beta != 0 and args.kl_estimator != "k3",
    "step_advantage": lambda args: args.METHOD == "GRPO" and args.step_advantage != "return_to_go",
    "engine_check": lambda args: args.use_vllm and args.engine_check and not args.uncorrected,
    "gamma": lambda args: True,
    "value_updates": lambda args: args.value_updates > 1,
}
_MATH, _V32 = "2402.03300", "2512.02556, section 3.1"
_INSTRUCT = "2203.02155, section 3.5"
_LOSS, _SCORES, _STEP = ("micro_batch_loss",), ("log_probs",), ("compute_loss",)
_RECORDED = (*_STEP, *_SCORES, "rollout")  # recorded in the rollout, read when the policy is scored
_REWARDS = ("rollout", "calculate_rewards")
# kind, page and methods of the trainer -> name, setting and paper
_ROWS: dict[tuple[str, str, tuple[str, ...]], tuple[tuple[str, ...], ...]] = {
    ("loss", "methods/gmpo.md", _LOSS): (("GMPO", 'loss_type="gmpo"', "2507.20673, equation 4"),),
    ("loss", "methods/gspo.md", _LOSS): (("GSPO", 'loss_type="gspo"', "2507.18071, section 4.1"),),
    ("loss", "methods/gspo_token.md", _LOSS): (("GSPO-token", 'loss_type="gspo_token"', "2507.18071, section 4.3"),),
    ("KL", "methods/kl.md", _LOSS): (
        ("per-token ratio under a sequence-level loss", "use_bias_correction_kl=True, beta>0", _V32),
        ("ratio to the engine's log-probs", 'kl_ratio_denominator="sampler"', _V32),
        ("estimators other than k3", 'kl_estimator="k1" or "k2"'),
    ),
    ("mask", "methods/masks.md", _LOSS): (
        ("off-policy mask, by sequence or by token", "off_policy_mask_threshold=..., off_policy_mask_level=...", _V32),
        ("geometric mask, trainer against engine", "geometric_mask_range=(low, high)"),
        ("veto of outlier tokens, trainer against engine", "token_veto_threshold=..."),
    ),
    ("rewards", "step-rewards.md", _REWARDS): (
        (
            "step rewards (StepRewards), process supervision",
            'step_advantage="process" or "return_to_go"',
            f"{_MATH}, section 4.1.3",
        ),
    ),
    ("sampling", "dynamic-sampling.md", _REWARDS): (
        (
            "dynamic sampling: groups that teach nothing are replaced",
            "dynamic_sampling=True, dynamic_sampling_filter=..., dynamic_sampling_max_rounds=...",
            "2503.14476, section 3.2",
        ),
    ),
    ("sampling", "generate-ahead.md", ("rollout", "generate")): (
        ("the next rollout generated while the trainer trains", "async_generate=True"),
    ),
    ("reward model", "reward-models.md", ()): (
        ("reward model on the policy's base", "reward_funcs=RewardAdapter(...)"),
        (
            "reward model retrained before the reference moves",
            "RewardModelRefreshCallback(trainer, label_fn=...)",
            f"{_MATH}, section 4.1.4",
        ),
    ),
    ("reference", "iterative.md", ()): (
        ("iterative GRPO: a reference that moves", "sync_ref_model=True, beta>0", f"{_MATH}, Algorithm 1"),
        ("a reference that moves when the KL is too large", "ref_model_sync_kl=..."),
        ("optimizer state cleared when the reference moves", "ref_model_sync_reset_optimizer=True", "2505.24864"),
    ),
    ("routing", "routing-replay.md", _RECORDED): (
        ("R2: routes of the pass that scored the rollout", 'router_replay="R2"', "2507.18071; 2512.01374"),
        ("routes in the reference's pass too", "router_replay_reference=True"),
    ),
    ("routing", "routing-replay.md", (*_RECORDED, "generate")): (
        ("R3: routes of the rollout itself", 'router_replay="R3"', "2510.11370"),
    ),
    ("sampling", "sampling-mask.md", (*_RECORDED, "generate")): (
        ("kept sampling mask", "keep_sampling_mask=True", _V32),
    ),
    ("sampling", "vllm.md", ("rollout",)): (
        ("engine check: the first rollout is compared with the policy", "engine_check=..."),
    ),
    ("critic", "ppo.md", (*_REWARDS, *_STEP)): (
        (
            "PPO with a critic (GAE)",
            "gamma=..., lam=..., cliprange_value=..., value_init=...",
            "1707.06347; 1506.02438",
        ),
        ("whitening over all processes", "whiten_advantages=True, whiten_rewards=True"),
        ("KL to the reference in the reward", "kl_coef=...", _INSTRUCT),
        ("KL coefficient that follows a target", "kl_target=..., kl_horizon=...", "1909.08593, section 2.2"),
        ("another lambda for the critic's targets", "value_lam=...", "2503.01491"),
        ("lambda by length", "lam_length_alpha=...", "2504.05118"),
        ("values after answers that were cut off", "bootstrap_truncated=True"),
        ("penalty for answers without an end", "missing_eos_penalty=..."),
        ("learning rate of the critic", "value_learning_rate=..."),
        ("first steps for the critic alone", "value_warmup_steps=...", "2503.01491"),
        ("several updates of the critic", "value_updates=..."),
        ("pretraining loss", "ptx_coef=...", _INSTRUCT),
    ),
    ("passes", "performance.md", _SCORES): (
        ("padding-free passes (the default)", "trim_padding=True"),
        ("a group's prompt computed once", "share_prompts=True"),
    ),
    ("passes", "performance.md", _STEP): (
        ("micro-batches limited by tokens", "token_budget=..."),
        ("sequences without a gradient left out", "skip_zero_weight=True"),
    ),
    ("passes", "performance.md", ("rollout", *_LOSS)): (("no pass of the old policy", "skip_old_pass=True"),),
    ("passes", "vllm.md", ()): (
        ("vLLM gets the LoRA adapter alone", "vllm_adapter_sync=True"),
        ("arguments of a colocated vLLM", "vllm_engine_kwargs=..."),
    ),
    ("passes", "iterative.md", ()): (("float32 adapters on a quantised base", 'adapter_dtype="float32"'),),
}
METHODS = tuple(
    Method(kind, name, setting, "".join(paper), page, acts_in)
    for (kind, page, acts_in), rows in _ROWS.items()
    for name, setting, *paper in rows
)
