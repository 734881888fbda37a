"""A saved policy and a saved critic load without this package, and begin a new run with the same values."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from tests.tools import resumable, tiny
from tests.tools import wide as wide_model
from trl_steady import RewardAdapter

TEXTS = ["ab1+2=", "30", "ababab12+13=25!"]


def build(kind: str, model_of: Any, output: Path, **options: Any) -> Any:
    model = model_of(kind)
    model = options.pop("model", wide_model.load(model, "nf4") if kind == "nf4" else model)
    options = {"method": "PPO", "num_generations": 1, "max_steps": 3, "lora": kind != "full", **options}
    return tiny.trainer(model, output, **options)


def loaded_critic(kind: str, base: Path, folder: Path) -> Any:
    """The critic of a saved model, as the docs say that it is loaded, with transformers and PEFT alone."""
    if kind == "full":
        return AutoModelForSequenceClassification.from_pretrained(folder / "value")
    options: dict[str, Any] = {"dtype": torch.float32}
    if kind == "nf4":
        options.update(quantization_config=BitsAndBytesConfig(**wide_model.NF4), device_map="cpu")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **options)
    # bitsandbytes would round an NF4 base in eval mode. There is no dropout
    return peft.PeftModel.from_pretrained(model, folder / "value").train(kind == "nf4")


@pytest.fixture(scope="module", params=["lora", "full", "nf4"])
def saved(
    request: pytest.FixtureRequest, model_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Path]:
    """A kind, a trainer of this kind after three steps, and the folder to which `save_model` has written it."""
    output = tmp_path_factory.mktemp(request.param)
    trainer = tiny.train(build(request.param, model_of, output))
    trainer.save_model(str(output / "saved"))
    return request.param, trainer, output / "saved"


@torch.no_grad()
def values(trainer: Any) -> list[Tensor]:
    """The values that the trainer's critic gives all tokens of the texts after the first. The texts are padded."""
    rows = [torch.tensor(tiny.tokenizer()(text)["input_ids"]) for text in TEXTS]
    prompts = torch.stack([row[:1] for row in rows])
    ids = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=tiny.SIZES["pad_token_id"])
    mask = pad_sequence([torch.ones_like(row[1:]) for row in rows], batch_first=True)
    samples = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    found = trainer.values(trainer.critic, {**samples, "completion_ids": ids, "completion_mask": mask})
    return [row[own.bool()] for row, own in zip(found, mask, strict=True)]


@torch.no_grad()
def plain_values(critic: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The same from a plain model: from its body and head, and from the logit that it pools for each beginning."""
    bare = critic.get_base_model() if isinstance(critic, peft.PeftModel) else critic
    by_body, by_logit = [], []
    for text in TEXTS:
        ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
        by_body.append(bare.score(bare.base_model(ids).last_hidden_state)[0, :-1, 0])
        by_logit.append(torch.stack([critic(ids[:, :end]).logits[0, 0] for end in range(1, ids.size(1))]))
    return by_body, by_logit


def check_values(expected: list[Tensor], found: list[Tensor], *, close: float = 1e-5) -> None:
    """Values are some units. Without padding, sums are taken in another order."""
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.float(), one, rtol=close, atol=close)


@pytest.mark.fast_rows(1)
def test_the_critic_is_a_plain_model_for_sequence_classification(saved: tuple[str, Any, Path], model_of: Any) -> None:
    kind, trainer, folder = saved
    expected = values(trainer)
    assert torch.cat(expected).std() > 0.01  # not zeros
    critic = loaded_critic(kind, model_of(kind), folder)
    by_body, by_logit = plain_values(critic)
    check_values(expected, by_body)
    check_values(expected, by_logit)
    if kind != "full":
        assert list(critic.peft_config) == ["default"]
        assert isinstance(critic, peft.PeftModelForSequenceClassification)
    else:
        assert critic.config.num_labels == 1


def test_the_policy_is_saved_without_the_critic(saved: tuple[str, Any, Path], model_of: Any) -> None:
    kind, trainer, folder = saved
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["value"]
    weights = folder / ("model.safetensors" if kind == "full" else "adapter_model.safetensors")
    names = set(load_file(weights))
    assert not [name for name in names if "score" in name or "value" in name.split(".")]
    own = trainer.model.state_dict()
    if kind == "full":
        policy = AutoModelForCausalLM.from_pretrained(folder)
        assert names == {name for name in own if name != "lm_head.weight" or name in names}
    else:
        load = wide_model.load if kind == "nf4" else lambda base, _: AutoModelForCausalLM.from_pretrained(base)
        policy = peft.PeftModel.from_pretrained(load(model_of(kind), "nf4"), folder).train(kind == "nf4")
        assert list(policy.peft_config) == ["default"]
        assert len(names) == sum(".default." in name for name in own)
        assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] is None
    if kind == "nf4":  # TRL has trained the adapter in bf16, and PEFT loads it as float32
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16()
    trainer.model.eval()
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
            expected = trainer.model(ids).logits.log_softmax(-1)
            assert torch.equal(policy(ids).logits.log_softmax(-1), expected)


@pytest.mark.fast_rows(1)
def test_a_saved_critic_begins_a_new_run(saved: tuple[str, Any, Path], model_of: Any, tmp_path: Path) -> None:
    def adapter(of: Any, name: str) -> dict[str, Tensor]:
        return {own: value for own, value in tiny.parameters(of).items() if name in own.split(".")}

    kind, trainer, folder = saved
    fresh = build(kind, model_of, tmp_path)
    new = build(kind, model_of, tmp_path, value_init=str(folder / "value"))
    assert resumable.differences(trainer.critic.state(), new.critic.state()) == []
    if kind != "full":  # the policy's adapter begins anew; a full critic does not need the policy
        assert resumable.differences(adapter(fresh, "default"), adapter(new, "default")) == []
    check_values(values(trainer), values(new), close=0)
    assert torch.cat(values(fresh)).abs().max() == 0
    new.train()
    assert resumable.differences(trainer.critic.state(), new.critic.state()) != []


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model for sequence classification with one label, and its tokenizer."""
    output = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(1)
    of_another_size = {"hidden_size": 24, "num_hidden_layers": 1, "num_labels": 1}
    config = transformers.Qwen2Config(**{**tiny.SIZES, **of_another_size})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(output)
    tiny.tokenizer().save_pretrained(output)
    return output


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("as_path", [False, True])
def test_a_value_model_is_the_critic(model_of: Any, tmp_path: Path, scorer: Path, as_path: bool) -> None:
    given = AutoModelForSequenceClassification.from_pretrained(scorer)
    expected, _ = plain_values(given)
    trainer = build("full", model_of, tmp_path, build={"value_model": str(scorer) if as_path else given})
    check_values(expected, values(trainer))
    assert (trainer.critic.backbone is given) != as_path
    tiny.train(trainer).save_model(str(tmp_path / "saved"))
    after, by_logit = plain_values(AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "value"))
    check_values(values(trainer), after)
    check_values(values(trainer), by_logit)
    assert not torch.allclose(torch.cat(after), torch.cat(expected))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("how", ["model", "path", "value_model"])
def test_the_reward_model_begins_the_critic_and_stays_as_it_is(
    model_of: Any, tmp_path: Path, scorer: Path, how: str
) -> None:
    """Also if it is given as `value_model`."""
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    build_ = {"reward_funcs": [tiny.reward, str(scorer) if how == "path" else model]}
    start = {"build": {**build_, "value_model": model}} if how == "value_model" else {"value_init": "reward"}
    trainer = build("full", model_of, tmp_path, **{"build": build_, **start})
    expected, _ = plain_values(model)
    check_values(expected, values(trainer))
    reward_model = trainer.reward_funcs[1]
    before = {name: tensor.clone() for name, tensor in reward_model.state_dict().items()}
    history = tiny.history(tiny.train(trainer))
    assert resumable.differences(before, dict(reward_model.state_dict())) == []
    assert not torch.allclose(torch.cat(values(trainer)), torch.cat(expected))
    assert history[0]["value/mean"] != 0


def test_beginnings_that_contradict_one_another_are_refused(model_of: Any, tmp_path: Path, scorer: Path) -> None:
    value_model = AutoModelForSequenceClassification.from_pretrained(scorer)
    config = transformers.Qwen2Config(**tiny.SIZES, num_labels=1)
    with_bias = transformers.Qwen2ForSequenceClassification(config)
    with_bias.score = torch.nn.Linear(config.hidden_size, 1)
    for kind, options, message in (
        ("lora", {"build": {"value_model": value_model}}, "value_model would have no effect"),
        ("full", {"build": {"value_peft_config": LoraConfig()}}, "value_peft_config would have no effect"),
        ("lora", {"build": {"value_peft_config": LoraConfig(bias="all")}}, "bias='all' would have no effect"),
        ("lora", {"value_init": "reward"}, "value_init='reward'.*trained RewardAdapter"),
        ("full", {"value_init": "reward"}, "value_init='reward'.*no model"),
        (
            "full",
            {"value_init": "reward", "build": {"value_model": value_model}},
            "value_model and value_init='reward'",
        ),
        (
            "lora",
            {"value_init": "reward", "build": {"value_peft_config": LoraConfig()}},
            "value_peft_config and value_init='reward'",
        ),
        ("full", {"value_init": str(model_of("lora"))}, r"value_init=.* has no score\.weight"),
        ("full", {"build": {"value_model": model_of("lora")}}, r"value_model has no score\.weight"),
        (
            "full",
            {"build": {"value_model": with_bias}},
            r"value_model: its head has a bias.* Give a model without one",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(kind, model_of, tmp_path, **options)


def test_an_architecture_without_a_classifier_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """As a whole. Its critic can be an adapter."""
    policy = AutoModelForCausalLM.from_config(transformers.GraniteConfig(**tiny.SIZES))
    for folder in ("policy", "value"):
        policy.save_pretrained(tmp_path / folder)
        tiny.tokenizer().save_pretrained(tmp_path / folder)
    other = AutoModelForCausalLM.from_config(tiny.CONFIGS["dense"])
    unknown = "transformers has no model for sequence classification of the architecture 'granite'"
    for options, message in (
        ({}, f"value_model: {unknown}.*or train with a peft_config"),
        ({"value_init": str(tmp_path / "value")}, f"value_init='.*value': {unknown}"),
        ({"build": {"value_model": other}}, r"value_model: Qwen2ForCausalLM has no score\.weight"),
        ({"method": "GRPO", "num_generations": 4, "build": {"reward_funcs": RewardAdapter()}}, unknown),
    ):
        with pytest.raises(ValueError, match=message):
            build("full", lambda _: tmp_path / "policy", tmp_path, **options)
    trainer = build("lora", lambda _: tmp_path / "policy", tmp_path, max_steps=1)
    assert tiny.train(trainer).state.global_step == 1


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("name", "of_policy", "of_critic"),
    [
        pytest.param(
            "dense",
            tiny.LORA,
            {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "down_proj"], "use_dora": True},
            id="of another rank, on other layers, with DoRA",
        ),
        pytest.param(
            "dense",
            {**tiny.LORA, "init_lora_weights": "pissa"},
            {"r": 4, "init_lora_weights": "pissa", "target_modules": ["o_proj"]},
            id="beside PiSSA",
        ),
        pytest.param("dense", {**tiny.LORA, "modules_to_save": ["lm_head"]}, {}, id="beside a trained LM head"),
        pytest.param(
            "moe",
            {
                **{**tiny.LORA, "lora_dropout": 0.0, "target_modules": ["q_proj"]},
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
            },
            {},
            id="on experts and routers",
        ),
    ],
)
def test_adapters_of_other_kinds_are_saved_and_loaded(
    models: dict[str, Path], tmp_path: Path, name: str, of_policy: dict[str, Any], of_critic: dict[str, Any]
) -> None:
    build_: dict[str, Any] = {"peft_config": LoraConfig(**of_policy)}
    if of_critic:
        build_["value_peft_config"] = LoraConfig(**of_critic)
    options: dict[str, Any] = {"method": "PPO", "num_generations": 1, "max_steps": 2, "build": build_}
    trainer = tiny.train(tiny.trainer(models[name], tmp_path, **options))
    trainer.save_model(str(tmp_path / "saved"))
    for found in plain_values(loaded_critic("lora", models[name], tmp_path / "saved")):
        check_values(values(trainer), found)
    build_.pop("value_peft_config", None)  # the saved critic has its own
    again = tiny.trainer(models[name], tmp_path, value_init=str(tmp_path / "saved" / "value"), **options)
    assert resumable.differences(trainer.critic.state(), again.critic.state()) == []


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_bf16_policy_has_a_critic_with_a_head_in_float32(kind: str, model_of: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("lora"), dtype=torch.bfloat16)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = tiny.train(build(kind, model_of, tmp_path, model=model, **options))
    dtypes = {name: parameter.dtype for name, parameter in trainer.critic.named_parameters()}
    assert dtypes.pop("score.weight") == torch.float32
    assert set(dtypes.values()) == {torch.float32 if kind == "lora" else torch.bfloat16}
    assert trainer.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert all(torch.isfinite(own).all() and own.dtype == torch.float32 for own in values(trainer))
    trainer.save_model(str(tmp_path / "saved"))
    value = tmp_path / "saved" / "value"
    if kind == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(model_of("lora"), num_labels=1, dtype=torch.bfloat16)
        plain = peft.PeftModel.from_pretrained(base, value).eval()
        assert load_file(value / "adapter_model.safetensors")["base_model.model.score.weight"].dtype == torch.float32
    else:
        plain = AutoModelForSequenceClassification.from_pretrained(value).eval()
        assert plain.dtype == torch.bfloat16
    for found in plain_values(plain):
        check_values(values(trainer), found, close=2e-2)  # the head has been rounded
    model = AutoModelForCausalLM.from_pretrained(model_of("lora"), dtype=torch.bfloat16)
    resumed = build(kind, model_of, tmp_path, model=model, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumable.differences(resumable.state(trainer), resumable.state(resumed)) == []
