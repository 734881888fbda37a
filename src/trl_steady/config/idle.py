"""Warnings about options that have no effect, or probably not the intended one, each with a fix."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from trl_steady.config.checks import TRLS_DEFAULTS, beyond_sets, trl_default
from trl_steady.config.spelling import near
from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.grpo import GRPOConfig
    from trl_steady.config.shared import SharedOptions

__all__ = ["cannot_act", "loss_cannot_act"]

_TOKEN_SCALE_EPSILON = 1e-2
# so high that only a token whose probability grows by more than this factor within one rollout is clipped
_FAR_EPSILON_HIGH = 10.0


def cannot_act(args: "SharedOptions") -> list[str]:
    """Return a warning with a fix for each option that is set and has no effect."""
    idle = [*_idle(args, _shared_rows(args)), *_never_moves(args)]
    return [*_inactive(args), *idle, *_weighted(args), *_generated(args)]


def loss_cannot_act(args: "GRPOConfig") -> list[str]:
    """Return a warning with a fix for each option of GRPO's loss that has no effect."""
    return [*_token_scale(args), *_never_clips(args), *_idle(args, _loss_rows(args))]


def _inactive(args: Any) -> list[str]:
    """Return warnings about options that have no effect because every update is on-policy."""
    if not args.is_on_policy:
        return []
    why = (
        f"(an optimizer step of gradient_accumulation_steps={args.gradient_accumulation_steps} uses the whole "
        f"generation batch: steps_per_generation={args.steps_per_generation}, num_iterations={args.num_iterations}). "
        f"{args.way_off_policy}"
    )
    messages = []
    if args.METHOD == "GRPO" and args.loss.is_ours:
        ratio = "sequence ratio is" if args.loss.level == "sequence" else "ratios are"
        messages.append(
            f"loss_type={args.loss_type!r} cannot act: every update is on-policy, so the {ratio} exactly 1 and "
            f"nothing is clipped {why}"
        )
    if args.router_replay == "R2":
        messages.append(
            "router_replay='R2' cannot act: every update is on-policy, so its routes are those of the current policy "
            f"{why}"
        )
    return messages


def _token_scale(args: "GRPOConfig") -> list[str]:
    if args.loss.clip != "ratio":
        return []
    ranges = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    wide = [f"{name}={value}" for name, value in ranges.items() if value is not None and value >= _TOKEN_SCALE_EPSILON]
    if args.importance_sampling_level != "sequence" or not wide:
        return []
    return [
        f"{' and '.join(wide)}: a clip range for token ratios, but the ratio is per sequence. It is a mean over the "
        f"completion and varies far less, so almost nothing will be clipped. Set epsilon={LOSSES['gspo'].epsilon} and "
        f"epsilon_high={LOSSES['gspo'].epsilon_high}, as in the GSPO paper."
    ]


def _never_clips(args: "GRPOConfig") -> list[str]:
    """Return warnings about clip ranges that clip nothing or everything, or that another option replaces."""
    low, high, loss_type = args.epsilon, args.epsilon_high, args.loss_type
    assert low is not None  # filled in at construction
    high = low if high is None else high
    if args.loss.clip == "cap" and high < 1:
        unset = "" if args.epsilon_high is not None else f" (unset, it is epsilon={low})"
        return [
            f"epsilon_high={high}{unset} with loss_type={loss_type!r} is the cap of the ratio itself, not of its "
            "distance from 1. A ratio of 1 is above this cap, so nearly all tokens get the same weight. Set "
            "epsilon_high=5.0, as ScaleRL does."
        ]
    if args.loss.clip != "ratio":
        return []
    messages, is_of_tokens = [], args.importance_sampling_level == "token"
    if is_of_tokens and low >= 1:
        messages.append(
            f"epsilon={low} with loss_type={loss_type!r} never clips from below, because a ratio is always above 0. "
            f"Set epsilon below 1; TRL's default is {trl_default('epsilon')}."
        )
    if is_of_tokens and high >= _FAR_EPSILON_HIGH:
        name = "epsilon_high" if args.epsilon_high is not None else "epsilon"
        messages.append(
            f"{name}={high} with loss_type={loss_type!r} clips from above only a token that has become {1 + high} "
            f"times as likely, which nearly never happens. Set {name} below 1; DAPO uses epsilon_high=0.28."
        )
    if args.delta is not None and args.delta <= 1 + high:  # an error for gspo and gspo_token
        messages.append(
            f"delta={args.delta} is inside the clip range of loss_type={loss_type!r} (upper end {1 + high}), so it "
            f"replaces epsilon_high. Set delta above {1 + high}, or None for no two-sided clip."
        )
    return messages


_Rows = list[tuple[Sequence[str], bool, str]]
"""Options, True if they have no effect, and why, with a fix."""


def _idle(args: Any, rows: _Rows) -> list[str]:
    """Return a warning for each row whose options are set."""
    kind = next(base for base in type(args).__mro__ if base.__module__.startswith("trl_steady."))  # not a script's
    ours = {own.name: own.default for own in fields(kind)}
    defaults = {**ours, **TRLS_DEFAULTS[args.METHOD]}
    messages = []
    for options, is_off, why in rows:
        values = {option: getattr(args, option) for option in options if option in defaults}
        given = [f"{option}={value!r}" for option, value in values.items() if value != defaults[option]]
        if is_off and given:
            it = "them" if len(given) > 1 else "it" if options[0] in TRLS_DEFAULTS[args.METHOD] else options[0]
            messages.append(f"{' and '.join(given)} cannot act: with {why}, or leave {it} unset.")
    return messages


def _shared_rows(args: "SharedOptions") -> _Rows:
    """Return the rows of options that every trainer has."""
    vllm = [name for name in TRLS_DEFAULTS["GRPO"] if name.startswith("vllm_")]
    of_server = [name for name in vllm if name.startswith("vllm_server_")] + ["vllm_group_port"]
    of_colocated = ["vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"]
    is_served = args.use_vllm and args.vllm_mode == "server"
    reader = "only a rollout_func" if args.METHOD == "GRPO" else "nothing"
    return [
        (
            ["router_replay_reference"],
            args.router_replay is None,
            "router_replay=None there are no routes. Set router_replay",
        ),
        (
            ["router_replay_reference"],
            args.router_replay is not None and args.beta == 0,
            "beta=0.0 there is no reference. Set beta above 0",
        ),
        (
            ["keep_sampling_mask"],
            not args.truncations,
            "top_p, top_k and min_p unset, sampling excludes no token. Set one of them",
        ),
        (vllm, not args.use_vllm, f"use_vllm=False {reader} could read it. Set use_vllm=True"),
        (
            of_server,
            args.use_vllm and not is_served,
            "vllm_mode='colocate' there is no server. Set vllm_mode='server'",
        ),
        (of_colocated, is_served, "vllm_mode='server' the server decides this. Pass it to `trl vllm-serve`"),
        (
            ["transformers_continuous_batching_config"],
            not args.use_transformers_continuous_batching,
            "use_transformers_continuous_batching=False nothing reads it. Set that to True",
        ),
        (
            ["use_transformers_continuous_batching", "cache_implementation"],
            args.use_vllm,
            "use_vllm=True vLLM generates. Set use_vllm=False",
        ),
        (
            ["vllm_server_host", "vllm_server_port"],
            is_served and args.vllm_server_base_url is not None,
            f"vllm_server_base_url={args.vllm_server_base_url!r} nothing reads it. Set vllm_server_base_url=None",
        ),
        (
            ["vllm_enable_sleep_mode"],
            is_served,
            "vllm_mode='server' the server does not sleep. Set vllm_mode='colocate'",
        ),
        (
            ["ref_model_sync_steps", "ref_model_mixup_alpha"],
            not args.sync_ref_model,
            "sync_ref_model=False the reference does not move. Set sync_ref_model=True",
        ),
    ]


def _loss_rows(args: "GRPOConfig") -> _Rows:
    """Return the rows of options of GRPO's loss and advantages."""
    no_kl = "beta=0.0 there is no KL. Set beta above 0"
    has_mask, loss, loss_type = args.off_policy_mask_threshold is not None, args.loss, args.loss_type
    of_correction = ["mode", "clip_max", "clip_min"]
    clips, caps = loss.clip in ("ratio", "log_ratio"), loss.clip == "cap"
    return [
        (["kl_estimator"], args.beta == 0, no_kl),
        (["kl_ratio_denominator"], args.beta == 0, no_kl),
        (
            ["kl_ratio_denominator"],
            args.beta != 0 and not args.use_bias_correction_kl,
            "use_bias_correction_kl=False the KL has no ratio. Set use_bias_correction_kl=True",
        ),
        (["use_bias_correction_kl"], args.beta == 0, no_kl),
        (
            ["off_policy_mask_level"],
            not has_mask,
            "off_policy_mask_threshold=None there is no mask. Set off_policy_mask_threshold",
        ),
        (
            ["off_policy_mask_level"],
            has_mask and loss.advantages == "sequence",
            f"loss_type={loss_type!r} a sequence has one advantage. Set loss_type='gspo_token'",
        ),
        (
            ["step_advantage"],
            not loss.takes_token_advantages(args.importance_sampling_level or "token"),
            "one ratio per sequence, StepRewards are refused. Set loss_type='gspo_token'",
        ),
        (
            [f"vllm_importance_sampling_{name}" for name in of_correction],
            args.use_vllm and not args.vllm_importance_sampling_correction,
            "vllm_importance_sampling_correction=False there are no importance weights. Set that to True",
        ),
        (
            ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"],
            not args.use_adaptive_entropy,
            "use_adaptive_entropy=False nothing reads it. Set use_adaptive_entropy=True",
        ),
        (["delta"], not clips, f"loss_type={loss_type!r} there is no two-sided clip. Set loss_type='dapo'"),
        (
            ["epsilon"],
            not clips and (not caps or args.epsilon_high is not None),
            f"loss_type={loss_type!r} there is no lower clip. Set loss_type='dapo'",
        ),
        (["epsilon_high"], not clips and not caps, f"loss_type={loss_type!r} there is no clip. Set loss_type='dapo'"),
        *(
            (its.options, loss_type != other, f"loss_type={loss_type!r} nothing reads it. Set loss_type={other!r}")
            for other, its in LOSSES.items()
        ),
    ]


def _never_moves(args: "SharedOptions") -> list[str]:
    if args.sync_ref_model and args.ref_model_sync_kl is None and 0 < args.max_steps <= args.ref_model_sync_steps:
        return [
            f"sync_ref_model=True cannot act: the run ends after max_steps={args.max_steps}, before the reference "
            f"moves (ref_model_sync_steps={args.ref_model_sync_steps}). Set ref_model_sync_steps below max_steps."
        ]
    return []


def _weighted(args: Any) -> list[str]:
    return [beyond_sets(args.weightings).strip()] if args.keep_sampling_mask and args.weightings else []


def _generated(args: Any) -> list[str]:
    """Return warnings about generation_kwargs that are ignored, or that do not match the options of the trainer."""
    given = args.generation_kwargs or {}
    assert not isinstance(given, str)  # parsed by transformers.TrainingArguments
    messages = []
    if not args.use_vllm:
        names = vars(GenerationConfig())
        messages += [
            f"{name}={given[name]!r} in generation_kwargs cannot act, unless a rollout_func reads it: transformers' "
            f"GenerationConfig has no {name!r}.{near(name, names)} Leave it unset, or correct the name."
            for name in given
            if name not in names
        ]
    temperature = given.get("temperature")
    # with keep_sampling_mask, `_weighted` warns about the temperature
    if temperature not in (None, args.temperature) and not args.keep_sampling_mask:
        messages.append(
            f"temperature={temperature!r} in generation_kwargs changes only sampling; log-probs are computed with "
            f"temperature={args.temperature!r}. Set the option temperature={temperature!r} instead."
        )
    length = "max_tokens" if args.use_vllm else "max_new_tokens"
    if args.max_completion_length is not None and given.get(length) not in (None, args.max_completion_length):
        messages.append(
            f"{length}={given[length]!r} in generation_kwargs overrides max_completion_length="
            f"{args.max_completion_length}. Set the option max_completion_length={given[length]!r} instead."
        )
    if given.get("do_sample", True) is False:
        messages.append(
            "do_sample=False in generation_kwargs decodes greedily, so the completions of a prompt are alike and all "
            "advantages are 0. Leave do_sample unset."
        )
    return messages
