"""transformers' options of gradient checkpointing: every gradient is, bit for bit, that without checkpointing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from tests.tools import families, host, resumable, tiny
from tests.tools import wide as wide_model
from tests.trainers import images

OPTIONS: list[dict[str, Any]] = [
    {"every_n_layers": 2},
    {"offload": True},
    {"every_n_layers": 2, "offload": True, "use_reentrant": False},
]
FREE = {"router_aux_loss_coef": 0.0}
REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "R2, padding-free": {"router_replay": "R2", "num_iterations": 2, **FREE},
    "PPO, a critic on the policy's base": {"method": "PPO", "lora": True},
    "GRPO": {},
    "padded": {"padded": True, "num_iterations": 2},
    "RLOO": {"method": "RLOO"},
    "PPO, a critic of its own": {"method": "PPO"},
    "LoRA, a moving reference": {"lora": True, **REFERENCE},
    "full, a moving reference": REFERENCE,
    "shared prompts, a token budget": {
        "share_prompts": True,
        "token_budget": 40,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
    },
    "R3, shared prompts": {
        "router_replay": "R3",
        "router_replay_reference": True,
        "share_prompts": True,
        "token_budget": 40,
        "gradient_accumulation_steps": 2,
        **FREE,
        **REFERENCE,
    },
    "R2, LoRA": {"router_replay": "R2", "lora": True, "num_iterations": 2, **FREE},
    "a kept sampling mask": {"keep_sampling_mask": True, "top_p": 0.8, "temperature": 0.7},
}
KINDS = {
    "deepseek_v3": True,
    "gpt_oss": True,
    "mixtral": True,
    "llama": False,
    "gemma3_text": False,
    "qwen3": False,
    "falcon_h1": False,
    "gpt2": False,
}
"""Types of models, and whether they are mixtures."""

llava = images.llava


def layers(model: nn.Module) -> list[Any]:
    """The layers that can be computed again, in their order."""
    kind = transformers.modeling_layers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, kind)]


class Watched(tiny.Gradients):
    """Keep gradients, and which layers are computed again in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[list[bool]] = []

    def on_pre_optimizer_step(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
        super().on_pre_optimizer_step(*arguments, model=model, **others)
        self.again.append([layer.gradient_checkpointing for layer in layers(model)])


def run(folder: Path, output: Path, case: dict[str, Any], **options: Any) -> tuple[Any, Watched]:
    watched = Watched()
    trainer = tiny.trainer(folder, output, **{"max_steps": 5, **case, **options})
    trainer.add_callback(watched)
    return tiny.train(trainer), watched


def assert_the_same_run(folder: Path, output: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the run without checkpointing, which those with each option must repeat."""
    kept, expected = run(folder, output, case, gradient_checkpointing=False)
    assert len(expected.steps) == 5 and not any(map(any, expected.again))
    for options in OPTIONS:
        taken = host.give(monkeypatch)
        trainer, found = run(
            folder, output, case, gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(options)
        )
        # in each step, and so after all the times that TRL has switched checkpointing off and on
        of_policy = [number % options.get("every_n_layers", 1) == 0 for number in range(len(found.again[0]))]
        assert found.again == [of_policy] * 5
        critic = getattr(trainer, "critic", None)
        if critic is not None:
            assert [layer.gradient_checkpointing for layer in layers(critic.backbone)] == of_policy
            assert resumable.differences(critic.state(), kept.critic.state()) == []
        assert (taken.taken > 0) == options.get("offload", False)
        assert taken.held == 0
        assert resumable.differences(found.steps, expected.steps) == []
        assert resumable.differences(tiny.parameters(trainer), tiny.parameters(kept)) == []
        assert tiny.history(trainer) == tiny.history(kept)
    return kept


def changes_routes(trainer: Any) -> bool:
    """True if routers would have chosen other experts by themselves."""
    return max(row.get("routing/changed", 0) for row in tiny.history(trainer)) > 0


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_without_checkpointing(
    case: dict[str, Any], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = assert_the_same_run(models["moe" if "router_replay" in case else "dense"], tmp_path, case, monkeypatch)
    assert "router_replay" not in case or changes_routes(kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_kind_of_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed, if it is a mixture: that of DeepSeek has no router in its first layer, the only one computed again."""
    folder = tmp_path / kind
    ends = ("vocab_size", "eos_token_id", "pad_token_id", "initializer_range")
    config = families.config(kind, **{name: tiny.SIZES[name] for name in ends})
    families.build(kind, own=config).save_pretrained(folder)
    case: dict[str, Any] = {"num_iterations": 2}
    if KINDS[kind]:
        case |= {"router_replay": "R2", **FREE}
    kept = assert_the_same_run(folder, tmp_path, case, monkeypatch)
    assert not KINDS[kind] or changes_routes(kept)


@pytest.mark.slow
def test_gradients_with_images(llava: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers counts the layers of the vision model first."""
    folder, processor = llava
    data = {"train_dataset": images.pictures(), "processing_class": processor}
    assert_the_same_run(folder, tmp_path, {"build": data}, monkeypatch)


@pytest.mark.slow
def test_gradients_on_a_quantised_base(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_quantised(*arguments: Any, **options: Any) -> Any:
        return trainer(wide_model.load(wide, "nf4"), *arguments[1:], **options)

    trainer = tiny.trainer
    monkeypatch.setattr(tiny, "trainer", of_quantised)
    assert_the_same_run(wide, tmp_path, {"lora": True, "learning_rate": 1e-3, "beta": 0.1}, monkeypatch)


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resume_inside_a_window_trains_before_its_first_rollout(
    models: dict[str, Path], tmp_path: Path, lora: bool
) -> None:
    """On a machine without an accelerator, where torch cannot pin memory."""
    options: dict[str, Any] = {
        "gradient_checkpointing_kwargs": {"offload": True, "every_n_layers": 2},
        **{"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "lora": lora},
    }
    whole = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    resumed = tiny.trainer(models["dense"], tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumable.differences(tiny.parameters(resumed), tiny.parameters(whole)) == []


def test_a_copy_of_the_model_switches_its_own_layers(models: dict[str, Path], tmp_path: Path) -> None:
    given = {"every_n_layers": 2}
    model = tiny.trainer(models["dense"], tmp_path, gradient_checkpointing_kwargs=given).model
    twin = copy.deepcopy(model)
    for own in (model, twin):
        own.gradient_checkpointing_disable()
    twin.gradient_checkpointing_enable({"every_n_layers": 3, "use_reentrant": False})
    assert [layer.gradient_checkpointing for layer in layers(twin)] == [True, False]
    assert [layer.gradient_checkpointing for layer in layers(model)] == [False, False]
    assert given == {"every_n_layers": 2}
