"""Load a whole model as transformers has saved it: under other names, with its experts apart, or transposed.

`save_pretrained` writes many models in the form of their first release, and `from_pretrained` converts that. The
trainer of transformers loads a checkpoint without a conversion. This file knows how `from_pretrained` does it.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import transformers.trainer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from trl_steady.core.feature import Trainer
from trl_steady.trl_bridge.models import assign
from trl_steady.trl_bridge.patching import patched


def load_as_saved(trainer: Trainer) -> AbstractContextManager[None]:
    """Let transformers' trainer load what `save_pretrained` writes for the model.

    FSDP and DeepSpeed save and load the model's own names.
    """
    model = trainer.model
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
        return nullcontext()
    conversions = _conversions(model)
    if not conversions:
        return nullcontext()
    return _converted(model, conversions)


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions that `save_pretrained` undoes: those with which the model was loaded, if it was."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return conversions


@contextmanager
def _converted(model: PreTrainedModel, conversions: list[Any]) -> Generator[None]:
    def load(saved: Mapping[str, Tensor], *_: object, **__: object) -> _IncompatibleKeys:
        # the function that loads replaces the conversions by those that it has used
        with patched(model, {"_weight_conversions": conversions}):
            return _load(model, saved, conversions)

    load_other_shards = transformers.trainer.load_sharded_checkpoint

    def load_shards(loaded: Any, folder: str, *arguments: Any, **keywords: Any) -> Any:
        index = Path(folder, SAFE_WEIGHTS_INDEX_NAME)
        if loaded is not model or not index.is_file():
            return load_other_shards(loaded, folder, *arguments, **keywords)
        saved: dict[str, Tensor] = {}  # a conversion may need tensors of several files
        for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
            saved |= load_file(index.with_name(name))
        return load(saved)

    with (
        patched(model, {"load_state_dict": load}),
        patched(transformers.trainer, {"load_sharded_checkpoint": load_shards}),
    ):
        yield


def _load(model: PreTrainedModel, saved: Mapping[str, Tensor], conversions: list[Any]) -> _IncompatibleKeys:
    """Convert saved tensors, and copy them into the model's. `from_pretrained` would make new parameters."""
    tensors = model.state_dict()
    make_parameter: Callable[..., None] = core_model_loading.set_param_for_module

    def fill(module: PreTrainedModel, name: str, values: Tensor, info: Any, *others: Any) -> None:
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):  # a module's own state
            return make_parameter(module, name, values, info, *others)
        if tensor.shape != values.shape:
            raise ValueError(
                f"the checkpoint holds {name} of shape {tuple(values.shape)}, and the model's is "
                f"{tuple(tensor.shape)}. Give the trainer the model that the run had."
            )
        assign(tensor, values)
        info.missing_keys.discard(name)

    settings = LoadStateDictConfig(weight_mapping=conversions)
    with patched(core_model_loading, {"set_param_for_module": fill, "tqdm": _without_bar}):
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, dict(saved), settings)
    return _IncompatibleKeys(sorted(info.missing_keys), sorted(info.unexpected_keys))


def _without_bar(items: Iterable[Any], **_: object) -> Iterable[Any]:
    return items  # each process would show a bar
