"""The KL reference and its refreshes: it is created, saved, restored and kept out of what is saved as the policy.

`callback.py` decides when the reference moves, and `tensors.py` moves it. With PEFT, `adapter.py` makes it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.types import Construction, ForwardPass, LogProbs, Rollout
from trl_steady.features.adapters.base_model import BaseModel
from trl_steady.features.reference.adapter import (
    add_reference_adapter,
    end_dropout,
    refuse_several,
    refuse_unsupported_adapters,
)
from trl_steady.features.reference.callback import FILE, ReferenceRefreshCallback, Refresh
from trl_steady.functional import kl
from trl_steady.trl_bridge.log_probs import policy_log_probs
from trl_steady.trl_bridge.models import (
    POLICY_ADAPTER,
    REFERENCE_ADAPTER,
    drop_adapter,
    is_fsdp_asked,
    keep_base,
    keep_dtypes_and_trainability,
    save_only,
)


class Reference(Feature):
    """Refreshes the KL reference with `sync_ref_model`, also with PEFT, on quantised bases and across resumes."""

    args: SharedOptions
    callback: ReferenceRefreshCallback | None = None
    """Refreshes the reference; None if it stays as it is."""
    _manages_reference = False
    """True if this feature moves the reference, or has added its adapter. It is not saved as a part of the policy."""
    _logps: Tensor
    """(B, T) of the last pass of the reference."""

    @property
    def refreshes(self) -> list[Refresh]:
        """The refreshes of the reference so far, including those before a resume."""
        if self.callback is None:
            return []
        return self.callback.refreshes

    def around_init(self, construction: Construction, call_next: Callable[[Construction], None]) -> None:
        """Refuse adapters that cannot be followed, and hide `sync_ref_model` from TRL's constructor.

        TRL refuses it with PEFT, and adds a callback of its own without PEFT.
        """
        model = construction.model
        config = None
        if isinstance(model, PeftModel):
            config = model.peft_config.get(POLICY_ADAPTER)
            if self.args.sync_ref_model:
                refuse_unsupported_adapters(model)
            if self.args.has_reference:
                refuse_several(model)  # TRL would copy one of several adapters, and let that one alone act
                drop_adapter(model, REFERENCE_ADAPTER)  # the reference of a new run is the policy at its start
        construction.seen_by_trl["sync_ref_model"] = False
        if self.args.has_reference and is_fsdp_asked():
            # TRL asks for one process on several GPUs there, which spreads the reference over all that it sees
            given = self.args.model_init_kwargs or {}
            assert not isinstance(given, str)  # parsed by transformers.TrainingArguments
            construction.seen_by_trl["model_init_kwargs"] = {"device_map": None, **given}
        with keep_base(config):  # TRL's constructor adds another adapter of this configuration
            call_next(construction)

    def on_init_end(self) -> None:
        """Create the reference, and the callback that refreshes it."""
        trainer, model, args = self.trainer, self.trainer.model, self.args
        if args.has_reference and isinstance(model, PeftModel):
            self._match_policy(model)
        if args.sync_ref_model:
            self._manages_reference = True
            trl_trainer = cast(Any, trainer)  # the callback is annotated for TRL's own trainers
            self.callback = ReferenceRefreshCallback(
                trl_trainer,
                steps=args.ref_model_sync_steps,
                alpha=args.ref_model_mixup_alpha,
                kl=args.ref_model_sync_kl,
                reset_optimizer=args.ref_model_sync_reset_optimizer,
            )
            trl_trainer.add_callback(self.callback)

    def _match_policy(self, model: PeftModel) -> None:
        """Make the reference the policy as it was given, if what TRL's constructor has made is another model."""
        if REFERENCE_ADAPTER in model.peft_config:
            end_dropout(model)
            for name, policy in model.named_parameters():  # TRL copies names with ".default." in the middle only
                if name.endswith(f".{POLICY_ADAPTER}"):
                    reference = model.get_parameter(f"{name.removesuffix(POLICY_ADAPTER)}{REFERENCE_ADAPTER}")
                    reference.data.copy_(policy.data)
        elif BaseModel(model).changing_init is not None:
            add_reference_adapter(model)  # without its adapter, the base is not the model that was given
            self._manages_reference = True

    def around_rollout(self, rollout: Rollout, call_next: Callable[[Rollout], dict[str, Any]]) -> dict[str, Any]:
        """Keep which parameters are trainable. TRL switches to the reference's adapter and back."""
        if not self._manages_reference:
            return call_next(rollout)
        with keep_dtypes_and_trainability(self.trainer.model):
            return call_next(rollout)

    def around_forward(self, forward: ForwardPass, call_next: Callable[[ForwardPass], LogProbs]) -> LogProbs:
        """Keep the reference's log-probs of a rollout, which RLOO's samples lack."""
        log_probs = call_next(forward)
        if forward.role == "reference":
            self._logps = log_probs[0]
        return log_probs

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Measure the KL that `ref_model_sync_kl` limits, if dropout makes the logged KL noisy."""
        trainer = self.trainer
        if self.callback and self.callback.metric != "kl" and trainer.model.training:
            values = kl.k3(policy_log_probs(trainer, rollout), self._logps)
            trainer.metrics.token_mean(self.callback.metric, values, rollout.is_sampled)

    def around_save_model(self, folder: Path | None, call_next: Callable[[Path | None], None]) -> None:
        """Save a plain PEFT or transformers model, without the reference."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if not (self._manages_reference and isinstance(model, PeftModel)):
            return call_next(folder)
        with save_only(model, POLICY_ADAPTER):
            call_next(folder)

    def save_state(self, checkpoint: Path) -> None:
        """Save the reference and its counters."""
        if self.callback:
            self.callback.save(checkpoint)

    def load_state(self, checkpoint: Path) -> None:
        """Load the reference and its counters, or raise a ValueError if this run would drop its refreshes."""
        if self.callback:
            self.callback.load(checkpoint)
        elif (checkpoint / FILE.name).is_file():
            raise ValueError(
                f"{checkpoint} holds a refreshed reference ({FILE.name}), and sync_ref_model=False would go back to "
                "the initial one. Set sync_ref_model=True as in the run that wrote it."
            )
