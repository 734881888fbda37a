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
from trl_steady.routing.replay import Routers

IS_TOLD = transformers.__version__.startswith("5.23.")

FOUND = {
    "aria": "language_model.layers",
    "glm4v_moe": "language_model.layers",
    "glm5_next": "language_model.layers",
    "inkling2": "language_model.layers",
    "inkling_mm_model": "language_model.layers",
    "llama4": "language_model.model.layers",
    "minimax_m3_vl": "language_model.layers",
    "mistral4": "layers",
    "mistral_large4": "language_model.layers",
    "muse_spark": "language_model.layers",
    "qwen3_5_moe": "language_model.layers",
    "qwen3_omni_moe_thinker": "language_model.layers",
    "qwen3_vl_moe": "language_model.layers",
    "qwen4_exp": "language_model.layers",
    "step3p7": "language_model.layers",
    "unlimited_ocr": "language_model.layers",
}
"""The stack of layers in which each family has all its routers, one in a layer."""
REFUSED = {
    "dots3_note": r"\.vision_tower\.blocks.*do not see the same tokens",
    "ernie4_5_vl_moe": r"text_moe\.gate and .*vision_moe\.gate.*do not see the same tokens",
    "gemma4": "has no routers",  # but with an option
    "granite_docling": "has no routers",
}
UNBUILT = {
    "deepseek_ocr2": "its config has no defaults",
    "diffusion_gemma": "its config has no defaults, and it generates by diffusion",
}
"""Those that are small in their text's and their tower's sizes alone."""


def kind(family: str) -> Any:
    name = NAMES[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def text(family: str) -> dict[str, Any]:
    """Tiny sizes of the text's config."""
    config = kind(family).config_class.sub_configs["text_config"]
    if config.model_type in families.names():
        return families.config(config.model_type).to_dict()
    known = config().to_dict()
    return {field: size for field, size in families._SIZES.items() if field in known}


def on_meta(family: str) -> Any:
    """As large as its config is by default, without weights."""
    of_text = {"text_config": text(family)} if family == "qwen4_exp" else {}  # without defaults
    with torch.device("meta"):
        return kind(family)(kind(family).config_class(**of_text))


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
def test_the_tables_are_of_all_families_with_images() -> None:
    mixed = {
        family
        for family in NAMES
        if re.search(r"class \w*(Experts|Router|MoE)\b", inspect.getsource(sys.modules[kind(family).__module__]))
    }
    assert mixed == FOUND.keys() | REFUSED.keys() | UNBUILT.keys()


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
@pytest.mark.parametrize("family", FOUND)
def test_routers_of_the_text_are_found_one_in_a_layer(family: str) -> None:
    routers = Routers(on_meta(family))
    assert {re.split(r"\.\d+\.", name.removeprefix("model."))[0] for name in routers.names} == {FOUND[family]}
    assert len(set(routers.decoder_layers)) == len(routers.names)


@pytest.mark.skipif(not IS_TOLD, reason="the families are those of transformers 5.23")
@pytest.mark.parametrize("family", REFUSED)
def test_what_routes_text_and_images_apart_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[family]):
        Routers(on_meta(family))
