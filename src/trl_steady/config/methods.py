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
    part: str
    """Class of the trainer's part that implements the method. A trainer without this part does not have the method."""
    acts_in: tuple[str, ...] = ()
    """Methods of the trainer that implement it. Training must reach all of them."""

    @property
    def options(self) -> list[str]:
        """Names of the options and arguments in `setting`."""
        return re.findall(r"\b([a-z_]+)(?=[=>])", self.setting)

    def settings(self, args: object) -> list[str]:
        """Return the options with their values in a config, such as "beta=0.1", or `setting` if it names no option."""
        return [f"{name}={getattr(args, name)!r}" for name in self.options if hasattr(args, name)] or [self.setting]

    def is_on(self, trainer: Any) -> bool:
        """Return True if a trainer with the part trains otherwise than TRL's because of the method."""
        option, value = re.findall(r"\b([a-z_]+)[=>]([^,]*)", self.setting)[0]
        if option in _IS_ON:
            return bool(_IS_ON[option](trainer))
        given = getattr(trainer.args, option)
        return given == value.strip('"') if value.startswith('"') else bool(given)


# first option of a setting -> whether the method is on in a trainer, if the option alone does not tell
_IS_ON: dict[str, Callable[[Any], object]] = {
    "use_bias_correction_kl": lambda trainer: (
        trainer.args.beta != 0
        and trainer.args.use_bias_correction_kl
        and trainer.args.importance_sampling_level == "sequence"
    ),
    "kl_ratio_denominator": lambda trainer: "kl_ratio_denominator" in trainer.args.sampler_options,
    "kl_estimator": lambda trainer: trainer.args.beta != 0 and trainer.args.kl_estimator != "k3",
    "off_policy_mask_threshold": lambda trainer: trainer.args.off_policy_mask_threshold is not None,
    "step_advantage": lambda trainer: trainer.args.step_advantage != "return_to_go" or trainer.has_step_rewards,
    "reward_funcs": lambda trainer: trainer.reward_model,
    "label_fn": lambda trainer: trainer.reward_refreshes,
    "engine_check": lambda trainer: (
        trainer.args.use_vllm and trainer.args.engine_check and not trainer.args.uncorrected
    ),
    "gamma": lambda trainer: True,
    "value_lam": lambda trainer: trainer.args.value_lam is not None,
    "value_learning_rate": lambda trainer: trainer.args.value_learning_rate is not None,
    "value_updates": lambda trainer: trainer.args.value_updates > 1,
}
_MATH, _V32 = "2402.03300", "2512.02556, section 3.1"
_INSTRUCT = "2203.02155, section 3.5"
_LOSS, _SCORES = ("micro_batch_loss",), ("log_probs",)
_RECORDED = ("compute_loss", "log_probs", "rollout")  # recorded in the rollout, read when the policy is scored
_GENERATED = (*_RECORDED, "generate")
_ROLLOUT = ("rollout", "calculate_rewards")
_CRITIC = (*_ROLLOUT, "compute_loss")
# kind, part and page -> name, setting, methods of the trainer, and paper
_ROWS: dict[tuple[str, str, str], tuple[tuple[Any, ...], ...]] = {
    ("loss", "LossPart", "methods/gmpo.md"): (("GMPO", 'loss_type="gmpo"', _LOSS, "2507.20673, equation 4"),),
    ("loss", "LossPart", "methods/gspo.md"): (("GSPO", 'loss_type="gspo"', _LOSS, "2507.18071, section 4.1"),),
    ("loss", "LossPart", "methods/gspo_token.md"): (
        ("GSPO-token", 'loss_type="gspo_token"', _LOSS, "2507.18071, section 4.3"),
    ),
    ("KL", "LossPart", "methods/kl.md"): (
        ("per-token ratio under a sequence-level loss", "use_bias_correction_kl=True, beta>0", _LOSS, _V32),
        ("ratio to the engine's log-probs", 'kl_ratio_denominator="sampler"', _LOSS, _V32),
        ("estimators other than k3", 'kl_estimator="k1" or "k2"', _LOSS),
    ),
    ("mask", "LossPart", "methods/masks.md"): (
        (
            "off-policy mask, by sequence or by token",
            "off_policy_mask_threshold=..., off_policy_mask_level=...",
            _LOSS,
            _V32,
        ),
        ("geometric mask, trainer against engine", "geometric_mask_range=(low, high)", _LOSS),
        ("veto of outlier tokens, trainer against engine", "token_veto_threshold=...", _LOSS),
    ),
    ("rewards", "StepAdvantagesPart", "step-rewards.md"): (
        (
            "step rewards (StepRewards), process supervision",
            'step_advantage="process" or "return_to_go"',
            _ROLLOUT,
            f"{_MATH}, section 4.1.3",
        ),
    ),
    ("reward model", "RewardModelPart", "reward-models.md"): (
        ("reward model on the policy's base", "reward_funcs=RewardAdapter(...)"),
        (
            "reward model retrained before the reference moves",
            "RewardModelRefreshCallback(trainer, label_fn=...)",
            (),
            f"{_MATH}, section 4.1.4",
        ),
    ),
    ("reference", "ReferencePart", "iterative.md"): (
        ("iterative GRPO: a reference that moves", "sync_ref_model=True, beta>0", (), f"{_MATH}, Algorithm 1"),
        ("a reference that moves when the KL is too large", "ref_model_sync_kl=..."),
        ("optimizer state cleared when the reference moves", "ref_model_sync_reset_optimizer=True", (), "2505.24864"),
    ),
    ("routing", "RoutingPart", "routing-replay.md"): (
        ("R2: routes of the pass that scored the rollout", 'router_replay="R2"', _RECORDED, "2507.18071; 2512.01374"),
        ("R3: routes of the rollout itself", 'router_replay="R3"', _GENERATED, "2510.11370"),
        ("routes in the reference's pass too", "router_replay_reference=True", _RECORDED),
    ),
    ("sampling", "SamplingPart", "sampling-mask.md"): (
        ("kept sampling mask", "keep_sampling_mask=True", _GENERATED, _V32),
    ),
    ("sampling", "EngineCheckPart", "vllm.md"): (
        ("engine check: the first rollout is compared with the policy", "engine_check=...", ("rollout",)),
    ),
    ("critic", "CriticPart", "ppo.md"): (
        (
            "PPO with a critic (GAE)",
            "gamma=..., lam=..., cliprange_value=..., value_init=...",
            _CRITIC,
            "1707.06347; 1506.02438",
        ),
        ("whitening over all processes", "whiten_advantages=True, whiten_rewards=True", _ROLLOUT),
        ("KL to the reference in the reward", "kl_coef=...", _ROLLOUT, _INSTRUCT),
        ("KL coefficient that follows a target", "kl_target=..., kl_horizon=...", _ROLLOUT, "1909.08593, section 2.2"),
        ("another lambda for the critic's targets", "value_lam=...", _ROLLOUT, "2503.01491"),
        ("lambda by length", "lam_length_alpha=...", _ROLLOUT, "2504.05118"),
        ("values after answers that were cut off", "bootstrap_truncated=True", _ROLLOUT),
        ("penalty for answers without an end", "missing_eos_penalty=...", _ROLLOUT),
        ("learning rate of the critic", "value_learning_rate=...", _CRITIC),
        ("first steps for the critic alone", "value_warmup_steps=...", _CRITIC, "2503.01491"),
        ("several updates of the critic", "value_updates=...", _CRITIC),
    ),
    ("critic", "PretrainingPart", "ppo.md"): (("pretraining loss", "ptx_coef=...", ("compute_loss",), _INSTRUCT),),
    ("passes", "PaddingPart", "performance.md"): (
        ("padding-free passes (the default)", "trim_padding=True", _SCORES),
        ("micro-batches limited by tokens", "token_budget=...", ("compute_loss",)),
        ("a group's prompt computed once", "share_prompts=True", _SCORES),
    ),
    ("passes", "AdapterPart", "vllm.md"): (("vLLM gets the LoRA adapter alone", "vllm_adapter_sync=True"),),
    ("passes", "AdapterPart", "iterative.md"): (("float32 adapters on a quantised base", 'adapter_dtype="float32"'),),
}


def _method(
    kind: str, part: str, page: str, name: str, setting: str, acts_in: tuple[str, ...] = (), paper: str = ""
) -> Method:
    return Method(kind, name, setting, paper, page, part, acts_in)


METHODS = tuple(_method(*key, *row) for key, rows in _ROWS.items() for row in rows)


def methods_on(trainer: Any) -> list[Method]:
    """Return the methods that are on in a trainer: it has their part, and their option or their use shows."""
    parts = {kind.__name__ for part in trainer.parts for kind in type(part).__mro__}
    return [method for method in METHODS if method.part in parts and method.is_on(trainer)]
