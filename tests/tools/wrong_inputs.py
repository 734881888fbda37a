"""Models and data that a user gets wrong, with what each message says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import trl
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import trl_steady
from tests.tools import tiny

Make = Callable[[dict[str, Path], Path], Any]


class Input(NamedTuple):
    """What the user hands to the trainer beside a config that is right by itself."""

    name: str
    make: Make
    """Builds the trainer."""
    message: str
    """Regular expression: names the input and its value, and the way out."""
    kind: type = ValueError
    stage: str = "trainer"
    """Where it is said: `trainer`, its construction, or `rollout`, the first one."""
    is_ours: bool = True
    """False: TRL's own message."""


def trainer(model: str = "dense", **keywords: Any) -> Make:
    return lambda models, folder: tiny.trainer(models[model], folder, **{"max_steps": 1, **keywords})


def building(model: str = "dense", **build: Any) -> Make:
    return trainer(model, build=build)


def answering(function: Any, **options: Any) -> Make:
    return trainer(build={"reward_funcs": function}, **options)


def trls_config(models: dict[str, Path], folder: Path) -> Any:
    args = trl.GRPOConfig(str(folder), use_cpu=True)
    return trl_steady.GRPOTrainer(str(models["dense"]), tiny.reward, args, tiny.dataset())


def frozen(models: dict[str, Path], folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(models["dense"]).requires_grad_(False)
    return tiny.trainer(model, folder, build={"processing_class": tiny.tokenizer()})


def with_adapter_ref(models: dict[str, Path], folder: Path) -> Any:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(models["dense"]), LoraConfig(**tiny.LORA))
    model.add_adapter("ref", LoraConfig(**tiny.LORA))
    return tiny.trainer(model, folder, sync_ref_model=True, beta=0.1)


class Replaced(trl_steady.GRPOTrainer):
    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        return super().compute_loss(*arguments, **keywords)


def replaced(models: dict[str, Path], folder: Path) -> Any:
    args = tiny.arguments(trl_steady.GRPOConfig, folder, token_budget=64)
    return Replaced(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())


PROMPT_TUNING = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
ENGINE = r"with the engine that samples.*Set use_vllm=True, or leave"
COMPILED = {"torch_compile": True}

SETUPS = [
    Input(
        "TRL's config", trls_config, r"args is a trl\.trainer\.grpo_config\.GRPOConfig.*Import both: from trl_steady"
    ),
    Input(
        "a frozen model",
        frozen,
        r"the model has no trainable parameter.*Set requires_grad=True on some, or .*is_trainable=True",
    ),
    Input("an adapter ref", with_adapter_ref, r"has an adapter named 'ref'.* Delete it with model\.delete_adapter"),
    Input("adapter_dtype alone", trainer(adapter_dtype="float32"), r"='float32' would be ignored.*Leave it unset, or"),
    Input("a denominator", trainer(kl_ratio_denominator="sampler", beta=0.1), rf"='sampler' compares .*{ENGINE}"),
    Input("a geometric mask", trainer(geometric_mask_range=(0.9, 1.1)), rf"=\(0\.9, 1\.1\) compares .*{ENGINE}"),
    Input("a veto", trainer(token_veto_threshold=1e-4), rf"token_veto_threshold=0\.0001 compares .*{ENGINE}"),
    Input(
        "replay, dense", trainer(router_replay="R2"), r"router_replay='R2': Qwen2.* has no routers.*Leave router_re"
    ),
    Input(
        "R3, a rollout_func",
        trainer("moe", router_replay="R3", build={"rollout_func": print}),
        r"router_replay='R3' does not work with a rollout_func.*Leave rollout_func unset, or set router_replay='R2'",
    ),
    Input(
        "R3, continuous batching",
        trainer("moe", router_replay="R3", use_transformers_continuous_batching=True),
        r"router_replay='R3' does not work with use_transformers_continuous_batching=True.*Set it to False",
    ),
    Input("R2, compiled", trainer("moe", router_replay="R2", **COMPILED), r"='R2' patches.*Set torch_compile=False"),
    Input(
        "R2, prompt tuning",
        trainer("moe", router_replay="R2", build={"peft_config": PROMPT_TUNING}),
        r"router_replay='R2' does not work with prompt learning.*Train LoRA adapters, or leave router_replay unset",
    ),
    Input(
        "share_prompts, Mamba",
        trainer("falcon_h1", share_prompts=True),
        r"share_prompts=True needs packed sequences.*Set share_prompts=False",
    ),
    Input(
        "share_prompts, balance",
        trainer("moe", share_prompts=True, router_aux_loss_coef=0.1),
        r"share_prompts=True would count a prompt once.*Set router_aux_loss_coef=0\.0, or share_prompts=False",
    ),
    Input(
        "token_budget, balance",
        trainer("moe", token_budget=64, router_aux_loss_coef=0.1),
        r"token_budget=64 does not work with a load-balancing loss.*Set router_aux_loss_coef=0\.0, or leave token_",
    ),
    Input(
        "token_budget, LOMO",
        trainer(token_budget=64, optim="lomo"),
        r"token_budget=64 .*lomo, adalomo and .*Train with DDP and another optimizer, or leave token_budget unset",
    ),
    Input(
        "token_budget, NEFTune",
        trainer(token_budget=64, neftune_noise_alpha=5.0),
        r"token_budget=64 needs passes without padding, and neftune_noise_alpha.*Leave token_budget unset",
    ),
    Input("token_budget, compute_loss", replaced, r"token_budget=64 .*Replaced\.compute_loss.*Override micro_batch_l"),
    Input(
        "padding, NEFTune",
        trainer(neftune_noise_alpha=5.0),
        r"trim_padding=True does nothing: neftune_noise_alpha .*Change that, or set trim_padding=False",
        UserWarning,
    ),
    Input(
        "an idle mask, on-policy",
        trainer(off_policy_mask_threshold=0.1, steps_per_generation=1, loss_type="grpo"),
        r"off_policy_mask_threshold=0\.1 cannot act.*Set steps_per_generation=4",
        UserWarning,
    ),
    Input(
        "an idle mask, clipped",
        trainer(off_policy_mask_threshold=0.1, loss_type="gspo"),
        r"off_policy_mask_threshold=0\.1 cannot act with one advantage per sequence.*Set it to None or to a lower",
        UserWarning,
    ),
]

DATA = [
    Input(
        "two rows",
        building(train_dataset=tiny.dataset(2)),
        r"train_dataset has 2 rows, .* needs 4 prompts .*Use a da",
        stage="rollout",
    ),
    Input(
        "weights of 0",
        trainer(reward_weights=[0.0]),
        r"reward_weights=\[0\.0\] sets all rewards to 0.*Set one of the weights",
        UserWarning,
    ),
]

INPUTS = [*SETUPS, *DATA]
