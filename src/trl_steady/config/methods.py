"""Table of the methods that trl-steady adds to TRL's GRPO, each with its setting, its paper and its docs page."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.shared import SharedOptions

__all__ = ["METHODS", "Method", "methods_on"]


class Method(NamedTuple):
    """One row of `trl-steady methods`."""

    kind: str
    """The part of training that the method changes: "loss", "KL", "mask", "rewards", "reference", "routing",
    "sampling", or "passes" for the way in which forward passes are computed."""
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


_MATH, _V32 = "2402.03300", "2512.02556"
_LOSS = ("micro_batch_loss",)
_SCORES = ("log_probs",)
_ROLLOUT = ("rollout",)
_RECORDED = ("compute_loss", *_SCORES, *_ROLLOUT)  # recorded in the rollout, read when the policy is scored
_GENERATED = (*_RECORDED, "generate")

METHODS = (
    *(
        Method(
            "loss",
            loss.name,
            f'loss_type="{loss_type}"',
            loss.paper,
            loss.page,
            lambda a, loss_type=loss_type: a.loss_type == loss_type,
            _LOSS,
        )
        for loss_type, loss in LOSSES.items()
        if loss.is_ours
    ),
    Method(
        "KL",
        "per-token ratio under a sequence-level loss",
        "use_bias_correction_kl=True, beta>0",
        f"{_V32}, section 3.1",
        "methods/kl.md",
        lambda a: a.beta != 0 and a.use_bias_correction_kl and a.importance_sampling_level == "sequence",
        _LOSS,
    ),
    Method(
        "KL",
        "ratio to the engine's log-probs",
        'kl_ratio_denominator="sampler"',
        f"{_V32}, section 3.1",
        "methods/kl.md",
        lambda a: "kl_ratio_denominator" in a.sampler_options,
        _LOSS,
    ),
    Method(
        "KL",
        "estimators other than k3",
        'kl_estimator="k1" or "k2"',
        "",
        "methods/kl.md",
        lambda a: a.beta != 0 and a.kl_estimator != "k3",
        _LOSS,
    ),
    Method(
        "mask",
        "off-policy mask, by sequence or by token",
        "off_policy_mask_threshold=..., off_policy_mask_level=...",
        f"{_V32}, section 3.1",
        "methods/masks.md",
        lambda a: a.off_policy_mask_threshold is not None,
        _LOSS,
    ),
    Method(
        "mask",
        "geometric mask, trainer against engine",
        "geometric_mask_range=(low, high)",
        "",
        "methods/masks.md",
        lambda a: a.geometric_mask_range is not None,
        _LOSS,
    ),
    Method(
        "mask",
        "veto of outlier tokens, trainer against engine",
        "token_veto_threshold=...",
        "",
        "methods/masks.md",
        lambda a: a.token_veto_threshold is not None,
        _LOSS,
    ),
    Method(
        "rewards",
        "step rewards (StepRewards), process supervision",
        'step_advantage="process" or "return_to_go"',
        f"{_MATH}, section 4.1.3",
        "step-rewards.md",
        lambda a: a.step_advantage != "return_to_go",  # the default does not tell whether there are StepRewards
        (*_ROLLOUT, "calculate_rewards"),
    ),
    Method(
        "reference",
        "iterative GRPO: a reference that moves",
        "sync_ref_model=True, beta>0",
        f"{_MATH}, Algorithm 1",
        "iterative.md",
        lambda a: a.sync_ref_model,
    ),
    Method(
        "reference",
        "a reference that moves when the KL is too large",
        "ref_model_sync_kl=...",
        "",
        "iterative.md",
        lambda a: a.ref_model_sync_kl is not None,
    ),
    Method(
        "reference",
        "optimizer state cleared when the reference moves",
        "ref_model_sync_reset_optimizer=True",
        "2505.24864",
        "iterative.md",
        lambda a: a.ref_model_sync_reset_optimizer,
    ),
    Method(
        "routing",
        "R2: routes of the pass that scored the rollout",
        'router_replay="R2"',
        "2507.18071; 2512.01374",
        "routing-replay.md",
        lambda a: a.router_replay == "R2",
        _RECORDED,
    ),
    Method(
        "routing",
        "R3: routes of the rollout itself",
        'router_replay="R3"',
        "2510.11370",
        "routing-replay.md",
        lambda a: a.router_replay == "R3",
        _GENERATED,
    ),
    Method(
        "routing",
        "routes in the reference's pass too",
        "router_replay_reference=True",
        "",
        "routing-replay.md",
        lambda a: a.router_replay_reference,
        _RECORDED,
    ),
    Method(
        "sampling",
        "kept sampling mask",
        "keep_sampling_mask=True",
        f"{_V32}, section 3.1",
        "sampling-mask.md",
        lambda a: a.keep_sampling_mask,
        _GENERATED,
    ),
    Method(
        "passes",
        "padding-free passes (the default)",
        "trim_padding=True",
        "",
        "performance.md",
        lambda a: a.trim_padding,
        _SCORES,
    ),
    Method(
        "passes",
        "micro-batches limited by tokens",
        "token_budget=...",
        "",
        "performance.md",
        lambda a: a.token_budget is not None,
        ("compute_loss",),
    ),
    Method(
        "passes",
        "a group's prompt computed once",
        "share_prompts=True",
        "",
        "performance.md",
        lambda a: a.share_prompts,
        _SCORES,
    ),
    Method(
        "passes",
        "float32 adapters on a quantised base",
        'adapter_dtype="float32"',
        "",
        "iterative.md",
        lambda a: a.adapter_dtype is not None,
    ),
)


def methods_on(args: "SharedOptions") -> list[Method]:
    """Return the methods that a config enables. A method whose options it lacks is off."""
    return [m for m in METHODS if all(hasattr(args, option) for option in m.options) and m.is_on(args)]
