"""Models that select tokens or count columns give a sequence the same log-probs in a rollout and in a micro-batch."""

import inspect
import textwrap
import types
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from trl.trainer.utils import add_fused_lm_head

from tests.features.padding_free import passes
from tests.tools import families, tiny
from tests.tools.headroom import within
from trl_steady.features.padding_free.support import find_support

TEXT = {name: f"{name}_text" for name in ("glm5_next", "mistral_large4")}
# This one selects padding too. With "eager", states of padding depend on all columns from the first layer on.
EAGER = {"minimax_m3_vl_text"}

TOWER = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "text_hidden_size", "projection_hidden_dim", "out_hidden_size"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    "image_size": 28,
    "patch_size": 14,
}
OF_TEXT: dict[str, dict[str, Any]] = {
    "glm5_next": {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 2},
    "hunyuan_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}},
    "inkling2": {"log_scaling_n_floor": 4},
}


def _with_tower(name: str, text: str, **changed: Any) -> PretrainedConfig:
    kind: Any = CONFIG_MAPPING[name]
    tower = kind().vision_config
    return kind(
        text_config=families.config(text, **OF_TEXT.get(name, {}), **changed),
        vision_config=type(tower)(**{field: size for field, size in TOWER.items() if hasattr(tower, field)}),
        **{field: 1 for field in ("image_token_id", "image_token_index") if hasattr(kind, field)},
    )


def _build(name: str, text: str | None = None, **changed: Any) -> PreTrainedModel:
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    config = families.config(name, **changed) if text is None else _with_tower(name, text, **changed)
    model = families.build(name, own=config, **({"attn_implementation": "eager"} if name in EAGER else {}))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("name", "sizes", "width"),
    [
        *(
            (name, {"index_topk": 5}, 5)
            for name in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
        ),
        ("deepseek_v4", {"index_topk": 2}, 8),  # of 4 columns each
        ("minimax_m3_vl_text", {"index_topk_blocks": 2}, 4),  # of 2 columns each
        ("glm5_next", {"index_topk": 4}, 4),
        ("mistral_large4", {"index_topk": 5}, 5),
    ],
)
def test_a_selection_is_the_same_in_a_rollout_and_in_a_micro_batch(
    name: str, sizes: dict[str, int], width: int
) -> None:
    """Sizes of the selection, and the columns that it covers. Indexers have two heads: many tokens score exactly 0."""
    model, batch = _build(name, TEXT.get(name), **sizes), passes.make_batch()
    of = find_support(model)
    old = passes.without_padding(model, of, batch)[0].log_probs
    of_all = passes.compute(_build(name, TEXT.get(name)), model, batch).log_probs
    assert not within(passes.difference(old, of_all, of_all.abs().max().item()), 1000 * passes.OUTPUTS), (
        "all tokens are selected"
    )
    parts = [{field: values[rows] for field, values in batch.items()} for rows in (slice(2), slice(2, 4))]
    computed = [passes.without_padding(model, of, part)[0] for part in parts]
    for of_part, part in zip(computed, parts, strict=True):
        passes.assert_same(of_part, passes.compute(model, model, part))
    log_probs = torch.cat([of_part.log_probs for of_part in computed])
    assert within(passes.difference(log_probs, old, old.abs().max().item()), passes.OUTPUTS)
    assert of.width_limit == width


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("llava", "llama", "cut"),
        ("inkling2", "inkling2_text", "cut right"),
        ("mistral_large4", "mistral_large4_text", "cut right"),
        ("hunyuan_vl", "hunyuan_vl_text", "cut right"),
    ],
)
def test_a_tower_does_not_decide_how_its_text_is_cut(name: str, text: str, kind: str) -> None:
    model, batch = _build(name, text), passes.make_batch()
    computed, shape = passes.without_padding(model, find_support(model), batch)
    passes.assert_same(computed, passes.compute(model, model, batch))
    assert shape == passes.expected_shape(kind, batch)


@pytest.mark.parametrize(
    ("name", "changed", "width"),
    [
        ("llama", {"rope_parameters": {"type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 64),
        (
            "phi3",
            {
                "rope_parameters": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                "original_max_position_embeddings": 16,
            },
            16,
        ),
    ],
)
def test_rotary_frequencies_of_the_width_limit_it(name: str, changed: dict[str, Any], width: int) -> None:
    assert find_support(_build(name, **changed)).width_limit == width


@pytest.mark.parametrize("kind", ["from a string", "no function"])
def test_columns_stay_for_a_forward_without_a_source(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, scope = Qwen2Attention.forward, {**vars(modeling_qwen2)}

    class NoFunction:
        __module__ = Qwen2Attention.__module__

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            return forward(*arguments, **keywords)

    exec(textwrap.dedent(inspect.getsource(forward)), scope)
    replaced = scope["forward"] if kind == "from a string" else NoFunction()
    model = transformers.AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])
    assert find_support(model).is_shift_invariant
    monkeypatch.setattr(Qwen2Attention, "forward", replaced)
    assert not find_support(model).is_shift_invariant


def test_columns_stay_for_a_forward_that_a_script_has_set_on_a_layer() -> None:
    attention = (
        (model := transformers.AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])).model.layers[1].self_attn
    )
    add_hook_to_module(attention, ModelHook())  # as accelerate does for a device map
    assert find_support(model).is_shift_invariant
    attention.forward = types.MethodType(HunYuanDenseV1Attention.forward, attention)
    assert not find_support(model).is_shift_invariant
