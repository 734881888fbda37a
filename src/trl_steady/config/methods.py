"""Table of the methods that trl-steady adds to TRL's trainers, each with its setting, its paper and its docs page."""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

__all__ = ["METHODS", "Method", "methods_on"]


class Method(NamedTuple):
    """One row of `trl-steady methods`."""

    kind: str
    """The part of training that the method changes: "loss", "KL", "mask", "rewards", "reward model", "reference",
    "routing", "sampling", "critic", or "passes" for the way in which forward passes are computed."""
    name: str
    setting: str
    """The options in Python. The command line and YAML use the same names."""
    paper: str
    """arXiv number and section, or "" if the method follows no paper."""
    page: str
    """Path of the page below docs/."""
    part: str
    """Class of the trainer's part that implements the method. A trainer without this part does not have the method."""
    is_on: Callable[[Any], bool]
    """True for a trainer with the part if the method is on, so that training differs from TRL's."""
    acts_in: tuple[str, ...] = ()
    """Methods of the trainer that implement it. Training must reach all of them."""

    @property
    def options(self) -> list[str]:
        """Names of the options and arguments in `setting`."""
        return re.findall(r"\b([a-z_]+)(?=[=>])", self.setting)

    def settings(self, args: Any) -> list[str]:
        """Return the options with their values in a config, such as "beta=0.1", or `setting` if it names no option."""
        return [f"{name}={getattr(args, name)!r}" for name in self.options if hasattr(args, name)] or [self.setting]


_MATH, _V32 = "2402.03300", "2512.02556, section 3.1"
_INSTRUCT = "2203.02155, section 3.5"
_LOSS, _SCORES = ("micro_batch_loss",), ("log_probs",)
_RECORDED = ("compute_loss", "log_probs", "rollout")  # recorded in the rollout, read when the policy is scored
_GENERATED = (*_RECORDED, "generate")
_ROLLOUT = ("rollout", "calculate_rewards")
_CRITIC = (*_ROLLOUT, "compute_loss")
# kind -> page and part
_KINDS = {
    "loss": ("", "LossPart"),
    "KL": ("methods/kl.md", "LossPart"),
    "mask": ("methods/masks.md", "LossPart"),
    "rewards": ("step-rewards.md", "StepAdvantagesPart"),
    "reward model": ("reward-models.md", "RewardModelPart"),
    "reference": ("iterative.md", "ReferencePart"),
    "routing": ("routing-replay.md", "RoutingPart"),
    "sampling": ("sampling-mask.md", "SamplingPart"),
    "critic": ("ppo.md", "CriticPart"),
    "passes": ("performance.md", "PaddingPart"),
}


def _corrects_sequences(trainer: Any) -> bool:
    args = trainer.args
    return args.beta != 0 and args.use_bias_correction_kl and args.importance_sampling_level == "sequence"


# first option of a setting -> whether the method is on in a trainer, if the option alone does not tell
_IS_ON: dict[str, Callable[[Any], bool]] = {
    "use_bias_correction_kl": _corrects_sequences,
    "kl_ratio_denominator": lambda trainer: "kl_ratio_denominator" in trainer.args.sampler_options,
    "kl_estimator": lambda trainer: trainer.args.beta != 0 and trainer.args.kl_estimator != "k3",
    "off_policy_mask_threshold": lambda trainer: trainer.args.off_policy_mask_threshold is not None,
    "step_advantage": lambda trainer: trainer.args.step_advantage != "return_to_go" or trainer.has_step_rewards,
    "reward_funcs": attrgetter("reward_model"),
    "label_fn": attrgetter("reward_refreshes"),
    "engine_check": lambda trainer: (
        trainer.args.use_vllm and trainer.args.engine_check and not trainer.args.uncorrected
    ),
    "gamma": lambda trainer: True,
    "value_lam": lambda trainer: trainer.args.value_lam is not None,
    "value_learning_rate": lambda trainer: trainer.args.value_learning_rate is not None,
    "value_updates": lambda trainer: trainer.args.value_updates > 1,
}


def _method(
    kind: str, name: str, setting: str, acts_in: tuple[str, ...] = (), paper: str = "", page: str = "", part: str = ""
) -> Method:
    """Return a method. By default its kind decides page and part, and the first option of its setting if it is on."""
    option, value = re.findall(r"\b([a-z_]+)[=>]([^,]*)", setting)[0]
    choice = value.strip('"') if value.startswith('"') else None

    def is_on(trainer: Any) -> bool:
        given = getattr(trainer.args, option)
        return bool(given) if choice is None else given == choice

    usual = _KINDS[kind]
    return Method(kind, name, setting, paper, page or usual[0], part or usual[1], _IS_ON.get(option, is_on), acts_in)


METHODS = (
    _method("loss", "GMPO", 'loss_type="gmpo"', _LOSS, "2507.20673, equation 4", "methods/gmpo.md"),
    _method("loss", "GSPO", 'loss_type="gspo"', _LOSS, "2507.18071, section 4.1", "methods/gspo.md"),
    _method("loss", "GSPO-token", 'loss_type="gspo_token"', _LOSS, "2507.18071, section 4.3", "methods/gspo_token.md"),
    _method("KL", "per-token ratio under a sequence-level loss", "use_bias_correction_kl=True, beta>0", _LOSS, _V32),
    _method("KL", "ratio to the engine's log-probs", 'kl_ratio_denominator="sampler"', _LOSS, _V32),
    _method("KL", "estimators other than k3", 'kl_estimator="k1" or "k2"', _LOSS),
    _method(
        "mask",
        "off-policy mask, by sequence or by token",
        "off_policy_mask_threshold=..., off_policy_mask_level=...",
        _LOSS,
        _V32,
    ),
    _method("mask", "geometric mask, trainer against engine", "geometric_mask_range=(low, high)", _LOSS),
    _method("mask", "veto of outlier tokens, trainer against engine", "token_veto_threshold=...", _LOSS),
    _method(
        "rewards",
        "step rewards (StepRewards), process supervision",
        'step_advantage="process" or "return_to_go"',
        _ROLLOUT,
        f"{_MATH}, section 4.1.3",
    ),
    _method("reward model", "reward model on the policy's base", "reward_funcs=RewardAdapter(...)"),
    _method(
        "reward model",
        "reward model retrained before the reference moves",
        "RewardModelRefreshCallback(trainer, label_fn=...)",
        paper=f"{_MATH}, section 4.1.4",
    ),
    _method(
        "reference",
        "iterative GRPO: a reference that moves",
        "sync_ref_model=True, beta>0",
        paper=f"{_MATH}, Algorithm 1",
    ),
    _method("reference", "a reference that moves when the KL is too large", "ref_model_sync_kl=..."),
    _method(
        "reference",
        "optimizer state cleared when the reference moves",
        "ref_model_sync_reset_optimizer=True",
        paper="2505.24864",
    ),
    _method(
        "routing",
        "R2: routes of the pass that scored the rollout",
        'router_replay="R2"',
        _RECORDED,
        "2507.18071; 2512.01374",
    ),
    _method("routing", "R3: routes of the rollout itself", 'router_replay="R3"', _GENERATED, "2510.11370"),
    _method("routing", "routes in the reference's pass too", "router_replay_reference=True", _RECORDED),
    _method("sampling", "kept sampling mask", "keep_sampling_mask=True", _GENERATED, _V32),
    _method(
        "sampling",
        "engine check: the first rollout is compared with the policy",
        "engine_check=...",
        ("rollout",),
        page="vllm.md",
        part="EngineCheckPart",
    ),
    _method(
        "critic",
        "PPO with a critic (GAE)",
        "gamma=..., lam=..., cliprange_value=..., value_init=...",
        _CRITIC,
        "1707.06347; 1506.02438",
    ),
    _method("critic", "whitening over all processes", "whiten_advantages=True, whiten_rewards=True", _ROLLOUT),
    _method("critic", "KL to the reference in the reward", "kl_coef=...", _ROLLOUT, _INSTRUCT),
    _method(
        "critic",
        "KL coefficient that follows a target",
        "kl_target=..., kl_horizon=...",
        _ROLLOUT,
        "1909.08593, section 2.2",
    ),
    _method("critic", "another lambda for the critic's targets", "value_lam=...", _ROLLOUT, "2503.01491"),
    _method("critic", "lambda by length", "lam_length_alpha=...", _ROLLOUT, "2504.05118"),
    _method("critic", "values after answers that were cut off", "bootstrap_truncated=True", _ROLLOUT),
    _method("critic", "penalty for answers without an end", "missing_eos_penalty=...", _ROLLOUT),
    _method("critic", "learning rate of the critic", "value_learning_rate=...", _CRITIC),
    _method("critic", "first steps for the critic alone", "value_warmup_steps=...", _CRITIC, "2503.01491"),
    _method("critic", "several updates of the critic", "value_updates=...", _CRITIC),
    _method("critic", "pretraining loss", "ptx_coef=...", ("compute_loss",), _INSTRUCT, part="PretrainingPart"),
    _method("passes", "padding-free passes (the default)", "trim_padding=True", _SCORES),
    _method("passes", "micro-batches limited by tokens", "token_budget=...", ("compute_loss",)),
    _method("passes", "a group's prompt computed once", "share_prompts=True", _SCORES),
    _method(
        "passes", "vLLM gets the LoRA adapter alone", "vllm_adapter_sync=True", page="vllm.md", part="AdapterPart"
    ),
    _method(
        "passes",
        "float32 adapters on a quantised base",
        'adapter_dtype="float32"',
        page="iterative.md",
        part="AdapterPart",
    ),
)


def methods_on(trainer: Any) -> list[Method]:
    """Return the methods that are on in a trainer: it has their part, and their option or their use shows."""
    parts = {kind.__name__ for part in trainer.parts for kind in type(part).__mro__}
    return [method for method in METHODS if method.part in parts and method.is_on(trainer)]
