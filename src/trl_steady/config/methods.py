"""Table of the methods that trl-steady adds to TRL's GRPO, each with its setting, its paper and its docs page."""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.shared import SharedOptions

__all__ = ["METHODS", "Method", "methods_on"]


class Method(NamedTuple):
    """One row of `trl-steady methods`."""

    kind: str
    """The part of training that the method changes: "loss", "KL", "mask", "rewards", "reference", "routing",
    "sampling", "critic", or "passes" for the way in which forward passes are computed."""
    name: str
    setting: str
    """The options in Python. The command line and YAML use the same names."""
    paper: str
    """arXiv number and section, or "" if the method follows no paper."""
    page: str
    """Path of the page below docs/."""
    is_on: "Callable[[Any], bool]"
    """True for a config that enables the method, so that training differs from TRL's."""
    acts_in: tuple[str, ...] = ()
    """Methods of the trainer that implement it. Training must reach all of them."""

    @property
    def options(self) -> list[str]:
        """Names of the options in `setting`."""
        return re.findall(r"\b([a-z_]+)(?=[=>])", self.setting)


_MATH, _V32 = "2402.03300", "2512.02556, section 3.1"
_INSTRUCT = "2203.02155"
_LOSS, _SCORES = ("micro_batch_loss",), ("log_probs",)
_RECORDED = ("compute_loss", "log_probs", "rollout")  # recorded in the rollout, read when the policy is scored
_GENERATED = (*_RECORDED, "generate")
_ROLLOUT = ("rollout", "calculate_rewards")
_CRITIC = (*_ROLLOUT, "compute_loss")
_PAGES = {
    "KL": "methods/kl.md",
    "mask": "methods/masks.md",
    "rewards": "step-rewards.md",
    "reference": "iterative.md",
    "routing": "routing-replay.md",
    "sampling": "sampling-mask.md",
    "critic": "ppo.md",
    "passes": "performance.md",
}


def _method(
    kind: str,
    name: str,
    setting: str,
    acts_in: tuple[str, ...] = (),
    *,
    is_on: Callable[[Any], bool] | None = None,
    paper: str = "",
    page: str = "",
) -> Method:
    """Return a method. By default its page is that of its kind, and the first option in `setting` turns it on."""
    switch = attrgetter(setting.partition("=")[0])
    return Method(kind, name, setting, paper, page or _PAGES[kind], is_on or switch, acts_in)


def _loss(loss_type: str) -> Method:
    loss = LOSSES[loss_type]
    setting = f'loss_type="{loss_type}"'
    return Method("loss", loss.name, setting, loss.paper, loss.page, lambda a: a.loss_type == loss_type, _LOSS)


METHODS = (
    *(_loss(loss_type) for loss_type, loss in LOSSES.items() if loss.is_ours),
    _method(
        "KL",
        "per-token ratio under a sequence-level loss",
        "use_bias_correction_kl=True, beta>0",
        _LOSS,
        is_on=lambda a: a.beta != 0 and a.use_bias_correction_kl and a.importance_sampling_level == "sequence",
        paper=_V32,
    ),
    _method(
        "KL",
        "ratio to the engine's log-probs",
        'kl_ratio_denominator="sampler"',
        _LOSS,
        is_on=lambda a: "kl_ratio_denominator" in a.sampler_options,
        paper=_V32,
    ),
    _method(
        "KL",
        "estimators other than k3",
        'kl_estimator="k1" or "k2"',
        _LOSS,
        is_on=lambda a: a.beta != 0 and a.kl_estimator != "k3",
    ),
    _method(
        "mask",
        "off-policy mask, by sequence or by token",
        "off_policy_mask_threshold=..., off_policy_mask_level=...",
        _LOSS,
        is_on=lambda a: a.off_policy_mask_threshold is not None,
        paper=_V32,
    ),
    _method(
        "mask",
        "geometric mask, trainer against engine",
        "geometric_mask_range=(low, high)",
        _LOSS,
        is_on=lambda a: a.geometric_mask_range is not None,
    ),
    _method("mask", "veto of outlier tokens, trainer against engine", "token_veto_threshold=...", _LOSS),
    _method(
        "rewards",
        "step rewards (StepRewards), process supervision",
        'step_advantage="process" or "return_to_go"',
        _ROLLOUT,
        is_on=lambda a: a.step_advantage != "return_to_go",  # the default does not tell whether there are StepRewards
        paper=f"{_MATH}, section 4.1.3",
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
        is_on=lambda a: a.router_replay == "R2",
        paper="2507.18071; 2512.01374",
    ),
    _method(
        "routing",
        "R3: routes of the rollout itself",
        'router_replay="R3"',
        _GENERATED,
        is_on=lambda a: a.router_replay == "R3",
        paper="2510.11370",
    ),
    _method("routing", "routes in the reference's pass too", "router_replay_reference=True", _RECORDED),
    _method("sampling", "kept sampling mask", "keep_sampling_mask=True", _GENERATED, paper=_V32),
    _method(
        "sampling",
        "engine check: the first rollout is compared with the policy",
        "engine_check=...",
        ("rollout",),
        is_on=lambda a: a.use_vllm and a.engine_check is not None and not a.uncorrected,
        page="vllm.md",
    ),
    _method(
        "critic",
        "PPO with a critic (GAE)",
        "gamma=..., lam=..., cliprange_value=..., value_init=...",
        _CRITIC,
        is_on=lambda a: True,
        paper="1707.06347; 1506.02438",
    ),
    _method("critic", "whitening over all processes", "whiten_advantages=True, whiten_rewards=True", _ROLLOUT),
    _method("critic", "KL to the reference in the reward", "kl_coef=...", _ROLLOUT, paper=f"{_INSTRUCT}, section 3.5"),
    _method(
        "critic",
        "KL coefficient that follows a target",
        "kl_target=..., kl_horizon=...",
        _ROLLOUT,
        paper="1909.08593, section 2.2",
    ),
    _method(
        "critic",
        "another lambda for the critic's targets",
        "value_lam=...",
        _ROLLOUT,
        is_on=lambda a: a.value_lam is not None,
        paper="2503.01491",
    ),
    _method("critic", "lambda by length", "lam_length_alpha=...", _ROLLOUT, paper="2504.05118"),
    _method("critic", "values after answers that were cut off", "bootstrap_truncated=True", _ROLLOUT),
    _method(
        "critic",
        "penalty for answers without an end",
        "missing_eos_penalty=...",
        _ROLLOUT,
        is_on=lambda a: a.missing_eos_penalty is not None,
    ),
    _method(
        "critic",
        "learning rate of the critic",
        "value_learning_rate=...",
        _CRITIC,
        is_on=lambda a: a.value_learning_rate is not None,
    ),
    _method("critic", "first steps for the critic alone", "value_warmup_steps=...", _CRITIC, paper="2503.01491"),
    _method(
        "critic", "several updates of the critic", "value_updates=...", _CRITIC, is_on=lambda a: a.value_updates > 1
    ),
    _method("critic", "pretraining loss", "ptx_coef=...", ("compute_loss",), paper=f"{_INSTRUCT}, section 3.5"),
    _method("passes", "padding-free passes (the default)", "trim_padding=True", _SCORES),
    _method("passes", "micro-batches limited by tokens", "token_budget=...", ("compute_loss",)),
    _method("passes", "a group's prompt computed once", "share_prompts=True", _SCORES),
    _method("passes", "vLLM gets the LoRA adapter alone", "vllm_adapter_sync=True", page="vllm.md"),
    _method("passes", "float32 adapters on a quantised base", 'adapter_dtype="float32"', page=_PAGES["reference"]),
)


def methods_on(args: "SharedOptions") -> list[Method]:
    """Return the methods that a config enables. A method whose options it lacks is off."""
    return [m for m in METHODS if all(hasattr(args, option) for option in m.options) and m.is_on(args)]
