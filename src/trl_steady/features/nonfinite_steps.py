"""Leave out optimizer steps whose gradient is not finite."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.types import LossPass, MicroBatch
from trl_steady.trl_bridge.models import whole
from trl_steady.trl_bridge.trl_state import hold_step, set_metric


class NonfiniteSteps(Feature):
    """Leaves out steps whose gradient norm is not finite, with `skip_nonfinite_steps`. All processes decide alike.

    DeepSpeed decides itself, and its steps are counted. Under fp16 the loss scaler leaves a step out, and then halves
    the scale. It begins at 65536, so that several steps in a row are usual. They count toward the limit only if a
    smaller scale cannot help: the loss is not finite, or the scale is 1 already.
    """

    args: SharedOptions

    def on_init_end(self) -> None:
        """Find the limit."""
        self._limit = self.args.skip_nonfinite_steps
        if self._scaler is None and self.trainer.accelerator.mixed_precision == "fp16":  # DeepSpeed has one of its own
            self._limit = None
        self._norms: list[tuple[str, torch.nn.Parameter, Tensor]] = []
        self._held = ExitStack()  # of a step that is left out
        self.on_train_begin()

    def on_train_begin(self) -> None:
        """Begin to count, also in a run that is resumed: what made steps fail may have been mended."""
        self._in_a_row = Counter[str]()
        self._figures: dict[str, Tensor] = {}

    @property
    def _scaler(self) -> GradScaler | None:
        """The loss scaler of the policy; None except under fp16."""
        return self.trainer.accelerator.scaler

    def around_loss(self, loss: LossPass, call_next: Callable[[LossPass], Tensor]) -> Tensor:
        """Add up the loss of a step."""
        result = call_next(loss)
        if self.trainer.model.training:
            self._figures["loss"] = self._figures.get("loss", 0) + result.detach()
        return result

    def on_log_probs(self, batch: MicroBatch) -> None:
        """Keep the largest log-ratio of a step. RLOO has none for tokens."""
        if self.trainer.model.training and self.args.METHOD != "RLOO":
            largest = batch.log_ratio.detach().where(batch.mask, 0).abs().max()
            self._figures["|log-ratio|"] = largest.maximum(self._figures.get("|log-ratio|", largest))

    def on_backward_end(self) -> None:
        """Keep the norm of each gradient: clipping by a norm of NaN makes NaN of all gradients."""
        self._norms = []
        if self._limit is None:
            return
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.grad is not None:
                self._norms.append((name, parameter, parameter.grad.norm()))

    def around_grad_norm(self, model: torch.nn.Module, call_next: Callable[[torch.nn.Module], Any]) -> Any:
        """Read the norm, which transformers then logs, and leave the step out if it is not finite."""
        norm = call_next(model)
        figures = self._figures
        self._figures = {}
        if self._limit is None or norm is None:
            return norm
        if isinstance(norm, Tensor):
            norm = float(whole(norm))
        if self._scaler is not None:  # the device has finished the backward pass
            set_metric(self.trainer, "loss_scale", self._scaler.get_scale())
        norms: list[tuple[str, Tensor]] = []
        for name, parameter, norm_of_gradient in self._norms:
            if parameter.grad is not None:  # a critic's adapter has none by now
                norms.append((name, norm_of_gradient))
        is_admitted = self.judge_step("policy", norm, norms, self._scaler, **figures)
        if not is_admitted and self._scaler is None:
            self._held.enter_context(hold_step(self.trainer))
        return norm

    def on_step_end(self) -> None:
        """Let the optimizer step again."""
        self._held.close()

    def on_step_begin(self) -> None:
        """Let the optimizer step again after a step that raised."""
        self._held.close()

    def judge_step(
        self,
        owner: str,
        norm: Tensor | float,
        named: Iterable[tuple[str, Tensor]],
        scaler: GradScaler | None = None,
        **figures: Tensor,
    ) -> bool:
        """Count a step whose gradient norm is not finite, and print what is not. Return True if the step is taken.

        Waits for the device. Raises a FloatingPointError at the last step in a row that may be left out.

        Args:
            owner: "policy", or the model that has this optimizer.
            norm: Norm of all gradients.
            named: Name -> gradient of each parameter, or its norm.
            scaler: The loss scaler of the optimizer, which has unscaled the gradients; None without one.
            figures: Name -> scalar of this process. The largest of all processes is printed.
        """
        if self._limit is None or math.isfinite(norm):
            self._in_a_row[owner] = 0
            return True
        trainer = self.trainer
        gather = cast(Any, trainer.accelerator).gather
        counts = trainer.logged_values["train"]["steps/nonfinite"]
        counts[:] = [sum(counts) + 1]  # since the last log
        shown: list[str] = []
        is_finite = True  # the forward pass
        for name, figure in figures.items():
            largest = float(gather(figure).max())  # NaN if one of them is
            shown.append(f"{name} {largest:.4g}")
            is_finite = is_finite and math.isfinite(largest)
        # all of them, also beyond the third: `whole` is a collective
        nonfinite = [name for name, gradient in named if not math.isfinite(whole(gradient.norm()))]
        shown += nonfinite[:3]
        what = f"step {trainer.state.global_step + 1} of the {owner}: gradient norm {norm:.4g}, {', '.join(shown)}"
        mend = "Lower learning_rate"
        has_smaller_scale = False
        if scaler is not None and scaler.is_enabled():
            scale = scaler.get_scale()
            lower = scale * scaler.get_backoff_factor()
            what += f"; the loss scale falls from {scale:.10g} to {lower:.10g}"
            mend = "Lower learning_rate, or set bf16=True in place of fp16, whose numbers end at 65504"
            has_smaller_scale = is_finite and scale > 1
        trainer.accelerator.print(f"trl-steady leaves out {what}", flush=True)
        if has_smaller_scale:
            return False
        self._in_a_row[owner] += 1
        if self._in_a_row[owner] < self._limit:
            return False
        saved = trainer.last_checkpoint
        then = "begin again: no complete checkpoint has been saved"
        if saved:
            then = f"resume from the last complete checkpoint: {saved}"
        raise FloatingPointError(
            f"{self._limit} optimizer steps in a row had a NaN or infinite gradient "
            f"(skip_nonfinite_steps={self._limit}). The last is {what}. {mend}, and {then}"
        )
