"""Saving a PEFT model without one of its adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel

from trl_steady.host.names import overridden

__all__ = ["saved_without"]


@contextmanager
def saved_without(model: PeftModel, adapter: str) -> Iterator[dict[str, Any]]:
    """Keep an adapter out of what the model saves. Gives the state that the model is told to save, if it is told."""
    own, gathered = model.save_pretrained, {}

    def save(*arguments: Any, **options: Any) -> None:
        gathered.update(options.get("state_dict") or {})
        selected = options.pop("selected_adapters", None) or [*model.peft_config]
        own(*arguments, selected_adapters=[name for name in selected if name != adapter], **options)

    with overridden(model, {"save_pretrained": save}):
        yield gathered
