"""Tiny models, a byte tokenizer, a dataset and a reward, and the trainers of TRL and ours on them."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import FalconH1Config, GPT2Config, PreTrainedTokenizerFast, Qwen2Config, Qwen3MoeConfig

import trl_steady

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": len(_BYTES) + 2,
    "initializer_range": 0.5,  # spread logits, so that a few updates move the ratios visibly
    "eos_token_id": [len(_BYTES), *range(40)],  # many ends: completions of unequal length
    "pad_token_id": len(_BYTES) + 1,
}
CONFIGS = {
    "dense": Qwen2Config(**SIZES),
    "moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt2": GPT2Config(
        **SIZES, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=SIZES["pad_token_id"]
    ),
    "falcon_h1": FalconH1Config(
        **SIZES, mamba_d_ssm=16, mamba_n_heads=4, mamba_d_head=4, mamba_d_state=8, mamba_chunk_size=8
    ),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    vocabulary = {byte: i for i, byte in enumerate(_BYTES)}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", padding_side="left", truncation_side="left"
    )


def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def dataset(rows: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{'ab' * (i % 3)}{i}+{i + 1}=" for i in range(rows)]})


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Arbitrary, deterministic, different within a group."""
    return [float(sum(ids) % 11 + len(ids)) for ids in completion_ids]


def arguments(config: type[trl.GRPOConfig], output_dir: Path, **options: Any) -> trl.GRPOConfig:
    """6 optimizer steps on CPU in float32, everything logged."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 7,
        "disable_tqdm": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the configs' own warnings have tests of their own
        return config(output_dir=str(output_dir), **{**defaults, **options})


def trainer(
    model: Any,
    output_dir: Path,
    *,
    ours: bool = True,
    lora: bool = False,
    padded: bool = False,
    build: dict[str, Any] | None = None,
    method: str = "GRPO",
    **options: Any,
) -> Any:
    """A trainer, ours or TRL's, with `options` of the config and `build` for the constructor.

    `padded`: ours pads as TRL does, so that it can be TRL bit for bit.
    """
    package = trl_steady if ours else trl
    if ours and padded:
        options["trim_padding"] = False
    if ours and "rollout_func" in (build or {}):
        options = {"engine_check": None, **options}  # no model has its log-probs
    args = arguments(getattr(package, f"{method}Config"), output_dir, **options)
    keywords: dict[str, Any] = {"train_dataset": dataset(), "processing_class": tokenizer(), **(build or {})}
    if lora:
        keywords["peft_config"] = LoraConfig(**LORA)
    model = str(model) if isinstance(model, Path) else model
    kind = getattr(package, f"{method}Trainer")
    return kind(model=model, reward_funcs=keywords.pop("reward_funcs", reward), args=args, **keywords)


def train(trainer: trl.GRPOTrainer) -> trl.GRPOTrainer:
    trainer.train()
    return trainer


def history(trained: trl.GRPOTrainer) -> list[dict[str, float]]:
    """What was logged, less what a clock measured."""
    clocks = ("runtime", "per_second", "step_time")
    return [{k: v for k, v in row.items() if not any(c in k for c in clocks)} for row in trained.state.log_history]


def parameters(trained: trl.GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trained.model.named_parameters()}


class Gradients(transformers.TrainerCallback):
    """Keep the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: each.grad.clone() for name, each in named if each.grad is not None})
