"""Warnings about options that have no effect, or probably not the intended one, each with a fix."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from trl_steady.config.checks import TRLS_DEFAULTS, beyond_sets, defaults, own_class, trl_default
from trl_steady.config.spelling import near
from trl_steady.losses.table import LOSSES

if TYPE_CHECKING:
    from trl_steady.config.grpo import GRPOConfig
    from trl_steady.config.shared import SharedOptions

__all__ = ["cannot_act", "idle_warnings", "loss_cannot_act"]

_TOKEN_SCALE_EPSILON = 1e-2
# so high that only a token whose probability grows by more than this factor within one rollout is clipped
_FAR_EPSILON_HIGH = 10.0


def cannot_act(args: "SharedOptions") -> list[str]:
    """Return a warning with a fix for each option that is set and has no effect."""
    return [*_inactive(args), *idle_warnings(args, _shared_rows(args)), *_never_moves(args), *_sampling(args)]


def loss_cannot_act(args: "GRPOConfig") -> list[str]:
    """Return a warning with a fix for each option of GRPO's loss that has no effect."""
    return [*_clip_ranges(args), *idle_warnings(args, _loss_rows(args))]


def _inactive(args: Any) -> Iterator[str]:
    """Yield warnings about options that have no effect because every update is on-policy."""
    if not args.is_on_policy:
        return
    why = (
        f"(an optimizer step of gradient_accumulation_steps={args.gradient_accumulation_steps} uses the whole "
        f"generation batch: steps_per_generation={args.steps_per_generation}, num_iterations={args.num_iterations}). "
        f"{args.way_off_policy}"
    )
    if args.METHOD != "RLOO" and args.loss.is_ours:
        ratio = "sequence ratio is" if args.loss.level == "sequence" else "ratios are"
        yield (
            f"loss_type={args.loss_type!r} cannot act: every update is on-policy, so the {ratio} exactly 1 and "
            f"nothing is clipped {why}"
        )
    if args.router_replay == "R2":
        yield (
            "router_replay='R2' cannot act: every update is on-policy, so its routes are those of the current policy "
            f"{why}"
        )


def _clip_ranges(args: "GRPOConfig") -> Iterator[str]:
    """Yield warnings about clip ranges that clip nothing or everything, or that another option replaces."""
    low, high, loss_type = args.epsilon, args.epsilon_high, args.loss_type
    assert low is not None  # filled in at construction
    ranges = {"epsilon": low, "epsilon_high": high}
    wide = [f"{name}={value}" for name, value in ranges.items() if value is not None and value >= _TOKEN_SCALE_EPSILON]
    is_of_tokens = args.importance_sampling_level == "token"
    high = low if high is None else high
    if args.loss.clip == "log_ratio" and low <= trl_default("epsilon"):
        yield (
            f"epsilon={low}: a clip range for token ratios, but loss_type={loss_type!r} clips log-ratios, with "
            f"{args.loss.epsilon} in its paper. Leave epsilon unset, or set epsilon={args.loss.epsilon}."
        )
    if args.loss.clip == "cap" and high < 1:
        unset = "" if args.epsilon_high is not None else f" (unset, it is epsilon={low})"
        yield (
            f"epsilon_high={high}{unset} with loss_type={loss_type!r} is the cap of the ratio itself, not of its "
            "distance from 1. A ratio of 1 is above this cap, so nearly all tokens get the same weight. Set "
            "epsilon_high=5.0, as ScaleRL does."
        )
    if args.loss.clip != "ratio":
        return
    if wide and not is_of_tokens:
        yield (
            f"{' and '.join(wide)}: a clip range for token ratios, but the ratio is per sequence. It is a mean over "
            "the completion and varies far less, so almost nothing will be clipped. Set "
            f"epsilon={LOSSES['gspo'].epsilon} and epsilon_high={LOSSES['gspo'].epsilon_high}, as in the GSPO paper."
        )
    if is_of_tokens and low >= 1:
        yield (
            f"epsilon={low} with loss_type={loss_type!r} never clips from below, because a ratio is always above 0. "
            f"Set epsilon below 1; TRL's default is {trl_default('epsilon')}."
        )
    if is_of_tokens and high >= _FAR_EPSILON_HIGH:
        name = "epsilon_high" if args.epsilon_high is not None else "epsilon"
        yield (
            f"{name}={high} with loss_type={loss_type!r} clips from above only a token that has become {1 + high} "
            f"times as likely, which nearly never happens. Set {name} below 1; DAPO uses epsilon_high=0.28."
        )
    if args.delta is not None and args.delta <= 1 + high:  # an error for gspo and gspo_token
        yield (
            f"delta={args.delta} is inside the clip range of loss_type={loss_type!r} (upper end {1 + high}), so it "
            f"replaces epsilon_high. Set delta above {1 + high}, or None for no two-sided clip."
        )


_Rows = Iterator[tuple[Sequence[str], str]]
"""Options without effect, and why, with a fix."""


def idle_warnings(args: Any, rows: _Rows) -> Iterator[str]:
    """Yield a warning for each row whose options are set."""
    trls = TRLS_DEFAULTS[args.METHOD]
    unset = {**defaults(own_class(args)), **trls}
    for options, why in rows:
        values = {option: getattr(args, option) for option in options if option in unset}
        given = [f"{option}={value!r}" for option, value in values.items() if value != unset[option]]
        if given:
            it = "them" if len(given) > 1 else "it" if options[0] in trls else options[0]
            yield f"{' and '.join(given)} cannot act: with {why}, or leave {it} unset."


def _shared_rows(args: "SharedOptions") -> _Rows:
    """Yield options of every trainer that the other options keep from having an effect."""
    if args.router_replay is None:
        yield ["router_replay_reference"], "router_replay=None there are no routes. Set router_replay"
    elif not args.has_reference:
        yield ["router_replay_reference"], "beta=0.0 there is no reference. Set beta above 0"
    if not args.truncations:
        yield ["keep_sampling_mask"], "top_p, top_k and min_p unset, sampling excludes no token. Set one of them"
    vllm = [name for name in TRLS_DEFAULTS["GRPO"] if name.startswith("vllm_")]
    if not args.use_vllm:
        reader = "only a rollout_func" if args.METHOD != "RLOO" else "nothing"
        yield [*vllm, "engine_check"], f"use_vllm=False {reader} could read it. Set use_vllm=True"
        yield ["vllm_adapter_sync"], "use_vllm=False there is no vLLM. Set use_vllm=True"
    elif args.vllm_mode == "server":
        of_colocated = ["vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"]
        yield of_colocated, "vllm_mode='server' the server decides this. Pass it to `trl vllm-serve`"
    else:
        of_server = [name for name in vllm if name.startswith("vllm_server_")] + ["vllm_group_port"]
        yield of_server, "vllm_mode='colocate' there is no server. Set vllm_mode='server'"
    if not args.sync_ref_model:
        why = "sync_ref_model=False the reference does not move. Set sync_ref_model=True"
        yield ["ref_model_sync_steps", "ref_model_mixup_alpha"], why


def _loss_rows(args: "GRPOConfig") -> _Rows:
    """Yield options of GRPO's loss and advantages that the other options keep from having an effect."""
    loss, with_loss = args.loss, f"loss_type={args.loss_type!r}"
    if args.beta == 0:
        kl = " in the loss, and the KL in the reward is always k1" if args.has_reference else ""  # with PPO's kl_coef
        for option in ("kl_estimator", "kl_ratio_denominator", "use_bias_correction_kl"):
            yield [option], f"beta=0.0 there is no KL{kl}. Set beta above 0"
    elif not args.use_bias_correction_kl:
        why = "use_bias_correction_kl=False the KL has no ratio. Set use_bias_correction_kl=True"
        yield ["kl_ratio_denominator"], why
    if args.off_policy_mask_threshold is None:
        why = "off_policy_mask_threshold=None there is no mask. Set off_policy_mask_threshold"
        yield ["off_policy_mask_level"], why
    elif loss.advantages == "sequence":
        yield ["off_policy_mask_level"], f"{with_loss} a sequence has one advantage. Set loss_type='gspo_token'"
    if not loss.takes_token_advantages(args.importance_sampling_level or "token"):
        yield ["step_advantage"], "one ratio per sequence, StepRewards are refused. Set loss_type='gspo_token'"
    if args.use_vllm and not args.vllm_importance_sampling_correction:
        why = "vllm_importance_sampling_correction=False there are no importance weights. Set that to True"
        yield [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")], why
    if not args.use_adaptive_entropy:
        why = "use_adaptive_entropy=False nothing reads it. Set use_adaptive_entropy=True"
        yield ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"], why
    if loss.clip in ("cap", None):
        yield ["delta"], f"{with_loss} there is no two-sided clip. Set loss_type='dapo'"
        if loss.clip is None or args.epsilon_high is not None:
            yield ["epsilon"], f"{with_loss} there is no lower clip. Set loss_type='dapo'"
    if loss.clip is None:
        yield ["epsilon_high"], f"{with_loss} there is no clip. Set loss_type='dapo'"
    for other, its in LOSSES.items():
        if args.loss_type != other:
            yield its.options, f"{with_loss} nothing reads it. Set loss_type={other!r}"


def _never_moves(args: "SharedOptions") -> Iterator[str]:
    if args.sync_ref_model and args.ref_model_sync_kl is None and 0 < args.max_steps <= args.ref_model_sync_steps:
        yield (
            f"sync_ref_model=True cannot act: the run ends after max_steps={args.max_steps}, before the reference "
            f"moves (ref_model_sync_steps={args.ref_model_sync_steps}). Set ref_model_sync_steps below max_steps."
        )


def _sampling(args: Any) -> Iterator[str]:
    """Yield warnings about generation options that are ignored, or that do not match the options of the trainer."""
    if args.keep_sampling_mask and args.weightings:  # the temperature of generation_kwargs may be one of them
        yield beyond_sets(args.weightings).strip()
    given = args.generation_kwargs or {}
    assert not isinstance(given, str)  # parsed by transformers.TrainingArguments
    names = vars(GenerationConfig())
    for name in given:
        if name not in names and not args.use_vllm:
            yield (
                f"{name}={given[name]!r} in generation_kwargs cannot act, unless a rollout_func reads it: "
                f"transformers' GenerationConfig has no {name!r}.{near(name, names)} Leave it unset, or correct the "
                "name."
            )
    temperature = given.get("temperature")
    if temperature not in (None, args.temperature) and not args.keep_sampling_mask:
        yield (
            f"temperature={temperature!r} in generation_kwargs changes only sampling; log-probs are computed with "
            f"temperature={args.temperature!r}. Set the option temperature={temperature!r} instead."
        )
    length = "max_tokens" if args.use_vllm else "max_new_tokens"
    if args.max_completion_length is not None and given.get(length) not in (None, args.max_completion_length):
        yield (
            f"{length}={given[length]!r} in generation_kwargs overrides max_completion_length="
            f"{args.max_completion_length}. Set the option max_completion_length={given[length]!r} instead."
        )
    if given.get("do_sample") is False:
        yield (
            "do_sample=False in generation_kwargs decodes greedily, so the completions of a prompt are alike and all "
            "advantages are 0. Leave do_sample unset."
        )
