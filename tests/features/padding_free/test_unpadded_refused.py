"""Settings, models and losses with which passes keep their padding or a budget is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from torch import Tensor

import trl_steady
from tests.features.padding_free.rollouts import UNEQUAL
from tests.tools import tiny
from trl_steady.features.padding_free.feature import PaddingFree

BUDGET = {"token_budget": 9}
SHARES = {"share_prompts": True}
OF_A_SCRIPT = {"model_init_kwargs": {"attn_implementation": "of_a_script"}}
ALORA = LoraConfig(**tiny.LORA, task_type="CAUSAL_LM", alora_invocation_tokens=[50])
PROMPTS = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**BUDGET, "model": "moe"}, "token_budget=9 .*router_aux_loss_coef is not 0"),
        ({**BUDGET, "torch_compile": True}, "token_budget=9 .*torch.compile recompiles"),
        ({**BUDGET, "optim": "lomo"}, "token_budget=9 .*lomo.* step each time"),
        ({**SHARES, "model": "moe"}, "share_prompts=True .*router_aux_loss_coef is not 0"),
        ({**SHARES, **OF_A_SCRIPT}, "share_prompts=True .*attn_implementation='of_a_script' has not been tested"),
    ],
    ids=str,
)
def test_options_that_need_packed_text_and_one_backward_are_refused(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = models[options.get("model", "dense")]
    with pytest.raises(ValueError, match=message):
        tiny.trainer(model, tmp_path, **{name: value for name, value in options.items() if name != "model"})


@pytest.mark.refuses(
    "token_budget",
    on=("ZeRO-2", "ZeRO-3"),
)
def test_a_budget_is_refused_under_deepspeed(models: dict[str, Path], tmp_path: Path) -> None:
    trainer: Any = tiny.trainer(models["dense"], tmp_path, token_budget=9)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"token_budget=9 .*DeepSpeed.* step each time"):
        trainer.feature(PaddingFree).on_init_end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "has no effect because neftune_noise_alpha scales"),
        ({"build": {"peft_config": PROMPTS}}, "has no effect because an adapter of type PromptTuningConfig"),
        ({"build": {"peft_config": ALORA}}, "has no effect because an adapter of type LoraConfig"),
        ({"model": "falcon_h1"}, "only cuts columns that are padding in every row because FalconH1ForCausalLM"),
    ],
)
def test_the_trainer_warns_of_padding_that_it_keeps(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = models[options.pop("model", "dense")]
    with pytest.warns(UserWarning, match=f"trim_padding=True {message}"):
        tiny.trainer(model, tmp_path, **options)


def test_a_loss_of_its_own_is_refused_a_budget(models: dict[str, Path], tmp_path: Path) -> None:
    """It would see the last of the step's micro-batches only."""

    class Doubled(trl_steady.GRPOTrainer):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
            return 2 * super().compute_loss(*arguments, **keywords)

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, token_budget=9)
    with pytest.raises(ValueError, match=r"Doubled\.compute_loss would see only the last.*override _compute_loss"):
        Doubled(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())


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
