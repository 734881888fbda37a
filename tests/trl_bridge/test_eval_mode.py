"""Passes that train nothing run in eval mode: the reference, the values of a rollout and reward scores."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor, nn

from tests.features.critic import tools as critics
from tests.features.reward_model import tools as rewarding
from tests.tools import tiny
from tests.tools import wide as wide_model
from trl_steady import RewardAdapter
from trl_steady.trl_bridge.models import in_mode, random_setting

RATE = 0.3
LORA = LoraConfig(**tiny.LORA, lora_dropout=RATE)
DORA = LoraConfig(**{**tiny.LORA, "init_lora_weights": True}, lora_dropout=RATE, use_dora=True)
GPT2 = LoraConfig(**{**tiny.LORA, "target_modules": ["c_attn"]}, fan_in_fan_out=True)
LOKR = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False}
MIXTRAL = transformers.MixtralConfig(**tiny.SIZES, num_local_experts=4, router_jitter_noise=RATE)
MOVING = {"sync_ref_model": True}
BASE_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), RATE)


@dataclass
class Kind:
    """A policy that draws random numbers in training mode."""

    base: str = "dense"
    changes: dict[str, Any] = field(default_factory=dict[str, Any])  # of the model's config
    config: peft.PeftConfig | None = None
    is_loaded: bool = False  # the user makes the adapter
    options: dict[str, Any] = field(default_factory=dict[str, Any])


KINDS: dict[str, Kind] = {
    "full": Kind(base="gpt2", changes=BASE_DROPOUT),
    "full, attention only": Kind(changes={"attention_dropout": RATE}),
    "LoRA": Kind(config=LORA),
    "LoRA, moving": Kind(config=LORA, options=MOVING),
    "LoRA, checkpointed": Kind(config=LORA, is_loaded=True, options={"gradient_checkpointing": True}),
    "LoRA on a base with dropout": Kind(base="gpt2", changes=BASE_DROPOUT, config=GPT2),
    "LoRA on a router with jitter": Kind(base="mixtral", config=LoraConfig(**tiny.LORA)),
    "LoRA on NF4": Kind(base="nf4", config=LORA, is_loaded=True),
    "DoRA, loaded": Kind(config=DORA, is_loaded=True),
    "LoKr, loaded": Kind(config=peft.LoKrConfig(**LOKR, module_dropout=RATE), is_loaded=True),
}


def build(kind: Kind, models: dict[str, Path], wide: Path, folder: Path, **options: Any) -> Any:
    """PPO with a reward model, whose rollouts need reference, values and scores; GRPO where there is no critic."""
    if kind.base == "nf4":
        model = wide_model.load(wide, "nf4")
    elif kind.base == "mixtral":
        model = transformers.MixtralForCausalLM(MIXTRAL)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models[kind.base], **kind.changes)
    has_critic = kind.config is None or isinstance(kind.config, LoraConfig)
    built: dict[str, Any] = {"reward_funcs": RewardAdapter() if has_critic else tiny.reward}
    if kind.is_loaded:
        model = peft.get_peft_model(model, copy.deepcopy(kind.config))
    elif kind.config is not None:
        built["peft_config"] = copy.deepcopy(kind.config)
    method = {"method": "PPO", "kl_coef": 0.1, "num_generations": 1} if has_critic else {"beta": 0.1}
    trainer = tiny.trainer(model, folder, build=built, **{**method, **kind.options, **options})
    if has_critic:
        critics.stir(trainer)
        rewarding.stir(trainer)
    return trainer


def known(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = [[60 + 7 * row + column for column in range(2 + row)] for row in range(len(prompts))]
    return {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}


def measure(trainer: Any) -> dict[str, Tensor]:
    """Values that passes of models give a rollout of known answers."""
    trainer.rollout_func = known
    rows = [{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]]
    samples = trainer._generate_and_score_completions(rows)
    rewards = next(iter(trainer._logs["rewards"].values()))
    scores = torch.tensor(list(rewards)[-len(rows) :])
    found = {"scores": scores, "reference": samples["ref_per_token_logps"], "old": samples["old_per_token_logps"]}
    return found | ({"values": samples["values"]} if "values" in samples else {})


def owned(trainer: Any) -> list[nn.Module]:
    models = [trainer.model, trainer.ref_model]
    models += [own.bare for own in (getattr(trainer, name, None) for name in ("critic", "reward_model")) if own]
    return [model for model in models if model is not None]


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("name", KINDS)
def test_they_equal_those_of_models_in_eval_mode(
    models: dict[str, Path], wide: Path, tmp_path: Path, name: str
) -> None:
    """Only the old log-probs are drawn with dropout, as TRL draws them."""
    trainer = build(KINDS[name], models, wide, tmp_path)
    for model in owned(trainer):
        model.train()
    drawn, again = measure(trainer), measure(trainer)
    for model in owned(trainer):
        model.eval()
    expected = measure(trainer)
    assert random_setting(trainer.model) and not torch.equal(drawn["old"], again["old"])
    assert drawn.keys() >= {"scores", "reference"}
    for column in drawn.keys() - {"old"}:
        assert expected[column].unique().numel() > 2
        torch.testing.assert_close(drawn[column], expected[column], rtol=0, atol=1e-6)
        assert torch.equal(drawn[column], again[column])


def test_passes_with_a_gradient_stay_in_training_mode(models: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    trainer = build(KINDS["LoRA"], models, wide, tmp_path)
    trainer.model.train()
    trainer.rollout_func = known
    samples = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in tiny.dataset(4)["prompt"]])
    first, second = (trainer.values(trainer.critic, samples) for _ in range(2))
    assert not torch.equal(first, second)
    with torch.no_grad():
        first, second = (trainer.values(trainer.critic, samples) for _ in range(2))
    assert torch.equal(first, second)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_keeps_its_mode_also_when_a_pass_raises(
    models: dict[str, Path], wide: Path, tmp_path: Path
) -> None:
    trainer = build(KINDS["LoRA, checkpointed"], models, wide, tmp_path)
    trainer.model.train()
    frozen, *_ = [module for module in trainer.model.modules() if isinstance(module, nn.Embedding)]
    frozen.eval()
    before, seen = modes(trainer.model), []
    layer = trainer.model.get_base_model().model.layers[1]
    handle = layer.register_forward_pre_hook(lambda *_: seen.append(modes(trainer.model)))
    measure(trainer)
    assert modes(trainer.model) == before
    assert seen.count(before) == 1 and seen.count([False] * len(before)) == len(seen) - 1 == 3  # the old pass
    handle.remove()

    def fail_in_eval_mode(*_: Any) -> None:
        if not layer.training:
            raise RuntimeError("out of memory")

    layer.register_forward_pre_hook(fail_in_eval_mode)
    ids = torch.full((2, 3), 70)
    samples = {f"{part}_{name}": ids for part in ("prompt", "completion") for name in ("ids", "mask")}
    values = torch.no_grad()(trainer.values)
    for run in (measure, lambda _: values(trainer.critic, samples), lambda _: values(trainer.reward_model, samples)):
        with pytest.raises(RuntimeError, match="memory"):
            run(trainer)
        assert modes(trainer.model) == before


def test_modules_get_a_mode_and_quantised_layers_keep_theirs(wide: Path) -> None:
    model = wide_model.load(wide, "int8")
    model.train()
    model.model.norm.eval()
    before = modes(model)
    with in_mode(model, is_training=False):
        assert {type(module).__name__ for module in model.modules() if module.training} == {"Linear8bitLt"}
    assert modes(model) == before
    with in_mode(model, is_training=True):
        assert all(modes(model))
    assert modes(model) == before
