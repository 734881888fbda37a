"""A policy's base that is not its checkpoint: its start has changed it, parts of it train, or it has towers."""

import contextlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.features.critic import tools as critics
from tests.features.reward_model.tools import ANSWERS, ENDS, PROMPTS, scores_of
from tests.tools import tiny
from trl_steady import RewardAdapter
from trl_steady.features.adapters.base_model import BaseModel
from trl_steady.features.adapters.vllm_sync import why_not_served
from trl_steady.features.reward_model.feature import RewardModel

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1}


def policy(folder: Path, *trained: str, **lora: Any) -> Any:
    """A PEFT model whose base also trains the parameters with one of these words in their names."""
    torch.manual_seed(1)
    config = LoraConfig(**{**PLAIN, "init_lora_weights": False, **lora})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, parameter in model.named_parameters():
        if any(word in name for word in trained):
            parameter.requires_grad_(True)
    return model


def test_lora_in_a_vision_tower_is_not_served(tmp_path: Path) -> None:
    """vLLM skips the modules of a tower with a log line."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config={**tiny.SIZES, "head_dim": 8, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        **tokens,
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(tmp_path)

    def adapted(targets: str) -> Any:
        base = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
        return get_peft_model(base, LoraConfig(target_modules=f".*language_model.*q_proj|{targets}"))

    def why_not(model: Any) -> str:
        return why_not_served(model, "colocate", lambda _: contextlib.nullcontext()) or ""

    text = adapted("lm_head")
    assert BaseModel(text).adapted_elsewhere == [] and "vision" not in why_not(text)
    assert "qkv" in why_not(adapted(".*qkv"))


@pytest.mark.parametrize("use", ["value", "reward"])
def test_a_critic_or_reward_model_that_would_change_with_the_base_is_refused(
    models: dict[str, Path], tmp_path: Path, use: str
) -> None:
    build: dict[str, Any] = {"peft_config": LoraConfig(**PLAIN, bias="lora_only")}
    options = {**PPO, "kl_coef": 0.0} if use == "value" else {}
    if use == "reward":
        build["reward_funcs"] = RewardAdapter()
    with pytest.raises(ValueError, match=rf"4 parameters of the base train .*'{use}' says.*bias="):
        tiny.trainer(models["dense"], tmp_path, build=build, **options)


def test_a_resume_of_two_active_adapters_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers would load the first, and leave the other switched off."""

    def trainer(folder: Path) -> Any:
        model = policy(models["dense"])
        model.add_adapter("second", LoraConfig(**PLAIN))
        model.base_model.set_adapter(["default", "second"])
        return tiny.trainer(model, folder, max_steps=4, save_strategy="steps", save_steps=2)

    trainer(tmp_path).train()
    with pytest.raises(ValueError, match=r"active adapters .*'second'\], and transformers keeps the first only"):
        trainer(tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_reference_on_trained_biases_is_said_to_change(models: dict[str, Path], tmp_path: Path) -> None:
    build = {"peft_config": LoraConfig(**PLAIN, bias="all")}
    with pytest.warns(UserWarning, match=r"6 parameters of the base train beside .* A reference on this base changes"):
        tiny.trainer(models["dense"], tmp_path, build=build)


@pytest.mark.parametrize(("trained", "bias"), [("norm", "none"), ("norm", "all"), ("bias", "none")])
def test_parameters_of_the_base_that_peft_does_not_save_are_refused(
    models: dict[str, Path], tmp_path: Path, trained: str, bias: str
) -> None:
    with pytest.raises(ValueError, match=r"parameters of the base train .*PEFT does not save them.*modules_to_save"):
        tiny.trainer(policy(models["dense"], trained, bias=bias), tmp_path)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("start", "loaded"), [("olora", False), ("pissa", True)])
def test_the_reference_is_the_model_that_was_given(
    models: dict[str, Path], tmp_path: Path, start: str, loaded: bool
) -> None:
    model: Any = policy(models["dense"], init_lora_weights=start) if loaded else models["dense"]
    config = LoraConfig(**PLAIN, init_lora_weights=start)
    build = {} if loaded else {"peft_config": config}
    trainer = tiny.trainer(model, tmp_path, build=build, **PPO, max_steps=1, learning_rate=0.0)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-5)  # of nats, in float32
    trainer.save_model(str(tmp_path / "saved"))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["dense"]), tmp_path / "saved")
    plain, ids = AutoModelForCausalLM.from_pretrained(models["dense"]), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for own in (again, trainer.model):
            torch.testing.assert_close(own(input_ids=ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "saved" / "ref").exists() == loaded  # TRL's own


@pytest.mark.parametrize(
    ("of_policy", "of_critic", "message"),
    [
        ({}, {"init_lora_weights": "pissa"}, "'value' has .* and the policy's adapter has .*one base"),
        ({"init_lora_weights": "olora"}, {"init_lora_weights": "pissa"}, "'value' has .*one base"),
        ({"init_lora_weights": "pissa"}, None, "'reward' has a start that keeps the base, and .*'pissa'"),
    ],
)
def test_an_adapter_that_is_not_for_the_policys_base_is_refused(
    models: dict[str, Path], tmp_path: Path, of_policy: Any, of_critic: Any, message: str
) -> None:
    build: dict[str, Any] = {"peft_config": LoraConfig(**PLAIN, **of_policy)}
    if of_critic is None:
        build["reward_funcs"] = RewardAdapter(saved_reward(models["dense"], tmp_path))
    else:
        build["value_peft_config"] = LoraConfig(**PLAIN, **of_critic)
    with pytest.raises(ValueError, match=message):
        tiny.trainer(models["dense"], tmp_path, build=build, **({} if of_critic is None else PPO))


def saved_reward(model: Path, folder: Path, base: str | None = None) -> Path:
    """An adapter for scores, as PEFT writes it. `base`: what it says that it was trained on."""
    body = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    twin = get_peft_model(body, LoraConfig(**PLAIN, task_type="SEQ_CLS"))
    twin.peft_config["default"].base_model_name_or_path = base or str(model)
    twin.save_pretrained(folder / "reward")
    return folder / "reward"


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("pissa", True, False),
        (True, "pissa", False),
        ("pissa_niter_1", "pissa_niter_1", False),
        ("pissa", "pissa", True),
    ],
)
def test_a_run_resumes_on_the_base_that_it_had(
    models: dict[str, Path], tmp_path: Path, before: Any, after: Any, is_same: bool
) -> None:
    def build(start: Any, seed: int, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(models["dense"])
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(**PLAIN, init_lora_weights=start))
        return tiny.trainer(model, tmp_path / folder, max_steps=4, save_strategy="steps", save_steps=2)

    first, again = build(before, 0, "first"), build(after, 1, "again")
    first.train()
    refused = pytest.raises(ValueError, match=r"PEFT has made another base than in .*set the same seed")
    with contextlib.nullcontext() if is_same else refused:
        again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert critics.same(tiny.parameters(first), tiny.parameters(again)) == is_same


def test_a_reward_adapter_that_peft_saved_scores_as_peft_does(models: dict[str, Path], tmp_path: Path) -> None:
    lora = {"use_dora": True, "use_rslora": True}
    body = AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    twin = get_peft_model(body, LoraConfig(**PLAIN, task_type="SEQ_CLS", init_lora_weights=False, **lora)).eval()
    for name, own in twin.named_parameters():
        own.data.mul_(1.5 if "magnitude" in name else 1)
    twin.save_pretrained(tmp_path / "reward")
    build = {"reward_funcs": RewardAdapter(tmp_path / "reward"), "peft_config": LoraConfig(**PLAIN)}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build)
    with torch.no_grad():
        found = trainer.feature(RewardModel).scorer.scores(PROMPTS, ANSWERS, ENDS)
    torch.testing.assert_close(found, scores_of(twin), rtol=1e-5, atol=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    kinds = [
        sorted(peft.utils.save_and_load.load_peft_weights(str(tmp_path / own))) for own in ("reward", "saved/reward")
    ]
    assert kinds[0] == kinds[1]


def test_a_reward_adapter_of_another_base_warns(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = RewardAdapter(saved_reward(models["dense"], tmp_path, "org/other"))
    given = {"reward_funcs": adapter, "peft_config": LoraConfig(**PLAIN)}
    with pytest.warns(UserWarning, match=r"was trained on 'org/other', and the base of the policy is .*dense"):
        tiny.trainer(models["dense"], tmp_path, build=given)


def test_a_critic_and_a_reward_model_stand_beside_trained_tokens_and_modules(
    models: dict[str, Path], tmp_path: Path
) -> None:
    TOKENS = tiny.tokenizer()("ab+=").input_ids  # of the prompts

    config = LoraConfig(**PLAIN, trainable_token_indices={"embed_tokens": TOKENS}, modules_to_save=["lm_head"])
    build = {"peft_config": config, "reward_funcs": [RewardAdapter(), tiny.reward]}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build, max_steps=2, **PPO)
    trainer.reward_model.head.weight.data.fill_(0.1)
    before = tiny.parameters(trainer)
    trainer.train()
    moved = {name for name, own in tiny.parameters(trainer).items() if not torch.equal(own, before[name])}
    for word in ("value", "trainable_tokens", "modules_to_save"):
        assert any(word in name for name in moved), word


def test_an_adapter_that_peft_cannot_combine_with_lora_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    for given, message in (
        ({}, "IA3Config, and must be LoRA"),
        ({"value_peft_config": LoraConfig(**PLAIN)}, "different peft types"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.trainer(models["dense"], tmp_path, build={"peft_config": config, **given}, kl_coef=0.0, **PPO)
