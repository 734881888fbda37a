"""A policy's base that is not its checkpoint: its start has changed it, parts of it train, or it has towers."""

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.reward_model.test_scores import ANSWERS, ENDS, PROMPTS, scores_of
from tests.tools import critics, tiny
from trl_steady import RewardAdapter
from trl_steady.adapters.base import Base
from trl_steady.adapters.part import BASE_FILE
from trl_steady.adapters.serving import why_not_served
from trl_steady.reward_model.part import RewardModelPart

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1}
TEXT = {**tiny.SIZES, "head_dim": 8}
TOKENS = tiny.tokenizer()("ab+=").input_ids  # of the prompts


def policy(folder: Path, *trained: str, adapter_name: str = "default", **lora: Any) -> Any:
    """A PEFT model whose base also trains the parameters with one of these words in their names."""
    torch.manual_seed(1)
    config = LoraConfig(**{**PLAIN, "init_lora_weights": False, **lora})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config, adapter_name=adapter_name)
    for name, parameter in model.named_parameters():
        if any(word in name for word in trained):
            parameter.requires_grad_(True)
    return model


def of_base(trainer: Any) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in Base(trainer.model).trained.items()}


def whole(_: Any) -> Any:
    return contextlib.nullcontext()


# towers


def qwen() -> Any:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text, vision = {**TEXT, "rope_parameters": rope}, {**vision, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config)


def idefics() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16}
    config = transformers.Idefics3Config(text_config={"model_type": "llama", **TEXT}, vision_config=vision)
    return transformers.Idefics3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "build, inside, tower", [(qwen, r".*language_model.*q_proj", "qkv"), (idefics, r".*text_model.*q_proj", "fc1")]
)
def test_lora_in_a_vision_tower_is_not_served(tmp_path: Path, build: Any, inside: str, tower: str) -> None:
    """vLLM skips the modules of a tower with a log line."""
    build().save_pretrained(tmp_path)
    kind = type(build())
    text = get_peft_model(kind.from_pretrained(tmp_path), LoraConfig(target_modules=f"{inside}|lm_head"))
    assert Base(text).adapted_elsewhere == [] and "vision" not in (why_not_served(text, "colocate", whole) or "")
    both = get_peft_model(kind.from_pretrained(tmp_path), LoraConfig(target_modules=f"{inside}|.*{tower}"))
    assert tower in (why_not_served(both, "colocate", whole) or "")


# parameters of the base that train


@pytest.mark.parametrize("best", [False, True])
def test_parameters_of_the_base_return_from_a_checkpoint(models: dict[str, Path], tmp_path: Path, best: bool) -> None:
    options: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    if best:
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "reward", "eval_strategy": "steps"}
        options |= {"eval_steps": 4, "build": {"eval_dataset": tiny.dataset(4)}, "per_device_eval_batch_size": 4}
    with pytest.warns(UserWarning, match=r"5 parameters of the base train .*layernorm.*modules_to_save"):
        first = tiny.trainer(policy(models["dense"], "layernorm", "model.norm"), tmp_path, **options)
    before = of_base(first)
    first.train()
    if best:  # of whichever step
        saved = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
        number = first.state.best_global_step
        file = Path(saved or "").with_name(f"checkpoint-{number}") / BASE_FILE
        assert critics.same(of_base(first), load_file(file))
        return
    again = tiny.trainer(policy(models["dense"], "layernorm", "model.norm"), tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert critics.same(tiny.parameters(first), tiny.parameters(again))
    assert all(not torch.equal(own, before[name]) for name, own in of_base(again).items())
    frozen = tiny.trainer(policy(models["dense"]), tmp_path / "frozen", **options)
    with pytest.raises(ValueError, match=r"has 5 parameters of the base that train .*and this run has 0"):
        frozen.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / BASE_FILE).unlink()
    with pytest.raises(ValueError, match=r"has 0 parameters .*this run has 5"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


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
    with pytest.raises(ValueError, match=r"active adapters .*'second'\], and transformers loads the first only"):
        trainer(tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_what_peft_leaves_out_returns_from_a_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    """With `lora_only`, PEFT saves the biases of LoRA's own modules. A tied embedding is saved once."""
    lora = {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True}
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    first, again = (
        tiny.trainer(policy(models["gpt2"], "ln_", "wte", **lora), tmp_path / name, **options)
        for name in ("first", "again")
    )
    first.train()
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert critics.same(tiny.parameters(first), tiny.parameters(again))
    unsaved = Base(first.model).unsaved
    assert unsaved.keys() < of_base(first).keys() and any(name.endswith("bias") for name in unsaved)
    assert load_file(tmp_path / "first" / "checkpoint-2" / BASE_FILE).keys() == unsaved.keys()
    assert "transformer.wte.weight" in unsaved and "lm_head.weight" not in unsaved


def test_a_reference_on_trained_biases_is_said_to_move(models: dict[str, Path], tmp_path: Path) -> None:
    for beta in (0.0, 0.1):
        build = {"peft_config": LoraConfig(**PLAIN, bias="all")}
        with pytest.warns(UserWarning, match="6 parameters of the base train") as said:
            tiny.trainer(models["dense"], tmp_path, build=build, beta=beta)
        assert any("A reference on this base changes" in str(each.message) for each in said) == bool(beta)
    with pytest.raises(ValueError, match=r"5 parameters .* nor does .*save_only_model=True"):
        tiny.trainer(policy(models["dense"], "norm"), tmp_path, save_only_model=True)


# starts that change the base


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


def test_a_critic_beside_pissa_is_saved_as_peft_loads_it(models: dict[str, Path], tmp_path: Path) -> None:
    config = LoraConfig(**PLAIN, init_lora_weights="pissa")
    trainer = critics.build(models["dense"], tmp_path, build={"peft_config": config})
    samples = trainer.rollout([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]])
    with torch.no_grad():
        values = trainer.values(trainer.critic, samples)
    trainer.save_model(str(tmp_path / "saved"))
    base = AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    plain = PeftModel.from_pretrained(base, tmp_path / "saved" / "value").eval()
    prompt = samples["prompt_ids"][0][samples["prompt_mask"][0].bool()]
    with torch.no_grad():
        first = plain(input_ids=prompt[None]).logits.item()
    assert values[0, 0].item() == pytest.approx(first, rel=1e-4)
    resumed = critics.build(
        models["dense"], tmp_path / "b", build={"peft_config": config}, value_init=str(tmp_path / "saved" / "value")
    )
    assert resumed.critic.adapter == "value"


@pytest.mark.parametrize(
    ("of_policy", "of_critic", "message"),
    [
        ({}, {"init_lora_weights": "pissa"}, "'value' has .* and the policy's adapter has .*one base"),
        ({"init_lora_weights": "pissa"}, {}, "'value' has .* and the policy's adapter has .*one base"),
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


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("pissa", True, "has 4 parameters of the base that were changed"),
        (True, "pissa", "has 0 parameters of the base that were changed"),
        ("pissa_niter_1", "pissa_niter_1", "PEFT has made another base .*Its start is random. Set a seed"),
        ("pissa", "pissa", ""),
    ],
)
def test_a_run_resumes_on_the_base_that_it_had(
    models: dict[str, Path], tmp_path: Path, before: Any, after: Any, message: str
) -> None:
    def build(start: Any, seed: int, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(models["dense"])
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(**PLAIN, init_lora_weights=start))
        return tiny.trainer(model, tmp_path / folder, max_steps=4, save_strategy="steps", save_steps=2)

    first, again = build(before, 0, "first"), build(after, 1, "again")
    first.train()
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert message or critics.same(tiny.parameters(first), tiny.parameters(again))


def test_a_critics_options_may_be_words_or_empty(models: dict[str, Path], tmp_path: Path) -> None:
    """It takes the policy's start by a word for its modules, too. An empty option is unset."""
    config = LoraConfig(**{**PLAIN, "target_modules": "all-linear"}, init_lora_weights="pissa")
    given: dict[str, Any] = {"peft_config": config, "value_peft_config": copy.deepcopy(config)}
    model = tiny.trainer(models["dense"], tmp_path, build=given, **PPO).model
    assert model.peft_config["value"].target_modules == model.peft_config["default"].target_modules
    empty = LoraConfig(**PLAIN, modules_to_save=[])
    given = {"peft_config": LoraConfig(**PLAIN), "value_peft_config": empty}
    given["reward_funcs"] = RewardAdapter(peft_config=empty)
    assert tiny.trainer(models["dense"], tmp_path, build=given, **PPO).critic.adapter == "value"


# what should work


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"use_rslora": True}])
def test_a_reward_adapter_that_peft_saved_scores_as_peft_does(
    models: dict[str, Path], tmp_path: Path, lora: dict[str, Any]
) -> None:
    body = AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    twin = get_peft_model(body, LoraConfig(**PLAIN, task_type="SEQ_CLS", init_lora_weights=False, **lora)).eval()
    for name, own in twin.named_parameters():
        own.data.mul_(1.5 if "magnitude" in name else 1)
    twin.save_pretrained(tmp_path / "reward")
    build = {"reward_funcs": RewardAdapter(tmp_path / "reward"), "peft_config": LoraConfig(**PLAIN)}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build)
    with torch.no_grad():
        found = trainer.part(RewardModelPart).scores(PROMPTS, ANSWERS, ENDS)
    torch.testing.assert_close(found, scores_of(twin), rtol=1e-5, atol=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    kinds = [
        sorted(peft.utils.save_and_load.load_peft_weights(str(tmp_path / own))) for own in ("reward", "saved/reward")
    ]
    assert kinds[0] == kinds[1]


def test_a_reward_adapter_of_another_base_warns(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another spelling of the same folder is the same base."""

    def build(base: str) -> None:
        adapter = RewardAdapter(saved_reward(models["dense"], tmp_path, base))
        given = {"reward_funcs": adapter, "peft_config": LoraConfig(**PLAIN)}
        tiny.trainer(models["dense"].name, tmp_path, build=given)

    monkeypatch.chdir(models["dense"].parent)
    with pytest.warns(UserWarning, match=r"was trained on 'org/other', and the base of the policy is .*dense"):
        build("org/other")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was trained on")
        build(str(models["dense"]))


def test_a_critic_and_a_reward_model_stand_beside_trained_tokens_and_modules(
    models: dict[str, Path], tmp_path: Path
) -> None:
    config = LoraConfig(**PLAIN, trainable_token_indices={"embed_tokens": TOKENS}, modules_to_save=["lm_head"])
    build = {"peft_config": config, "reward_funcs": [RewardAdapter(), tiny.reward]}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build, max_steps=2, **PPO)
    trainer.reward_model.head.weight.data.fill_(0.1)
    before = tiny.parameters(trainer)
    trainer.train()
    moved = {name for name, own in tiny.parameters(trainer).items() if not torch.equal(own, before[name])}
    for word in ("value", "trainable_tokens", "modules_to_save"):
        assert any(word in name for name in moved), word


def test_an_adapter_of_any_name_has_a_critic_and_a_reward_model(models: dict[str, Path], tmp_path: Path) -> None:
    model = policy(models["dense"], adapter_name="mine")
    build = {"reward_funcs": [RewardAdapter(), tiny.reward]}
    trainer = tiny.trainer(model, tmp_path, build=build, kl_coef=0.0, max_steps=2, **PPO)
    names = tiny.parameters(trainer)
    trainer.reward_model.head.weight.data.fill_(0.1)
    copies = [(own, names[name.replace(".value.", ".mine.")]) for name, own in names.items() if ".value." in name]
    assert copies and all(torch.equal(*pair) for pair in copies)
    trainer.train()
    with pytest.raises(ValueError, match=r".*\['mine'\].*named 'default'"):
        tiny.trainer(policy(models["dense"], adapter_name="mine"), tmp_path, **PPO)


def test_an_adapter_that_peft_cannot_combine_with_lora_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    for given, message in (
        ({}, "IA3Config, and must be LoRA"),
        ({"value_peft_config": LoraConfig(**PLAIN)}, "different peft types"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.trainer(models["dense"], tmp_path, build={"peft_config": config, **given}, kl_coef=0.0, **PPO)
