"""Options that all trainers have, and what a config says of them. Each option is documented here, and nowhere else."""

import inspect
import sys
import textwrap
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import transformers
import trl

from trl_steady.config.checks import reweights, truncates
from trl_steady.host import Steady

if TYPE_CHECKING:
    _Trls = trl.GRPOConfig
else:
    _Trls = object

__all__ = ["SharedOptions", "documented", "option"]

_C = TypeVar("_C", bound=type)


def option(default: Any, text: str) -> Any:
    """Return a field of a config with a default and with the text that documents it."""
    return field(default=default, metadata={"help": text})


def documented(kind: _C) -> _C:
    """Put the texts of our options into a config's docstring, in place of "{options}"."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("trl_steady.")]
    names = {name for base in ours for name in inspect.get_annotations(base)}
    wrapper = textwrap.TextWrapper(115, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    texts = [wrapper.fill(f"{own.name}: {own.metadata['help']}") for own in fields(kind) if own.name in names]
    kind.__doc__ = (kind.__doc__ or "").replace("        {options}", "\n".join(texts))
    return kind


@dataclass
class SharedOptions(_Trls):
    """Options of every trainer of trl-steady, in addition to those of TRL's config."""

    METHOD: ClassVar[str]
    """"GRPO", for example: the config and the trainer are named after it."""
    ref_model_sync_kl: float | None = option(
        None,
        "With `sync_ref_model`, also move the reference when the KL of an update exceeds this many nats per "
        "token. The KL is the logged one, so it depends on `kl_estimator`. None: move it by steps only.",
    )
    ref_model_sync_reset_optimizer: bool = option(
        False,
        "With `sync_ref_model`, clear the optimizer's state each time the reference moves (ProRL, arXiv 2505.24864).",
    )
    trim_padding: bool = option(
        True,
        "Compute only the tokens of a batch, not its padding, in every pass of the policy and the reference. "
        "Columns that are padding in every row are cut off. If padding is left, sequences are packed. Results "
        "change within float rounding. False: keep the padding, as in TRL.",
    )
    token_budget: int | None = option(
        None,
        "Maximum number of tokens in a micro-batch of the policy. Micro-batches are filled with sequences of the "
        "optimizer step up to this number. A longer sequence is a micro-batch of its own. None: TRL's "
        "micro-batches of `per_device_train_batch_size` sequences.",
    )
    share_prompts: bool = option(False, "Compute a prompt once for all of its completions in the same forward pass.")
    router_replay: str | None = option(
        None,
        'For mixtures of experts. `"R2"`: all updates use the experts that were chosen when the old log-probs of '
        'the rollout were computed. `"R3"`: the old log-probs and the updates use the experts that were chosen '
        "while the rollout was generated. None: each pass chooses its experts, as in TRL.",
    )
    router_replay_reference: bool = option(
        False, "With `router_replay`, the reference's pass uses the same experts too."
    )
    keep_sampling_mask: bool = option(
        False,
        "If `top_p`, `top_k` or `min_p` exclude tokens from sampling, normalise log-probs over the tokens that "
        'were kept, under policy, old policy and reference (DeepSeek-V3.2, section 3.1, "Keep Sampling Mask"). '
        "False: normalise over the whole vocabulary, as in TRL.",
    )
    adapter_dtype: str | None = option(
        None,
        '`"float32"` keeps the adapters of a quantised base in float32. TRL makes them bf16, in which steps with '
        "a small learning rate round away. None: as in TRL.",
    )
    vllm_adapter_sync: bool | None = option(
        None,
        "With `use_vllm` and LoRA, send vLLM the adapter alone, which it serves beside its own copy of the base. "
        "True: require that. False: send all weights with the adapter merged. None: send the adapter if its "
        "configuration is one that vLLM serves, and otherwise merged weights, with a warning.",
    )
    engine_check: float | None = option(
        1.0,
        "Largest mean k3, in nats per token, between trainer and vLLM (or a `rollout_func`) in the first rollout of "
        "a run and in the first after a resume. Above it, the engine serves another model than the policy, and the "
        "run ends with an error. None: no check.",
    )

    def get_process_log_level(self) -> int:
        """Return the log level, as transformers does.

        Raises:
            ValueError: The caller is a trainer that is not trl-steady's and would ignore trl-steady's options.
        """
        # transformers.Trainer.__init__ calls this method, so TRL needs no patch. A script may call it too.
        self._refuse_trainer(sys._getframe(1).f_locals.get("self"))
        return super().get_process_log_level()

    if not TYPE_CHECKING:  # pyright would take any name

        def __getattr__(self, name: str) -> Any:
            # a trainer of another method reads its own options before it calls the method above
            self._refuse_trainer(sys._getframe(1).f_locals.get("self"))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _refuse_trainer(self, caller: Any) -> None:
        if isinstance(caller, transformers.Trainer) and not isinstance(caller, Steady):
            name = f"{type(caller).__module__}.{type(caller).__qualname__}"
            own = f"{self.METHOD}Config"
            raise ValueError(
                f"{name} got a trl_steady.{own} and would ignore trl-steady's options. For {self.METHOD}, import the "
                f"trainer from trl_steady too: from trl_steady import {own}, {self.METHOD}Trainer. Give any other "
                "trainer its own config."
            )

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with a reference."""
        return self.beta != 0

    @property
    def steps_in_backward(self) -> str | None:
        """Name of the optimizer if it takes its steps inside backward, else None."""
        name = getattr(self.optim, "value", self.optim)  # of an enumeration
        return name if name in ("lomo", "adalomo") or name.endswith("_layerwise") else None

    @property
    def idle_without_engine(self) -> list[str]:
        """Warnings about options that have no effect when the policy itself samples, each with a fix."""
        return []

    @property
    def sampling(self) -> dict[str, Any]:
        """Generation options that are set; `generation_kwargs` override TRL's own options."""
        assert not isinstance(self.generation_kwargs, str)  # parsed by transformers.TrainingArguments
        own = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        own += ["vllm_structured_outputs_regex"] if self.use_vllm else []
        options = {**{name: getattr(self, name) for name in own}, **(self.generation_kwargs or {})}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def truncations(self) -> list[str]:
        """Settings that exclude tokens from sampling, such as "top_p=0.9"."""
        return [f"{name}={value!r}" for name, value in self.sampling.items() if truncates(name, value)]

    @property
    def weightings(self) -> list[str]:
        """Settings that change the probabilities of the kept tokens, such as "repetition_penalty=1.1"."""
        weights = {name: value for name, value in self.sampling.items() if reweights(name, value)}
        if self.sampling["temperature"] != self.temperature:  # log-probs are computed with the latter
            weights["temperature"] = self.sampling["temperature"]
        return [f"{name}={value!r}" for name, value in weights.items()]

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
    def way_off_policy(self) -> str:
        """Advice for an on-policy config: the settings with which a rollout feeds several updates."""
        assert self.steps_per_generation is not None  # filled in by trl.GRPOConfig
        accumulation = self.gradient_accumulation_steps
        batch = 4 * accumulation * self.per_device_train_batch_size * self.world_size
        return (
            f"Set steps_per_generation={4 * accumulation} (or generation_batch_size={batch}, if you set that instead) "
            "for four updates per rollout as in the GSPO paper, or "
            f"num_iterations={accumulation // self.steps_per_generation + 1} or more."
        )
