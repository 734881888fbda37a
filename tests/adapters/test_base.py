"""A policy's base that is not its checkpoint: its start has changed it, parts of it train, or it has towers."""

import contextlib
import json
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
from trl_steady.critic.part import CriticPart
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
    return {name: tensor.detach().clone() for name, tensor in Base(trainer.model).trained.items()}


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


def test_lora_in_a_vision_tower_is_not_served(tmp_path: Path) -> None:
    """vLLM skips the modules of a tower with a log line."""
    qwen().save_pretrained(tmp_path)
    load, inside = transformers.Qwen3VLForConditionalGeneration.from_pretrained, r".*language_model.*q_proj"
    text = get_peft_model(load(tmp_path), LoraConfig(target_modules=f"{inside}|lm_head"))
    assert Base(text).adapted_elsewhere == [] and "vision" not in (why_not_served(text, "colocate", whole) or "")
    both = get_peft_model(load(tmp_path), LoraConfig(target_modules=f"{inside}|.*qkv"))
    assert "qkv" in (why_not_served(both, "colocate", whole) or "")


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
    assert all(not torch.equal(tensor, before[name]) for name, tensor in of_base(again).items())
    frozen = tiny.trainer(policy(models["dense"]), tmp_path / "frozen", **options)
    with pytest.raises(ValueError, match=r"has 5 parameters of the base that train .*and this run has 0"):
        frozen.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / BASE_FILE).unlink()
    with pytest.raises(ValueError, match=r"has 0 parameters .*this run has 5"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(
    ("trained", "lora", "checkpointing"),
    [(["norm", "embed_tokens"], {}, True), ([], {"bias": "lora_only"}, False)],
)
def test_no_gradient_of_a_critic_reaches_the_base(
    models: dict[str, Path], tmp_path: Path, trained: list[str], lora: dict[str, Any], checkpointing: bool
) -> None:
    model = policy(models["dense"], *trained, **lora)
    reward = {"reward_funcs": [RewardAdapter(), tiny.reward]}
    trainer = critics.build(model, tmp_path, build=reward, gradient_checkpointing=checkpointing, kl_coef=0.0)
    scorers = [trainer.critic, trainer.reward_model]
    trainer.part(CriticPart).learner.switch(True)
    for _, parameter in trainer.reward_model.named_parameters():
        parameter.requires_grad_(True)
        parameter.data.add_(0.1)
    samples = trainer.rollout([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]])
    for scorer in scorers:
        with trainer.until_backward_ends():
            trainer.values(scorer, samples).square().sum().backward()
        learned = {id(parameter) for _, parameter in scorer.named_parameters()}
        graded = [
            name
            for name, tensor in trainer.model.named_parameters()
            if tensor.grad is not None and id(tensor) not in learned
        ]
        assert graded == [] and scorer.head.weight.grad.any()
        trainer.model.zero_grad()
    assert all(tensor.requires_grad for tensor in Base(trainer.model).trained.values()) and of_base(trainer)


def test_a_reference_on_trained_biases_is_said_to_move(models: dict[str, Path], tmp_path: Path) -> None:
    for beta in (0.0, 0.1):
        build = {"peft_config": LoraConfig(**PLAIN, bias="all")}
        with pytest.warns(UserWarning, match="6 parameters of the base train") as said:
            tiny.trainer(models["dense"], tmp_path, build=build, beta=beta)
        assert any("A reference on this base changes" in str(each.message) for each in said) == bool(beta)
    with pytest.raises(ValueError, match=r"5 parameters .* nor does .*save_only_model=True"):
        tiny.trainer(policy(models["dense"], "norm"), tmp_path, save_only_model=True)


# starts that change the base


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
        ({}, {"bias": "all"}, "bias=.* in value_peft_config would have no effect"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save=.* in value_peft_config would have no effect"),
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


# what should work


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"use_rslora": True}])
def test_a_reward_adapter_that_peft_saved_scores_as_peft_does(
    models: dict[str, Path], tmp_path: Path, lora: dict[str, Any]
) -> None:
    body = AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1)
    twin = get_peft_model(body, LoraConfig(**PLAIN, task_type="SEQ_CLS", init_lora_weights=False, **lora)).eval()
    for name, tensor in twin.named_parameters():
        tensor.data.mul_(1.5 if "magnitude" in name else 1)
    twin.save_pretrained(tmp_path / "reward")
    build = {"reward_funcs": RewardAdapter(tmp_path / "reward"), "peft_config": LoraConfig(**PLAIN)}
    trainer = tiny.trainer(models["dense"], tmp_path, build=build)
    with torch.no_grad():
        found = trainer.part(RewardModelPart).scores(PROMPTS, ANSWERS, ENDS)
    torch.testing.assert_close(found, scores_of(twin), rtol=1e-5, atol=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    kinds = [
        sorted(peft.utils.save_and_load.load_peft_weights(str(tmp_path / name))) for name in ("reward", "saved/reward")
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


CODE = """
from transformers import Qwen2ForSequenceClassification
class Mine(Qwen2ForSequenceClassification): ...
"""


def test_code_that_comes_with_a_model_runs_if_trl_is_told_to_trust_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mine = tmp_path / "mine"
    AutoModelForSequenceClassification.from_pretrained(models["dense"], num_labels=1).save_pretrained(mine)
    (mine / "mine.py").write_text(CODE)
    config = json.loads((mine / "config.json").read_text())
    auto = {"AutoModelForSequenceClassification": "mine.Mine"}
    (mine / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    for given in ({"value_init": str(mine), **PPO}, {"build": {"reward_funcs": RewardAdapter(mine)}}):
        trainer = tiny.trainer(models["dense"], tmp_path, trust_remote_code=True, **given)
        model = trainer.critic if "method" in given else trainer.reward_model
        assert type(model.bare).__name__ == "Mine"
