"""Mixtures of experts that read images: the routers of their text are found, or the model is refused by name."""

import inspect
import re
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

from tests.tools import families
from trl_steady.features.router_replay.replay import Routers

pytestmark = pytest.mark.skipif(not families.IS_TOLD, reason="the families are those of newer transformers")

FOUND = {
    **dict.fromkeys(
        (
            *("aria", "glm4v_moe", "glm5_next", "hy_v4_vl", "inkling2", "inkling_mm_model", "minimax_m3_vl"),
            *("mistral_large4", "muse_spark", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "step3p7"),
            "unlimited_ocr",
        ),
        "language_model.layers",
    ),
    "llama4": "language_model.model.layers",
    "mistral4": "layers",
}
"""The stack of layers in which each family has all its routers, one in a layer."""
IN_TWO_STACKS = ("dots3_note", "ernie4_5_vl_moe")
"""Refused in their first pass, in which the routers for images see other tokens than those for text."""
LOOPED = ("inkling2_loop",)
"""Refused in their first pass, in which routers run more than once, as those of their text in `test_families`."""
WITHOUT = ("gemma4", "granite_docling")
"""With experts by option only."""
UNBUILT = ("deepseek_ocr2", "diffusion_gemma", "qwen4_exp")
"""Their configs have no defaults."""


def kind(family: str) -> Any:
    name = NAMES[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def on_meta(family: str) -> Any:
    """As large as its config is by default, without weights."""
    with torch.device("meta"):
        return kind(family)(kind(family).config_class())


@pytest.mark.slow
def test_the_tables_are_of_all_families_with_images() -> None:
    mixed = {
        family
        for family in NAMES
        if re.search(r"class \w*(Experts|Router|MoE)\b", inspect.getsource(sys.modules[kind(family).__module__]))
    }
    assert mixed == {*FOUND, *IN_TWO_STACKS, *LOOPED, *WITHOUT, *UNBUILT}


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("family", FOUND)
def test_routers_of_the_text_are_found_one_in_a_layer(family: str) -> None:
    routers = Routers(on_meta(family))
    assert {re.split(r"\.\d+\.", name.removeprefix("model."))[0] for name in routers.names} == {FOUND[family]}
    assert len(set(routers.decoder_layers)) == len(routers.names)


def test_routers_of_other_stacks_are_found_too_and_none_is_refused() -> None:
    for family in IN_TWO_STACKS:
        routers = Routers(on_meta(family))
        assert len(set(routers.decoder_layers)) < len(routers.names)
    for family in WITHOUT:
        with pytest.raises(ValueError, match="has no routers"):
            Routers(on_meta(family))
