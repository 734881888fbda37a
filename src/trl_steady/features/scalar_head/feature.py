"""The base of the critic and the reward model: a feature with a model that has a scalar head."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, cast

from accelerate.utils import broadcast
from peft import PeftModel
from torch import Tensor

from trl_steady.config.shared import SharedOptions
from trl_steady.core.feature import Feature
from trl_steady.core.tensor_file import TensorFile
from trl_steady.features.adapters.saved import refuse_other_settings
from trl_steady.features.scalar_head.model import ScalarHeadModel
from trl_steady.features.scalar_head.saved import model_settings, save_pretrained, state_from_policy
from trl_steady.trl_bridge.models import save_without


class ScalarHeadFeature(Feature):
    """Saves a model with a scalar head beside the policy and in checkpoints, and restores it."""

    FILE: ClassVar[TensorFile]
    FOLDER: ClassVar[str]
    """Folder beside a saved policy, and the name of the adapter if the model shares the policy's base."""
    args: SharedOptions
    model: ScalarHeadModel | None = None

    @property
    def batch_size(self) -> int:
        """Number of sequences that go through the model together in a rollout."""
        if self.trainer.model.training:
            return self.args.per_device_train_batch_size
        return self.args.per_device_eval_batch_size

    def adopt(self, model: ScalarHeadModel) -> None:
        """Take a model, the same on all processes, that neither the policy's optimizer nor DDP trains."""
        self.model = model
        device = self.trainer.accelerator.device  # DeepSpeed moves the policy there later, and never the head
        if not self.trainer.is_fsdp_enabled:
            model.head.to(device)
        for parameter in model.parameters:
            parameter.requires_grad_(False)
            if not self.trainer.is_fsdp_enabled:  # NCCL sends no tensor of the CPU
                sent = cast(Tensor, broadcast(parameter.data.to(device)))
                parameter.data = sent.to(parameter.device)

    def around_save_model(self, folder: Path | None, call_next: Callable[[Path | None], None]) -> None:
        """Save the policy without the model, and the model beside it."""
        model = self.model
        if model is None:
            return call_next(folder)
        without_model: AbstractContextManager[Mapping[str, Tensor]] = contextlib.nullcontext({})
        if isinstance(model.backbone, PeftModel):
            without_model = save_without(model.backbone, self.FOLDER)
        with without_model as policy_state:
            call_next(folder)
        if folder is not None and self.args.should_save:
            state = None
            if self.trainer.is_fsdp_enabled:  # this one process cannot gather shards
                state = state_from_policy(model, policy_state)
            save_pretrained(model, folder / self.FOLDER, state)

    def save_state(self, checkpoint: Path) -> None:
        """Save the model."""
        if self.model is None:
            return
        if self.args.should_save:
            self.FILE.save(checkpoint, self.model.state(), adapter=model_settings(self.model))
        elif self.trainer.is_fsdp_enabled:  # all processes gather shards
            self.model.state()

    def load_state(self, checkpoint: Path) -> None:
        """Load the model. Raises ValueError if the checkpoint has none, or another one."""
        if self.model is not None:
            self._restore(self.model, checkpoint)

    def _restore(self, model: ScalarHeadModel, checkpoint: Path) -> None:
        tensors, metadata = self.FILE.load(checkpoint)
        model.load(tensors, str(checkpoint / self.FILE.name))
        settings = model_settings(model)
        refuse_other_settings(metadata.get("adapter", settings), settings, checkpoint / self.FILE.name)

    def on_train_end(self, best: Path | None) -> None:
        """Load the model that belongs to the best policy."""
        if self.model is None or best is None:
            return
        if (best / self.FILE.name).is_file():
            self._restore(self.model, best)
            return
        content = self.FILE.content
        self.warn(
            f"load_best_model_at_end=True has loaded the policy of {best}, which has no {content}. The trainer keeps "
            f"the {content} of the last step. Set save_only_model=False to save it too."
        )
