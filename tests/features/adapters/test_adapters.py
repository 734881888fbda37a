"""The adapter merged on the side: PEFT's own merge, TRL's names, a base whose bytes stay."""

import copy
import types
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import BitsAndBytesConfig
from trl.generation.vllm_generation import VLLMGeneration

from tests.tools import resumable, tiny
from tests.tools.headroom import within
from trl_steady.features.adapters.merging import merged_weights

WIDE = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}  # wide enough for bitsandbytes' blocks
CONFIGS = {
    **tiny.CONFIGS,
    "wide": transformers.Qwen2Config(**{**tiny.SIZES, **WIDE}),  # Qwen2 has biases
    "tied": transformers.Qwen2Config(**{**tiny.SIZES, "tie_word_embeddings": True}),
    "transposed": transformers.GPT2Config(  # Conv1D, and a tied head
        n_embd=16, n_layer=2, n_head=2, vocab_size=tiny.SIZES["vocab_size"], n_positions=32, initializer_range=0.5
    ),
}
ATTENTION = ["q_proj", "k_proj"]
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 32}}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# kind -> the model, and the options of its adapter
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("dense", {"target_modules": ATTENTION}),
    "embedding": ("dense", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "patterns": ("dense", {"target_modules": ATTENTION, **PATTERNS}),
    "bias": ("dense", {"target_modules": ATTENTION, "lora_bias": True}),
    "dora": ("dense", {"target_modules": [*ATTENTION, "embed_tokens"], "use_dora": True}),
    "saved": ("dense", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "mlp"]}),
    "tokens": ("dense", {"target_modules": ATTENTION, "trainable_token_indices": [3, 40]}),
    "experts": ("moe", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "conv1d": ("transposed", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
BASES = {"nf4": NF4, "double": {**NF4, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}


def bare(config: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[config])


def perturb(model: Any, seed: int = 1) -> None:
    """Every trainable parameter away from its initial value, as training would: zeros, and copies of the base."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def adapted(model: Any, options: dict[str, Any], *, ref: bool = False) -> PeftModel:
    """A trained adapter, with `ref` beside an inactive one of the same kind and other values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT's, about tied weights
        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, **copy.deepcopy(options)))
        if ref:
            model.add_adapter("ref", LoraConfig(r=4, lora_alpha=12, **copy.deepcopy(options)))
            model.set_adapter("ref")
            perturb(model, seed=3)
            model.set_adapter("default")
    perturb(model)
    return model


def policy(kind: str, *, ref: bool = False) -> PeftModel:
    config, options = KINDS[kind]
    return adapted(bare(config), options, ref=ref)


def pushed(model: PeftModel) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in merged_weights(model)}


def trl_push(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """TRL's own loop, on as much of an engine as it reads."""
    engine = types.SimpleNamespace(
        model=model,
        _dist=types.SimpleNamespace(gather_params=lambda _: nullcontext(), is_fsdp=False),
        _fix_param_name_to_vllm=partial(VLLMGeneration._fix_param_name_to_vllm, None),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of rounding: what this is about
        yield from VLLMGeneration._iter_named_params(engine)


def logits(model: Any) -> Tensor:
    """In training mode, where bitsandbytes leaves the weights alone; the models have no dropout."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        return model(torch.arange(40, 56).unsqueeze(0)).logits.float()


def engine_logits(model: PeftModel, config: str) -> Tensor:
    """Those of a plain model that was given the pushed weights, by name."""
    engine, weights = bare(config), pushed(model)
    parameters = dict(engine.named_parameters())
    assert [*weights] == [*parameters]
    with torch.no_grad():
        for name, weight in weights.items():
            assert weight.shape == parameters[name].shape and not weight.requires_grad
            parameters[name].copy_(weight)
    return logits(engine)


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    """All that the model stores: parameters, buffers, and bitsandbytes' scales."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            for holder in (module.weight, module.state):
                tensors |= {f"{name}.{type(holder).__name__}.{k}": v for k, v in vars(holder).items()}
    return {name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_pefts_merge_under_trls_names_and_the_model_stays(kind: str) -> None:
    """Beside an inactive adapter of the same kind. An engine with the weights is the policy."""
    model = policy(kind, ref=True)
    before = state(model)
    weights = pushed(model)
    assert resumable.differences(before, state(model)) == []
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())

    expected = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    base = dict(bare(KINDS[kind][0]).named_parameters())
    assert [*weights] == [*expected] == [*base]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-6, atol=1e-6)
    changed = [name for name, weight in weights.items() if not torch.equal(weight, base[name])]
    assert changed and len(changed) < len(base)
    if kind != "tokens":  # which TRL names wrongly
        alone = policy(kind)  # beside `ref`, TRL has a name too many
        assert [*weights] == [name for name, _ in trl_push(alone)]

    of_policy = logits(model)
    torch.testing.assert_close(engine_logits(model, KINDS[kind][0]), of_policy, rtol=1e-4, atol=5e-4)
    with model.disable_adapter():
        assert (logits(model) - of_policy).abs().max() > 0.1


def test_the_active_adapter_is_the_one_that_is_merged() -> None:
    model = policy("saved", ref=True)
    default = pushed(model)
    model.set_adapter("ref")
    torch.testing.assert_close(engine_logits(model, "dense"), logits(model), rtol=1e-4, atol=5e-4)
    assert not torch.equal(pushed(model)["lm_head.weight"], default["lm_head.weight"])


def test_active_adapters_are_merged_together() -> None:
    model = two_active("linear")
    torch.testing.assert_close(engine_logits(model, "dense"), logits(model), rtol=1e-4, atol=5e-4)


def test_activation_checkpointing_by_wrapper_leaves_the_names() -> None:
    model = policy("linear")
    layers = model.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert [*pushed(model)] == [name for name, _ in bare("dense").named_parameters()]
    assert [*pushed(model)] == [name for name, _ in trl_push(model)]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 40]},
    ],
    ids=["lora", "tokens"],
)
def test_tied_weights_that_train_together_are_pushed_once(options: dict[str, Any]) -> None:
    model = adapted(bare("tied"), options)
    torch.testing.assert_close(engine_logits(model, "tied"), logits(model), rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
    ],
    ids=["saved", "apart"],
)
def test_tied_weights_that_part_are_refused(options: dict[str, Any]) -> None:
    model = adapted(bare("tied"), options)
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight are one .*ensure_weight_tying=True"):
        merged_weights(model)


def quantised_policy(folder: Path, base: str, dtype: torch.dtype, **options: Any) -> PeftModel:
    """With a bf16 base, an adapter in bf16 too, as TRL casts it on a quantised base."""
    bare("wide").save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(**{**BASES[base], "bnb_4bit_compute_dtype": dtype}),
        dtype=dtype,
        device_map="cpu",
    )
    model = adapted(model, {"target_modules": ["q_proj", "up_proj"], **options}, ref=True)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("base", BASES)
def test_on_a_quantised_base_it_is_the_dequantised_weight_and_the_delta(tmp_path: Path, base: str) -> None:
    def dequantised(layer: Any) -> Tensor:
        if isinstance(layer, bnb.nn.Linear8bitLt):
            scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
            return layer.weight.data.float() * scales.unsqueeze(1) / 127
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()

    model = quantised_policy(tmp_path, base, torch.bfloat16)
    before = state(model)
    rounded = pushed(model)
    assert resumable.differences(before, state(model)) == []
    assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            a, b = module.lora_A["default"].weight.float(), module.lora_B["default"].weight.float()
            expected = dequantised(module.base_layer) + 12 / 4 * b @ a
        elif isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt) and "base_layer" not in name:
            expected = dequantised(module)
        else:
            continue
        expected = expected.detach()
        off = (rounded[f"{name}.weight"].float() - expected).abs()
        assert within(off, 1e-6 + 1e-5 * expected.abs(), granted=2**-8 * expected.abs())  # half a bfloat16 digit


@pytest.mark.parametrize(
    ("base", "tolerance", "options"),
    [
        ("nf4", 1e-3, {"use_dora": True}),  # on int8, PEFT's DoRA loses the scales on CPU
        ("nf4", 1e-3, {"target_modules": ATTENTION, "lora_bias": True}),  # PEFT's merge forgets the bias's scaling
        ("int8", 0.05, {"target_modules": ATTENTION, "lora_bias": True}),
    ],
    ids=["nf4-dora", "nf4-bias", "int8-bias"],
)
def test_an_engine_with_the_weights_of_a_quantised_base_is_the_policy(
    tmp_path: Path, base: str, tolerance: float, options: dict[str, Any]
) -> None:
    """int8 rounds the activations too, in the policy only."""
    model = quantised_policy(tmp_path, base, torch.float32, **options)
    expected = logits(model)
    distance = (engine_logits(model, "wide") - expected).norm() / expected.norm()
    with model.disable_adapter():
        effect = (logits(model) - expected).norm() / expected.norm()
    assert within(distance, tolerance) and tolerance < 0.1 * effect


def test_no_merged_weight_is_kept_and_what_is_not_merged_is_not_copied() -> None:
    model = policy("linear")
    stored = {parameter.data_ptr() for parameter in model.parameters()}
    last: weakref.ref[Tensor] | None = None
    merged = 0
    weights = merged_weights(model)
    for name, weight in weights:
        assert last is None or last() is None
        if any(target in name for target in ATTENTION) and name.endswith("weight"):
            assert weight.data_ptr() not in stored
            merged, last = merged + 1, weakref.ref(weight)
            assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        else:
            assert weight.data_ptr() in stored
        del weight
    assert merged == 4


def two_active(kind: str) -> PeftModel:
    model = policy(kind, ref=True)
    model.base_model.set_adapter(["default", "ref"])
    return model


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("two", "embed_tokens.weight with DoRA in one of 2 active adapters"),
        ("tuner", "an adapter of IA3Config"),
        ("layer", "conv.weight in a Conv1d"),
        ("variant", "q_proj.weight in a Linear ALoraLinearVariant"),
        ("float8", "down_proj.weight, a Tensor of torch.float8_e4m3fn,"),
        ("subclass", "down_proj.weight, a Sharded of torch.float32,"),
    ],
)
def test_what_cannot_be_merged_on_the_side_is_refused_before_anything_is_pushed(case: str, what: str) -> None:
    class Sharded(Tensor):
        """As torchao's weights and sharded ones are."""

    model = two_active("dora") if case == "two" else policy("linear")
    if case == "tuner":
        model = get_peft_model(bare("dense"), peft.IA3Config(task_type="CAUSAL_LM", feedforward_modules=[]))
    elif case == "layer":
        convolution: Any = torch.nn.Module()
        convolution.conv = torch.nn.Conv1d(4, 4, 3)
        model = adapted(convolution, {"target_modules": ["conv"]})
    elif case == "variant":
        model = adapted(bare("dense"), {"target_modules": ATTENTION, "alora_invocation_tokens": [1]})
    elif case in ("float8", "subclass"):
        layer = model.get_base_model().model.layers[0].mlp.down_proj
        weight = layer.weight.data
        weight = weight.to(torch.float8_e4m3fn) if case == "float8" else weight.as_subclass(Sharded)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=f"{what} cannot be merged .*Use LoRA or DoRA .*use_vllm=False"):
        merged_weights(model)
