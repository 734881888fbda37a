"""Options that all trainers have, and what a config says of them. The help texts are the documentation of options."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from trl_steady.config.evaluation import EvaluationOptions, Functions
from trl_steady.config.options import (
    COUNT,
    FILTERS,
    IN_ROLLOUT,
    NUMBER,
    POSITIVE,
    ROUNDS,
    Idle,
    InRollout,
    Needs,
    Range,
    marked,
    option,
    refuse_invalid,
    refuse_unknown,
    why_disabled,
)
from trl_steady.config.sampling import TRUNCATIONS, WEIGHTINGS
from trl_steady.core.user_warning import warn_user

if TYPE_CHECKING:
    _Filter = list[float] | tuple[float, float] | str | Callable[..., bool]
else:
    _Filter = str  # for TRL's parser, which knows no such union


_ENTROPY: dict[str, object] = {"entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}
# Options that act over the tokens of TRL's micro-batch -> the value without that.
_OVER_MICRO_BATCHES: dict[str, object] = {"ref_model_sync_kl": None, **_ENTROPY}
# Options with which each sequence has a gradient, or counts in another way -> the value without that.
_OVER_ALL_SEQUENCES: dict[str, object] = {"beta": 0.0, "sampler_penalty": 0.0, **_ENTROPY}
_KL_IN_REWARD = {"RLOO": "beta", "PPO": "kl_coef"}


class ForeignTrainerError(ValueError, AttributeError):
    """A config was given to a trainer that is not trl-steady's.

    As an AttributeError, it lets `hasattr` and `inspect.getmembers` look at a config without a trainer.
    """


@dataclass
class SharedOptions(EvaluationOptions):
    """Options of every trainer of trl-steady, in addition to those of TRL's config."""

    TRL_NUMBERS: ClassVar[Sequence[str]] = ("beta", "temperature", "ref_model_sync_steps", "ref_model_mixup_alpha")
    """Options of TRL with which our methods calculate."""
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
    share_prompts: Annotated[bool, InRollout("router_replay")] = option(
        False, "Compute a prompt once for all of its completions in the same forward pass."
    )
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
    router_replay: Annotated[Literal["R2", "R3"] | None, IN_ROLLOUT] = option(
        None,
        'For mixtures of experts. `"R2"`: all updates use the experts that were chosen when the old log-probs of the '
        'rollout were computed. `"R3"`: the old log-probs and the updates use the experts that were chosen while the '
        "rollout was generated. None: each pass chooses its experts, as in TRL.",
    )
    router_replay_reference: Annotated[bool, Needs("router_replay"), IN_ROLLOUT] = option(
        False, "With `router_replay`, the reference's pass uses the same experts too."
    )
    keep_sampling_mask: Annotated[bool, IN_ROLLOUT] = option(
        False,
        "If `top_p`, `top_k` or `min_p` exclude tokens from sampling, normalise log-probs over the tokens that were "
        'kept, under policy, old policy and reference (DeepSeek-V3.2, section 3.1, "Keep Sampling Mask"). False: '
        "normalise over the whole vocabulary, as in TRL.",
    )
    adapter_dtype: Annotated[Literal["float32"] | None, IN_ROLLOUT] = option(
        None,
        '`"float32"` keeps the adapters of a quantised base in float32. TRL makes them bf16, in which steps with a '
        "small learning rate round away. None: as in TRL.",
    )
    skip_nonfinite_steps: Annotated[int | None, COUNT] = option(
        3,
        "Leave out optimizer steps whose gradient norm is NaN or infinite. After this many in a row, the run ends in "
        "an error that names the last checkpoint. Under fp16, only steps that a smaller loss scale cannot mend count. "
        "None: take such steps, as in TRL.",
    )
    dynamic_sampling: Annotated[bool, IN_ROLLOUT] = option(
        False,
        "Replace groups that `dynamic_sampling_filter` rejects by groups of further prompts, before anything is "
        "scored (DAPO, arXiv 2503.14476, section 3.2).",
    )
    dynamic_sampling_max_rounds: Annotated[int, ROUNDS, Needs("dynamic_sampling"), IN_ROLLOUT] = option(
        3,
        "With `dynamic_sampling`, most rounds of generation for a rollout. Rejected groups fill what is then missing.",
    )
    dynamic_sampling_filter: Annotated[_Filter, FILTERS, Needs("dynamic_sampling"), IN_ROLLOUT] = option(
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

    def __new__(cls, *_: object, **keywords: object) -> Self:
        """Refuse a misspelt option with the name that was meant, as Python does from 3.13 on."""
        refuse_unknown(cls, keywords)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        ranges = marked(type(self), Range)
        refuse_invalid(self, {**dict.fromkeys(self.TRL_NUMBERS, NUMBER), **ranges})
        self._fill_unset()
        self._import_metrics()
        self._run_trl_checks()
        for message in self._contradictions():
            raise ValueError(message)
        for message in self.doubts:
            warn_user(message)

    def _fill_unset(self) -> None:
        """Set the options whose defaults depend on other options."""

    def _run_trl_checks(self) -> None:
        super().__post_init__()

    # errors

    def _contradictions(self) -> Iterator[str]:
        """Yield errors about options that are valid alone, but not together, each with a fix."""
        if self.sync_ref_model and not self.has_reference:
            yield "sync_ref_model=True with beta=0.0: there is no reference to move. Set beta above 0."
        for name in ("token_budget", "share_prompts"):
            if getattr(self, name) and not self.trim_padding:
                yield f"{name}={getattr(self, name)!r} does not work with trim_padding=False. Set trim_padding=True."
        if self.token_budget is not None:
            for name in self._over_micro_batches:
                yield (
                    f"token_budget={self.token_budget} does not work with {name}={getattr(self, name)!r}, which acts "
                    "over each of TRL's micro-batches. Leave one of them unset."
                )
        if self.skip_zero_weight:
            for setting in self.over_all_sequences:
                yield (
                    f"skip_zero_weight=True does not work with {setting}, for which sequences of weight 0 count too. "
                    "Leave one of them unset."
                )
        if self.skip_old_pass and self.why_needs_old_pass:
            yield f"skip_old_pass=True does not work with {self.why_needs_old_pass}. Leave skip_old_pass unset."
        yield from self._engine_contradictions()
        yield from self._evaluation_contradictions()
        yield from self._sampling_contradictions()

    @property
    def rounds_adapters(self) -> bool:
        """True if TRL casts the whole model to bf16 in each rollout, also adapters that stay in float32."""
        return self.use_transformers_continuous_batching and bool(self.bf16)

    def _sampling_contradictions(self) -> Iterator[str]:
        if self.use_transformers_continuous_batching:
            # TRL casts the whole model for it, and it shows no distribution that it samples from
            for name in ("adapter_dtype", "keep_sampling_mask"):
                if getattr(self, name):
                    yield (
                        f"{name}={getattr(self, name)!r} does not work with "
                        "use_transformers_continuous_batching=True. Set it to False."
                    )
            if self.fp16:
                yield (
                    "fp16=True does not work with use_transformers_continuous_batching=True: TRL casts the policy to "
                    "fp16 for it, and torch does not unscale such gradients. Set it to False, or use bf16=True."
                )
        if self.dynamic_sampling and self.num_generations == 1:
            yield (
                "dynamic_sampling=True does not work with num_generations=1: the rewards of one answer cannot differ. "
                "Set num_generations to 2 or more."
            )
        # the other options would read it as no filter
        of_kwargs = cast(dict[str, Any] | None, self.generation_kwargs) or {}
        if of_kwargs.get("top_k", self.top_k) is None:
            yield "top_k=None: transformers takes it for 50. Set top_k=0 for no top-k filter."
        if self.keep_sampling_mask and self.use_vllm:
            top_k = self.sampling.get("top_k", 0)
            if top_k <= 0:
                yield (
                    f"keep_sampling_mask=True does not work with top_k={top_k}: vLLM returns kept tokens only if "
                    "top_k limits their number. Set top_k=512, for example, in addition to top_p."
                )
            of_evaluations = self.eval_generation or {}
            if isinstance(of_evaluations, Mapping) and of_evaluations.get("top_k", 1) <= 0:
                yield (
                    f"eval_generation={of_evaluations!r} does not work with keep_sampling_mask=True and vLLM, which "
                    "refuses requests without top_k. Leave top_k out, or set a number above 0."
                )

    # warnings

    @property
    def doubts(self) -> list[str]:
        """Warnings about options that have no effect, or probably not the intended one, each with a fix."""
        messages = list(self.idle_options.values())
        if self.keep_sampling_mask and self.weightings:  # the temperature of generation_kwargs may be one of them
            messages.append(
                f"{', '.join(self.weightings)} also changes the probabilities of the kept tokens, and ratios include "
                "this change even with keep_sampling_mask=True."
            )
        return messages

    @property
    def idle_options(self) -> dict[str, str]:
        """Options that are set and have no effect, each with a warning that says why and what to do."""
        messages: dict[str, str] = {}
        for name, idle in self._idle_because().items():
            value = getattr(self, name)
            default = getattr(type(self), name)
            if idle is None or value is None or value is False or value == default:
                continue
            fix = idle.instead.capitalize()
            if idle.fix:
                fix = f"{idle.fix}, or {idle.instead}"
            messages[name] = f"{name}={value!r} has no effect because {idle.because}. {fix}."
        return messages

    def _idle_because(self) -> dict[str, Idle | None]:
        """Return for options why they have no effect; None for those that have one.

        `Needs` in the annotation of an option says what it needs. Here are reasons that depend on more than that.
        """
        reasons: dict[str, Idle | None] = {}
        for name, needs in marked(type(self), Needs).items():
            reasons[name] = why_disabled(self, *needs.names)
        reasons.update(self._engine_idle_because())
        if self.router_replay_reference and self.router_replay and not self.has_reference:
            reasons["router_replay_reference"] = Idle("beta=0.0, so that there is no reference", "Set beta above 0")
        if self.skip_old_pass and not self.trl_always_scores_old:
            reasons["skip_old_pass"] = self._why_no_correction
        if self.router_replay == "R2":
            reasons["router_replay"] = self._why_on_policy
        if not self.truncations:
            fix = "Set top_p below 1"
            if not self.use_vllm:
                fix = f"{fix}, rely on a generation_config of the model that excludes tokens"
            reasons["keep_sampling_mask"] = Idle("top_p, top_k and min_p keep every token", fix)
        if self.fp16 and self.deepspeed_plugin is not None:
            because = "fp16=True with DeepSpeed, whose loss scaler leaves such steps out and does not tell"
            reasons["skip_nonfinite_steps"] = Idle(because, "Set bf16=True")
        elif self.steps_in_backward:
            steps = f"optim={self.steps_in_backward!r} takes its steps in backward"
            reasons["skip_nonfinite_steps"] = Idle(steps, "Set another optimizer")
        is_short = self.ref_model_sync_kl is None and 0 < self.max_steps <= self.ref_model_sync_steps
        if self.sync_ref_model and is_short:
            ends = f"the run ends after max_steps={self.max_steps}"
            below = f"Set ref_model_sync_steps={self.ref_model_sync_steps} below max_steps"
            reasons["sync_ref_model"] = Idle(ends, below)
        return reasons

    @property
    def _why_on_policy(self) -> Idle | None:
        """Reason why every update is on-policy; None without one."""
        if not self.is_on_policy:
            return None
        return Idle(
            "each rollout is used for one update, so that every ratio is 1",
            "Raise steps_per_generation * num_iterations above gradient_accumulation_steps",
        )

    @property
    def _why_no_correction(self) -> Idle | None:
        """Setting with which TRL does not correct for an engine; None if it does."""
        return why_disabled(self, "use_vllm", "vllm_importance_sampling_correction")

    # for other trainers, and for logs

    def to_dict(self) -> dict[str, Any]:
        """Return the options as in transformers, with the names of functions, which are no JSON."""
        options = super().to_dict()
        if isinstance(self.eval_metrics, Functions):
            options["eval_metrics"] = self.eval_metrics.names
        for name in ("dynamic_sampling_filter", "teacher_prompt"):
            chosen = options.get(name)
            if callable(chosen):
                options[name] = getattr(chosen, "__name__", repr(chosen))
        return options

    is_of_our_trainer = False  # not an option, without an annotation
    """True while one of our trainers is built with this config."""

    @property
    def place_model_on_device(self) -> bool | None:
        """As in transformers, whose trainers read it when they are built.

        Raises:
            ForeignTrainerError: The trainer is not trl-steady's and would ignore trl-steady's options.
        """
        if not self.is_of_our_trainer:
            raise ForeignTrainerError(
                f"a trainer that is not trl-steady's got a trl_steady.{self.METHOD}Config and would ignore its "
                f"options. Use both: from trl_steady import {self.METHOD}Config, {self.METHOD}Trainer. Derive a "
                f"trainer of your own from trl_steady.{self.METHOD}Trainer."
            )
        return super().place_model_on_device

    # questions that trainers and features ask

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return self.beta != 0

    @property
    def is_on_policy(self) -> bool:
        """True if each generation batch feeds only one optimizer step, so that the ratio is exactly 1.

        TRL then does not compute old log-probs.
        """
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def trl_always_scores_old(self) -> bool:
        """True if TRL scores the old policy also if updates are on-policy: RLOO always, GRPO for its correction."""
        return self.METHOD == "RLOO" or self._why_no_correction is None

    @property
    def why_needs_old_pass(self) -> str | None:
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
        coefficient = getattr(self, name, 0.0)
        if coefficient:
            return f"{name}={coefficient}: the KL in the reward needs these log-probs"
        return None

    @property
    def options_in_rollout(self) -> list[str]:
        """Names of trl-steady's options that shape a rollout as they are set now, or the objective of its updates."""
        needs = marked(type(self), Needs)
        names: list[str] = []
        for name, mark in marked(type(self), InRollout).items():
            needed = list(mark.only_with)
            if name in needs:
                needed += needs[name].names
            if why_disabled(self, *needed) is None:
                names.append(name)
        return names

    @property
    def over_all_sequences(self) -> list[str]:
        """Settings for which sequences of weight 0 count too, such as "beta=0.1"."""
        in_reward = _KL_IN_REWARD.get(self.METHOD)  # no term of the loss
        names = [name for name in self._set_among(_OVER_ALL_SEQUENCES) if name != in_reward]
        return [f"{name}={getattr(self, name)!r}" for name in names]

    @property
    def _over_micro_batches(self) -> list[str]:
        """Names of the options that are set and act over the tokens of a micro-batch."""
        names = self._set_among(_OVER_MICRO_BATCHES)
        if getattr(self, "loss_type", "") == "bnpo":
            names.append("loss_type")
        return names

    def _set_among(self, defaults: Mapping[str, object]) -> list[str]:
        """Return the names of options that this config has, with another value than this default."""
        return [name for name, off in defaults.items() if getattr(self, name, off) != off]

    @property
    def steps_in_backward(self) -> str | None:
        """Name of the optimizer if it takes its steps inside backward, else None."""
        name = getattr(self.optim, "value", self.optim)  # of an enumeration
        if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
            return name
        return None

    # sampling

    @property
    def sampling(self) -> dict[str, Any]:
        """Generation options that are set; `generation_kwargs` override TRL's own options."""
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        if self.use_vllm:
            names.append("vllm_structured_outputs_regex")
        options = {name: getattr(self, name) for name in names}
        # transformers has read JSON
        options.update(cast(dict[str, Any] | None, self.generation_kwargs) or {})
        return {name: value for name, value in options.items() if value is not None}

    @property
    def truncations(self) -> list[str]:
        """Settings that exclude tokens from sampling, such as "top_p=0.9"."""
        settings: list[str] = []
        for name, value in self.sampling.items():
            if name in TRUNCATIONS and TRUNCATIONS[name](value):
                settings.append(f"{name}={value!r}")
        return settings

    @property
    def weightings(self) -> list[str]:
        """Settings that change the probabilities of the kept tokens, such as "repetition_penalty=1.1"."""
        # log-probs are computed with the option, not with the temperature of generation_kwargs
        unweighted = {**WEIGHTINGS, "temperature": self.temperature}
        return [f"{name}={value!r}" for name, value in self.sampling.items() if unweighted.get(name, value) != value]

    @property
    def uncorrected(self) -> list[str]:
        """Settings with which the sampler's log-probs are of another distribution than the policy's."""
        if self.keep_sampling_mask:
            return self.weightings
        return self.truncations + self.weightings

    @property
    def compares_engine(self) -> bool:
        """True if `engine_check` compares a vLLM engine with the policy."""
        return self.use_vllm and bool(self.engine_check) and not self.uncorrected
