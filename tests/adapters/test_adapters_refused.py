"""What cannot be merged on the side is refused by name, before anything is pushed."""

from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor

from tests.adapters.test_adapters import ATTENTION, adapted, bare, policy
from trl_steady.adapters.merging import merged_weights


class _Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3)


def _meta(_: Path) -> PeftModel:
    model = policy("linear")
    model.get_base_model().lm_head.to("meta")
    return model


def _quantised_otherwise(_: Path) -> PeftModel:
    model = policy("linear")
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def _of_a_subclass(_: Path) -> PeftModel:
    """As torchao's weights and sharded ones are."""

    class Sharded(Tensor):
        pass

    model = policy("linear")
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Sharded), requires_grad=False)
    return model


REFUSED = {
    "tuner": (
        lambda _: get_peft_model(bare("dense"), peft.IA3Config(task_type="CAUSAL_LM", feedforward_modules=[])),
        r"an adapter of IA3Config cannot be merged into a copy of the weights. Use LoRA or DoRA, or .*use_vllm=False",
    ),
    "layer": (
        lambda _: adapted(_Convolution(), {"target_modules": ["conv"]}),
        r"conv.weight is in a peft.tuners.lora.layer.Conv1d, which .* Use LoRA or DoRA on .*use_vllm=False",
    ),
    "variant": (
        lambda _: adapted(bare("dense"), {"target_modules": ATTENTION, "alora_invocation_tokens": [1]}),
        r"q_proj.weight .*lora.layer.Linear with ALoraLinearVariant, which .*Use LoRA or DoRA on",
    ),
    "meta": (_meta, r"lm_head.weight cannot be read .*: it is a Tensor of torch.float32 on meta, in a Linear"),
    "float8": (_quantised_otherwise, r"down_proj.weight cannot be .*Tensor of torch.float8_e4m3fn.*bitsandbytes or"),
    "subclass": (_of_a_subclass, r"down_proj.weight cannot be .*Sharded of torch.float32.*not sharded"),
}


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_on_the_side_is_refused_before_anything_is_pushed(wide: Path, case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        next(merged_weights(build(wide)))
