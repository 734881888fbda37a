"""Settings, models and losses with which passes keep their padding or a budget is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig
from torch import Tensor

import trl_steady
from tests.padding.test_unpadded import ROLLOUT, UNEQUAL
from tests.tools import tiny
from trl_steady.padding import part as padding_part


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget=0 cannot work. Set token_budget to 1 token or more"),
        (
            {"token_budget": 9, "trim_padding": False},
            "token_budget=9 does not work with trim_padding=False.*Set trim_padding=True",
        ),
        ({"share_prompts": True, "trim_padding": False}, "share_prompts=True does not work with trim_padding=False"),
        (
            {"token_budget": 9, "loss_type": "bnpo"},
            "token_budget=9 does not work with loss_type='bnpo'.*Set loss_type='dapo'",
        ),
        (
            {"token_budget": 9, "entropy_coef": 0.1},
            "token_budget=9 does not work with entropy_coef=0.1.*Switch it off",
        ),
        ({"token_budget": 9, "use_adaptive_entropy": True}, "use_adaptive_entropy=True.*Switch it off"),
        ({"token_budget": 9, "top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2.*Set top_entropy_quantile=1.0"),
        (
            {"token_budget": 9, "model": "moe"},
            "token_budget=9 does not work with a load-balancing loss.*Set router_aux_loss_coef=0.0",
        ),
        (
            {"share_prompts": True, "model": "moe"},
            "share_prompts=True would count a prompt once.*router_aux_loss_coef=0",
        ),
        (
            {"token_budget": 9, "torch_compile": True},
            "token_budget=9 needs passes without padding, and torch.compile recompiles",
        ),
        *(
            ({"token_budget": 9, "optim": name}, r"lomo, adalomo and \*_layerwise would step each time")
            for name in ("lomo", "galore_adamw_layerwise", "galore_adafactor_layerwise", "apollo_adamw_layerwise")
        ),
        (
            {"token_budget": 9, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_kl": 0.1},
            "token_budget=9 does not work with ref_model_sync_kl=0.1.*Leave one of the two unset",
        ),
        ({"share_prompts": True, "model": "gpt2"}, "GPT2LMHeadModel has no rotary positions. Set share_prompts=False"),
        (
            {"share_prompts": True, "model_init_kwargs": {"attn_implementation": "of_a_script"}},
            "attn_implementation='of_a_script' has not been tested with packing; 'sdpa', 'eager', 'flex_attention' "
            "and FlashAttention have. Set",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = models[options.pop("model", "dense")]
    with pytest.raises(ValueError, match=message):
        tiny.trainer(model, tmp_path, **options)


@pytest.mark.refuses(
    "token_budget",
    on=("ZeRO-2", "ZeRO-3"),
    message="token_budget=9 runs backward more than once in the last micro-batch of an optimizer step. DeepSpeed and "
    "the optimizers lomo, adalomo and *_layerwise would step each time. Train with DDP and another optimizer, or "
    "leave token_budget unset.",
)
def test_deepspeed_is_refused_a_budget(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding_part, "DistributedType", SimpleNamespace(DEEPSPEED=accelerate.DistributedType.NO))
    with pytest.raises(ValueError, match=r"DeepSpeed and the optimizers .* would step each time\. Train with DDP"):
        tiny.trainer(models["dense"], tmp_path, token_budget=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile": True}, "trim_padding=True does nothing: torch.compile recompiles"),
        ({"neftune_noise_alpha": 5.0}, "trim_padding=True does nothing: neftune_noise_alpha scales"),
        (
            {"build": {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}},
            "trim_padding=True does nothing: an adapter of type PromptTuningConfig may depend on the position",
        ),
        (
            {"build": {"peft_config": LoraConfig(**tiny.LORA, task_type="CAUSAL_LM", alora_invocation_tokens=[50])}},
            "trim_padding=True does nothing: an adapter of type LoraConfig may depend on the position",
        ),
        (
            {"model": "falcon_h1"},
            "trim_padding=True only cuts columns that are padding in every row: FalconH1ForCausalLM",
        ),
    ],
)
def test_what_keeps_its_padding_is_said(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = models[options.pop("model", "dense")]
    with pytest.warns(UserWarning, match=message):
        tiny.trainer(model, tmp_path, **options)


def test_a_loss_of_its_own_is_refused_a_budget(models: dict[str, Path], tmp_path: Path) -> None:
    """It would see the last of the step's micro-batches only."""

    class Doubled(trl_steady.GRPOTrainer):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
            return 2 * super().compute_loss(*arguments, **keywords)

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, token_budget=9)
    with pytest.raises(ValueError, match=r"Doubled\.compute_loss would see only the last.*Override micro_batch_loss"):
        Doubled(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())


def test_a_loss_that_a_callback_sets_is_refused_too(models: dict[str, Path], tmp_path: Path) -> None:
    trainer: Any = tiny.trainer(models["dense"], tmp_path, token_budget=30, **ROLLOUT)

    class Sets(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.loss_type = "bnpo" if state.global_step == 2 else "dapo"

    trainer.add_callback(Sets())
    with pytest.raises(ValueError, match="token_budget=30 does not work with loss_type='bnpo'"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_lengths_that_are_not_of_the_mask_are_found(models: dict[str, Path], tmp_path: Path) -> None:
    """A script changes a mask after the rollout; tokens without a length would get a log-prob of 0."""

    class Changes(trl_steady.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
            inputs["completion_mask"] = torch.ones_like(inputs["completion_mask"])
            if self.state.global_step:
                del inputs["lengths"]
            return super().compute_loss(model, inputs, *arguments, **keywords)

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, max_steps=2)
    build: dict[str, Any] = {"processing_class": tiny.tokenizer(), "rollout_func": UNEQUAL}
    trainer = Changes(str(models["dense"]), tiny.reward, args, tiny.dataset(), **build)
    with pytest.raises(RuntimeError, match="is not that of its rollout"):
        trainer.train()
    trainer.state.global_step = 1
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert "lengths" in batch
    assert trainer.compute_loss(trainer.model, batch).isfinite()


def test_a_budget_wants_whole_sequences(models: dict[str, Path], tmp_path: Path) -> None:
    trainer: Any = tiny.trainer(models["dense"], tmp_path, token_budget=30)
    mask = torch.tensor([[1, 1, 0, 1]])
    with torch.no_grad(), pytest.raises(ValueError, match="token_budget=30 needs sequences without padding between"):
        trainer.log_probs(trainer.model, mask, mask, 2)
