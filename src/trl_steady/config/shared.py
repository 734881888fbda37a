"""Options that all trainers have, and what a config says of them. The help texts are the documentation of options."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

import trl

from trl_steady.config.options import (
    COUNT,
    ENGINE_ARGUMENTS,
    FILTERS,
    NUMBER,
    POSITIVE,
    ROUNDS,
    Needs,
    Range,
    first_disabled,
    marked,
    option,
    refuse_invalid,
    refuse_unknown,
)
from trl_steady.config.sampling import TRUNCATIONS, WEIGHTINGS
from trl_steady.core.feature import warn_user

if TYPE_CHECKING:
    _TRLConfig = trl.GRPOConfig
    _Filter = list[float] | tuple[float, float] | str | Callable[..., bool]
else:
    _TRLConfig = object
    _Filter = str  # for TRL's parser, which knows no such union


_ENTROPY: dict[str, object] = {"entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}
# Options with which TRL computes over the tokens of a micro-batch -> the value without that.
_OVER_MICRO_BATCHES: dict[str, object] = {"ref_model_sync_kl": None, **_ENTROPY}
# Options with which each sequence has a gradient, or counts in another way -> the value without that.
_OVER_ALL_SEQUENCES: dict[str, object] = {"beta": 0.0, "sampler_penalty": 0.0, **_ENTROPY}
# Arguments of vLLM's engine that a trainer decides -> the option for it, or "".
_OF_TRAINERS: dict[str, str] = {
    **dict.fromkeys(("model", "seed", "logprobs_mode", "distributed_executor_backend"), ""),
    # an engine of more processes than TRL knows of would get other prompts in each
    **{f"{kind}_parallel_size": "vllm_tensor_parallel_size" for kind in ("tensor", "pipeline", "data")},
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "vllm_adapter_sync"),
    "enable_return_routed_experts": "router_replay",
    "return_sampling_mask": "keep_sampling_mask",
    "max_model_len": "vllm_max_model_length",
    "trust_remote_code": "trust_remote_code",
    **{name: f"vllm_{name}" for name in ("gpu_memory_utilization", "enable_sleep_mode", "model_impl")},
}


_KL_IN_REWARD = {"RLOO": "beta", "PPO": "kl_coef"}


@dataclass
class SharedOptions(_TRLConfig):
    """Options of every trainer of trl-steady, in addition to those of TRL's config."""

    TRL_NUMBERS: ClassVar[Sequence[str]] = ("beta", "temperature", "ref_model_sync_steps", "ref_model_mixup_alpha")
    """Options of TRL with which our methods calculate."""
    METHOD: ClassVar[str]
    """"GRPO", for example: the config and the trainer are named after it."""
    ref_model_sync_kl: Annotated[float | None, POSITIVE, Needs("sync_ref_model")] = option(
        None,
        "With `sync_ref_model`, also move the reference when the KL of an update exceeds this many nats per token. "
        "The KL is the logged one, so it depends on `kl_estimator`. None: move it by steps only.",
    )
    ref_model_sync_reset_optimizer: Annotated[bool, Needs("sync_ref_model")] = option(
        False,
        "With `sync_ref_model`, clear the optimizer's state each time the reference moves (ProRL, arXiv 2505.24864).",
    )
    trim_padding: bool = option(
        True,
        "Compute only the tokens of a batch, not its padding, in every pass of the policy and the reference. Columns "
        "that are padding in every row are cut off. If padding is left, sequences are packed. Results change within "
        "float rounding. False: keep the padding, as in TRL.",
    )
    token_budget: Annotated[int | None, COUNT] = option(
        None,
        "Maximum number of tokens in a micro-batch of the policy. Micro-batches are filled with sequences of the "
        "optimizer step up to this number. A longer sequence is a micro-batch of its own. None: TRL's micro-batches "
        "of `per_device_train_batch_size` sequences.",
    )
    share_prompts: bool = option(False, "Compute a prompt once for all of its completions in the same forward pass.")
    skip_zero_weight: bool = option(
        False,
        "Leave sequences without a gradient out of the policy's training pass: those whose advantages are all 0, and "
        "those that masks of the rollout drop. Loss and gradient are the same, within float rounding.",
    )
    skip_old_pass: bool | None = option(
        None,
        "If each rollout feeds one update, the policy of the update is the old policy, and a pass that scores the "
        "rollout beforehand repeats it. True: skip this pass, or raise an error if it is needed. False: run it, as "
        "TRL. None: skip it if nothing needs it and `trim_padding=True`.",
    )
    router_replay: Literal["R2", "R3"] | None = option(
        None,
        'For mixtures of experts. `"R2"`: all updates use the experts that were chosen when the old log-probs of the '
        'rollout were computed. `"R3"`: the old log-probs and the updates use the experts that were chosen while the '
        "rollout was generated. None: each pass chooses its experts, as in TRL.",
    )
    router_replay_reference: Annotated[bool, Needs("router_replay", "has_reference")] = option(
        False, "With `router_replay`, the reference's pass uses the same experts too."
    )
    keep_sampling_mask: bool = option(
        False,
        "If `top_p`, `top_k` or `min_p` exclude tokens from sampling, normalise log-probs over the tokens that were "
        'kept, under policy, old policy and reference (DeepSeek-V3.2, section 3.1, "Keep Sampling Mask"). False: '
        "normalise over the whole vocabulary, as in TRL.",
    )
    adapter_dtype: Literal["float32"] | None = option(
        None,
        '`"float32"` keeps the adapters of a quantised base in float32. TRL makes them bf16, in which steps with a '
        "small learning rate round away. None: as in TRL.",
    )
    vllm_adapter_sync: Annotated[bool | None, Needs("use_vllm")] = option(
        None,
        "With `use_vllm` and LoRA, send vLLM the adapter alone, which it serves beside its own copy of the base. "
        "True: require that. False: send all weights with the adapter merged. None: send the adapter if its "
        "configuration is one that vLLM serves, and otherwise merged weights, with a warning.",
    )
    vllm_engine_kwargs: Annotated[dict[str, Any] | str | None, ENGINE_ARGUMENTS, Needs("use_vllm")] = option(
        None,
        'Arguments of a colocated vLLM engine, over TRL\'s, such as `{"max_num_batched_tokens": 8192}`. They are '
        "those of `vllm.LLM`, less the ones that the trainer decides. On a command line, in JSON.",
    )
    engine_check: Annotated[float | None, POSITIVE] = option(
        1.0,
        "Largest mean k3, in nats per token, between trainer and vLLM (or a `rollout_func`) in the first rollout of "
        "a run and in the first after a resume. Above it, the engine serves another model than the policy, and the "
        "run ends with an error. None: no check.",
    )

    skip_nonfinite_steps: Annotated[int | None, COUNT] = option(
        3,
        "Leave out optimizer steps whose gradient norm is NaN or infinite. After this many in a row, the run ends in "
        "an error that names the last checkpoint. None: take such steps, as in TRL.",
    )
    async_generate: bool = option(
        False,
        'With `vllm_mode="server"`, let the server generate the next rollout while the trainer trains on this one. '
        "Its answers are of the policy one rollout before, except in the first rollout of each epoch.",
    )
    dynamic_sampling: bool = option(
        False,
        "Replace groups that `dynamic_sampling_filter` rejects by groups of further prompts, before anything is "
        "scored (DAPO, arXiv 2503.14476, section 3.2).",
    )
    dynamic_sampling_max_rounds: Annotated[int, ROUNDS, Needs("dynamic_sampling")] = option(
        3,
        "With `dynamic_sampling`, most rounds of generation for a rollout. Rejected groups fill what is then missing.",
    )
    dynamic_sampling_filter: Annotated[_Filter, FILTERS, Needs("dynamic_sampling")] = option(
        "zero_std",
        'With `dynamic_sampling`, the groups to keep. `"zero_std"`: those whose rewards differ. `"reward_variance"`: '
        "those of the largest reward variance, up to 0.9 of its sum over a rollout (RAGEN-2, arXiv 2604.06268). "
        "`(low, high)`: those whose mean reward is between the two. Or a function that gets a group's rewards (G,) "
        'and its rows, dictionaries with all columns, "prompt" and "completion", and returns True to keep it.',
    )
    training_report: bool = option(
        False,
        "Write `report.html` to the output folder at saves and at the end, print a line when a symptom of an "
        "unsteady run starts, and log the seconds of each phase. Needs matplotlib.",
    )
    log_line: bool = option(
        False, "Print one line for each log in place of all its values, and at the end what the run shows."
    )

    forced: ClassVar[Mapping[str, object]] = {}
    """Options that every config gets in place of what a script passes: those of `trl-steady run --set`."""
    when_built: ClassVar[list[Callable[["SharedOptions"], None]]] = []
    """Called with each config that has been checked, by `trl-steady run --dry-run`."""
    _forced_values: ClassVar[Mapping[str, object]] = {}  # an unpickled config has run no checks

    def __new__(cls, *_: object, **keywords: object) -> Self:
        """Refuse a misspelt option with the name that was meant, as Python does from 3.13 on."""
        refuse_unknown(cls, keywords)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        vars(self).update(self.forced)
        refuse_invalid(self, {**dict.fromkeys(self.TRL_NUMBERS, NUMBER), **marked(type(self), Range)})
        self._fill_unset()
        self._run_trl_checks()
        for message in self._contradictions():
            raise ValueError(message)
        for message in self.idle_options:
            warn_user(message)
        for note in self.when_built:
            note(self)
        vars(self)["_forced_values"] = {name: getattr(self, name) for name in self.forced}

    def refuse_changed(self) -> None:
        """Raise a ValueError if a forced option has another value than after the checks of this config."""
        for name, value in self._forced_values.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"--set {name} was given, but the trainer's config has {name}={getattr(self, name)!r}. The script "
                    "changes it after it has built the config. Remove that change."
                )

    def _idle_because(self) -> dict[str, str | None]:
        """Return for options the setting with which they have no effect, or None if they have one."""
        vllm = first_disabled(self, "use_vllm")
        return {name: first_disabled(self, *needs.names) for name, needs in marked(type(self), Needs).items()} | {
            "skip_old_pass": self._no_correction if self.skip_old_pass and not self.has_old_pass else None,
            "router_replay": self._never_off_policy if self.router_replay == "R2" else None,
            "keep_sampling_mask": None if self.truncations else "top_p, top_k and min_p that keep every token",
            "vllm_engine_kwargs": vllm or ("vllm_mode='server'" if self.vllm_mode == "server" else None),
            "engine_check": vllm and f"{vllm}, unless a rollout_func generates",
            "skip_nonfinite_steps": "fp16=True" if self.fp16 else self.steps_in_backward,
        }

    def _fill_unset(self) -> None:
        """Set the options whose defaults depend on other options."""

    def _run_trl_checks(self) -> None:
        super().__post_init__()

    def _contradictions(self) -> Iterator[str]:
        """Yield errors about options that are valid alone, but not together, each with a fix."""
        for name in self.forced.keys() - {each.name for each in fields(self)}:
            yield f"--set {name}: {self.METHOD}Config has no option {name!r}. Leave it out."
        if self.sync_ref_model and not self.has_reference:
            yield "sync_ref_model=True with beta=0.0: there is no reference to move. Set beta above 0."
        for name in ("token_budget", "share_prompts"):
            if getattr(self, name) and not self.trim_padding:
                yield f"{name}={getattr(self, name)!r} does not work with trim_padding=False. Set trim_padding=True."
        if self.token_budget is not None:
            over = [name for name, off in _OVER_MICRO_BATCHES.items() if getattr(self, name, off) != off]
            over += ["loss_type"] if getattr(self, "loss_type", "") == "bnpo" else []
            for name in over:
                yield (
                    f"token_budget={self.token_budget} does not work with {name}={getattr(self, name)!r}, which acts "
                    "over each of TRL's micro-batches. Leave one of them unset."
                )
        for setting in self.over_all_sequences if self.skip_zero_weight else ():
            yield (
                f"skip_zero_weight=True does not work with {setting}, for which sequences of weight 0 count too. "
                "Leave one of them unset."
            )
        if self.skip_old_pass and self.why_old_pass:
            yield f"skip_old_pass=True does not work with {self.why_old_pass}. Leave skip_old_pass unset."
        given = self.vllm_engine_kwargs or {}
        assert not isinstance(given, str)  # parsed by transformers.TrainingArguments
        for name, value in given.items() if self.use_vllm and self.vllm_mode == "colocate" else ():
            if name in _OF_TRAINERS:
                instead = f", and set {_OF_TRAINERS[name]}" if _OF_TRAINERS[name] else ""
                yield f"vllm_engine_kwargs has {name}={value!r}, which the trainer decides. Leave it out{instead}."
            if name in ("quantization", "quantization_config") and value and not self.vllm_adapter_sync:
                yield (
                    f"vllm_engine_kwargs has {name}={value!r}, and a quantised engine cannot take the policy's "
                    "weights. Train a LoRA adapter and set vllm_adapter_sync=True, or leave it out."
                )
        # TRL casts the whole model for it, and it shows no distribution that it samples from
        for name in ("adapter_dtype", "keep_sampling_mask") if self.use_transformers_continuous_batching else ():
            if getattr(self, name):
                yield (
                    f"{name}={getattr(self, name)!r} does not work with use_transformers_continuous_batching=True. "
                    "Set it to False."
                )
        if self.async_generate and self.METHOD == "RLOO":
            yield (
                "async_generate=True does not work with RLOO, whose trainer drops the server's log-probs, so that "
                "nothing corrects for older answers. Use GRPOTrainer, or leave it unset."
            )
        if self.async_generate and not (self.use_vllm and self.vllm_mode == "server"):
            yield (
                f"async_generate=True does not work with use_vllm={self.use_vllm}, vllm_mode={self.vllm_mode!r}: only "
                "a server can generate while this process trains. Set use_vllm=True and vllm_mode='server'."
            )
        if self.dynamic_sampling and self.num_generations == 1:
            yield (
                "dynamic_sampling=True does not work with num_generations=1: the rewards of one answer cannot differ. "
                "Set num_generations to 2 or more."
            )
        # the other options would read it as no filter
        if self.top_k is None:  # pyright: ignore[reportUnnecessaryComparison]
            yield "top_k=None: transformers takes it for 50. Set top_k=0 for no top-k filter."
        if self.keep_sampling_mask and self.use_vllm and self.sampling.get("top_k", 0) <= 0:
            yield (
                f"keep_sampling_mask=True does not work with top_k={self.sampling.get('top_k')}: vLLM returns kept "
                "tokens only if top_k limits their number. Set top_k=512, for example, in addition to top_p."
            )

    @property
    def idle_options(self) -> list[str]:
        """Warnings about options that have no effect, or probably not the intended one, each with a fix."""
        messages = [
            f"{name}={getattr(self, name)!r} cannot act with {why}. Change that, or leave {name} unset."
            for name, why in self._idle_because().items()
            if why is not None and getattr(self, name) not in (getattr(type(self), name), None, False)
        ]
        is_short = self.ref_model_sync_kl is None and 0 < self.max_steps <= self.ref_model_sync_steps
        if self.sync_ref_model and is_short:
            messages.append(
                f"sync_ref_model=True cannot act: the run ends after max_steps={self.max_steps}. Set "
                f"ref_model_sync_steps={self.ref_model_sync_steps} below max_steps."
            )
        if self.keep_sampling_mask and self.weightings:  # the temperature of generation_kwargs may be one of them
            messages.append(
                f"{', '.join(self.weightings)} also changes the probabilities of the kept tokens, and ratios include "
                "this change even with keep_sampling_mask=True."
            )
        return messages

    def to_dict(self) -> dict[str, Any]:
        """Return the options as in transformers, with the name of a function, which is no JSON."""
        options = super().to_dict()
        chosen = options["dynamic_sampling_filter"]
        if callable(chosen):
            options["dynamic_sampling_filter"] = getattr(chosen, "__name__", repr(chosen))
        return options

    is_of_our_trainer = False  # not an option, without an annotation
    """True once one of our trainers has this config."""

    @property
    def place_model_on_device(self) -> bool | None:
        """As in transformers, whose trainers read it when they are built.

        Raises:
            ValueError: The trainer is not trl-steady's and would ignore trl-steady's options.
        """
        if not self.is_of_our_trainer:
            raise ValueError(
                f"a trainer that is not trl-steady's got a trl_steady.{self.METHOD}Config and would ignore its "
                f"options. Use both: from trl_steady import {self.METHOD}Config, {self.METHOD}Trainer. Derive a "
                f"trainer of your own from trl_steady.{self.METHOD}Trainer."
            )
        return super().place_model_on_device

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return self.beta != 0

    @property
    def over_all_sequences(self) -> list[str]:
        """Settings for which sequences of weight 0 count too, such as "beta=0.1"."""
        given = {name: getattr(self, name, off) for name, off in _OVER_ALL_SEQUENCES.items()}
        return [f"{name}={value!r}" for name, value in given.items() if value != _OVER_ALL_SEQUENCES[name]]

    @property
    def steps_in_backward(self) -> str | None:
        """Name of the optimizer if it takes its steps inside backward, else None."""
        name = getattr(self.optim, "value", self.optim)  # of an enumeration
        return name if name in ("lomo", "adalomo") or name.endswith("_layerwise") else None

    @property
    def sampling(self) -> dict[str, Any]:
        """Generation options that are set; `generation_kwargs` override TRL's own options."""
        # transformers has read JSON
        given = cast(dict[str, Any] | None, self.generation_kwargs)
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        names += ["vllm_structured_outputs_regex"] if self.use_vllm else []
        options = {**{name: getattr(self, name) for name in names}, **(given or {})}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def truncations(self) -> list[str]:
        """Settings that exclude tokens from sampling, such as "top_p=0.9"."""
        given = self.sampling.items()
        return [f"{name}={value!r}" for name, value in given if name in TRUNCATIONS and TRUNCATIONS[name](value)]

    @property
    def weightings(self) -> list[str]:
        """Settings that change the probabilities of the kept tokens, such as "repetition_penalty=1.1"."""
        # log-probs are computed with the option, not with the temperature of generation_kwargs
        unweighted = {**WEIGHTINGS, "temperature": self.temperature}
        return [f"{name}={value!r}" for name, value in self.sampling.items() if unweighted.get(name, value) != value]

    @property
    def uncorrected(self) -> list[str]:
        """Settings with which the sampler's log-probs are of another distribution than the policy's."""
        return [*([] if self.keep_sampling_mask else self.truncations), *self.weightings]

    @property
    def is_on_policy(self) -> bool:
        """True if each generation batch feeds only one optimizer step, so that the ratio is exactly 1.

        TRL then does not compute old log-probs.
        """
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def _never_off_policy(self) -> str | None:
        """The settings with which every update is on-policy; None without them."""
        if not self.is_on_policy:
            return None
        return "on-policy updates: steps_per_generation * num_iterations is not above gradient_accumulation_steps"

    @property
    def _no_correction(self) -> str | None:
        """The setting with which TRL does not correct for an engine; None if it does."""
        return first_disabled(self, "use_vllm", "vllm_importance_sampling_correction")

    @property
    def has_old_pass(self) -> bool:
        """True if TRL scores the old policy also if updates are on-policy: RLOO always, GRPO for its correction."""
        return self.METHOD == "RLOO" or self._no_correction is None

    @property
    def why_old_pass(self) -> str | None:
        """Setting with which a rollout needs its pass of the old policy; None without one."""
        if not self.is_on_policy:
            return (
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, which is no multiple of "
                "steps_per_generation * num_iterations: the policy moves while a rollout is in use"
            )
        if self.router_replay == "R2":
            return "router_replay='R2', which records routes in that pass"
        if self.neftune_noise_alpha is not None:
            return f"neftune_noise_alpha={self.neftune_noise_alpha}, whose noise is another one in each pass"
        name = _KL_IN_REWARD.get(self.METHOD, "")
        if coefficient := getattr(self, name, 0.0):
            return f"{name}={coefficient}: the KL in the reward needs these log-probs"
        return None
