"""An engine that is sent adapters has the policy's adapter at each rollout, or merged weights, or is refused."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.features.adapters import tools
from tests.features.adapters.tools import LLM, ROUNDING, differences, load
from tests.features.reference.tools import base_tensors
from tests.tools import tiny
from tests.tools import wide as wide_model
from trl_steady.features.adapters import vllm_sync as serving

built = tools.built


@pytest.mark.fast_rows(1)
@pytest.mark.supports("quantised base", "adapter_dtype", on="vLLM colocate", only="stand-in")
@pytest.mark.supports("moving reference, quantised base", on="vLLM colocate", only="stand-in")
@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_the_engine_has_the_policys_adapter_at_each_rollout(
    wide: Path, built: Callable[..., tuple[Any, LLM]], base: str
) -> None:
    model, moving = wide, {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4}
    if base == "nf4":
        model, moving = load(wide, "bitsandbytes"), {**moving, "adapter_dtype": "float32"}
    trainer, llm = built(model, **moving, max_steps=12)
    assert llm.asked["enable_lora"] and llm.asked["max_lora_rank"] == 8
    assert llm.asked["quantization"] == (None if base == "float32" else "bitsandbytes")
    before = [value.clone() for value in base_tensors(trainer.model)]
    found = differences(trainer)
    assert len(found) == 3 and max(found) < ROUNDING
    assert len(llm.adapters) == 4  # one while the engine is built
    assert llm.answered == llm.adapters[1:] and not llm.weights
    assert len({(request.name, request.number, request.path) for request in llm.adapters}) == 4
    assert [Path(request.path).exists() for request in llm.adapters] == [False, False, False, True]
    assert all(torch.equal(*pair) for pair in zip(base_tensors(trainer.model), before, strict=True))


def test_an_engine_that_sleeps_keeps_its_base(built: Callable[..., tuple[Any, LLM]]) -> None:
    trainer, llm = built(vllm_enable_sleep_mode=True, max_steps=8)
    assert max(differences(trainer)) < ROUNDING
    assert set(llm.slept) == {1} and len(llm.slept) == 3


def test_calls_of_vllms_own_methods_are_answered_with_the_adapter(built: Callable[..., tuple[Any, LLM]]) -> None:
    """A `rollout_func` of TRL may call `trainer.vllm_generation.llm`."""
    trainer, llm = built(max_steps=4)
    prompts = [{"prompt_token_ids": [1, 2, 3]}]
    trainer.vllm_generation.llm.generate(prompts, None, use_tqdm=False)
    assert llm.answered == llm.adapters
    trainer.vllm_generation.llm.generate(prompts, None, use_tqdm=False, lora_request=None)
    assert llm.answered[1:] == [None]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("sync", [None, False], ids=["adapter", "merged"])
def test_a_second_training_begins_with_the_policy_of_the_first(
    built: Callable[..., tuple[Any, LLM]], sync: bool | None
) -> None:
    """Its first step has the number of the step in which TRL has sent the policy last."""
    trainer, llm = built(max_steps=4, vllm_adapter_sync=sync)
    assert ("enable_lora" in llm.asked) == (sync is None)
    assert len(found := differences(trainer)) == 1 and max(found) < ROUNDING
    assert len(found := differences(trainer)) == 1 and max(found) < ROUNDING


def test_the_best_policy_is_sent_before_it_is_evaluated(built: Callable[..., tuple[Any, LLM]]) -> None:
    saved = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_runtime", "greater_is_better": None}
    build = {"eval_dataset": tiny.dataset(4)}
    trainer, llm = built(max_steps=4, per_device_eval_batch_size=4, **saved, **best, build=build)
    trainer.train()
    sent = len(llm.adapters)
    trainer.evaluate()
    assert len(llm.adapters) == sent + 1


@pytest.mark.fast_rows(1)
@pytest.mark.supports("PPO, LoRA", on="vLLM colocate", only="stand-in")
@pytest.mark.parametrize("sync", [True, False], ids=["adapter", "merged"])
def test_a_critic_on_the_policys_base_is_not_sent(
    wide: Path, built: Callable[..., tuple[Any, LLM]], sync: bool
) -> None:
    """Its adapter may have more modules than the policy's, and another rank."""
    critic = LoraConfig(r=16, target_modules="all-linear")
    moving = {"kl_coef": 0.1, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 4, "sync_ref_model": True}
    trainer, llm = built(
        method="PPO", build={"value_peft_config": critic}, vllm_adapter_sync=sync, max_steps=12, **moving
    )
    assert trainer.model.peft_config.keys() == {"default", "ref", "value"}
    found = differences(trainer)
    assert len(found) == 3 and max(found) < ROUNDING
    if not sync:
        bare = load(wide, None)
        assert llm.weights.keys() == {name for name, _ in bare.named_parameters()}
        return
    assert llm.asked["max_lora_rank"] == 8 and not llm.weights
    sent = load_file(Path(llm.adapters[-1].path, "adapter_model.safetensors"))
    trained = {name: value for name, value in trainer.model.named_parameters() if ".default." in name}
    assert sent.keys() == {name.replace(".default", "") for name in trained}
    assert {value.shape for value in sent.values()} == {value.shape for value in trained.values()}
    adapter = LoraConfig.from_pretrained(llm.adapters[-1].path)
    assert adapter.r == tiny.LORA["r"] and adapter.target_modules == {*tiny.LORA["target_modules"]}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({"lora": {"use_dora": True}}, "vLLM does not serve LoRA with use_dora=True", id="dora"),
        pytest.param(
            {"lora": {"init_lora_weights": "pissa"}},
            "init_lora_weights='pissa'.*PEFT has changed the base",
            id="pissa",
        ),
        pytest.param({}, "q_proj.weight is not that of the checkpoint", id="base"),
        pytest.param({"refuses": "add_lora"}, "vLLM refuses the adapter: expected target modules", id="target"),
        pytest.param(
            {"refuses": "visual.qkv"},
            "vLLM refuses the adapter: it leaves out 1 of the adapter's modules, such as",
            id="towers",
        ),
    ],
)
def test_what_is_not_served_is_merged(
    wide: Path, built: Callable[..., tuple[Any, LLM]], options: dict[str, Any], reason: str
) -> None:
    if "q_proj.weight" in reason:  # the base has changed
        changed = get_peft_model(load(wide, None), LoraConfig(**tiny.LORA)).merge_and_unload()
        options = {"model": changed}
    with pytest.warns(UserWarning, match=f"vLLM gets all weights with the adapter merged, because .*{reason}"):
        trainer, llm = built(**options, max_steps=8)
    kept = [value for value in trainer.model.parameters() if not value.requires_grad]
    before = [value.clone() for value in kept]
    assert max(differences(trainer)) < ROUNDING
    assert llm.weights and llm.answered == [None, None]
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))


def why_not(model: Any) -> str | None:
    return serving.why_not_served(model, "colocate", lambda _: contextlib.nullcontext())


@pytest.mark.parametrize("base", [None, "bitsandbytes"])
def test_each_file_of_a_checkpoint_is_compared_with_the_base(wide: Path, tmp_path: Path, base: str | None) -> None:
    """Shards, and weights without an adapter, count too."""
    load(wide, None).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    model = get_peft_model(load(tmp_path, base), LoraConfig(**tiny.LORA))
    assert why_not(model) is None
    weight = model.get_base_model().model.layers[1].mlp.down_proj.weight
    before = weight.data.clone()
    weight.data[0] += 1
    assert "layers.1.mlp.down_proj.weight is not that of the checkpoint" in (why_not(model) or "")
    weight.data = before
    model.get_base_model().config.name_or_path = str(tmp_path / "none")
    assert "q_proj.weight cannot be compared: " in (why_not(model) or "")


@pytest.mark.parametrize(
    "base", [{"bnb_4bit_use_double_quant": False}, {"bnb_4bit_quant_type": "fp4"}, "int8"], ids=str
)
def test_a_base_that_vllm_quantises_otherwise_is_refused(
    wide: Path, built: Callable[..., tuple[Any, LLM]], base: Any
) -> None:
    model = wide_model.load(wide, base) if base == "int8" else load(wide, "bitsandbytes", **base)
    with pytest.raises(
        ValueError, match=r"vLLM has to serve the adapter alone .*: vLLM quantises with .*'nf4'.*use_vllm=False"
    ):
        built(model)


@pytest.mark.parametrize("change", ["late rows", "a late token", "rotary buffers", "rotary base", "fewer layers"])
def test_a_base_that_differs_anywhere_is_not_its_checkpoint(wide: Path, change: str) -> None:
    model = load(wide, None)
    not_the_engines = {"use_cache": False, "pad_token_id": 1, "attention_dropout": 0.5}
    model.config.update(not_the_engines)
    assert why_not(get_peft_model(model, LoraConfig(**tiny.LORA))) is None
    changed = load(wide, None)
    config = changed.config
    if change == "late rows":
        for weight in changed.parameters():
            weight.data[1:] += 0.5
    elif change == "a late token":
        changed.get_input_embeddings().weight.data[-3] += 1
    elif change == "rotary buffers":
        changed.model.rotary_emb.inv_freq *= 0.5
    elif change == "rotary base":
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 1.0}
    else:
        changed.model.layers = changed.model.layers[:1]
        config.num_hidden_layers = 1
    assert why_not(get_peft_model(changed, LoraConfig(**tiny.LORA))) is not None


def test_late_rows_of_a_quantised_base_are_compared(wide: Path) -> None:
    model = get_peft_model(load(wide, "bitsandbytes"), LoraConfig(**tiny.LORA))
    weight = model.get_base_model().model.layers[1].mlp.down_proj.weight
    assert why_not(model) is None
    weight.data[-weight.numel() // 4 :] ^= 1
    assert "layers.1.mlp.down_proj.weight is not that of the checkpoint" in (why_not(model) or "")
