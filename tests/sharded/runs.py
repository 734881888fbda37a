"""Runs of tiny models on two processes that share one engine, and what each of them leaves.

Each run draws its rollouts, updates the policy several times with each, and saves a checkpoint inside a generation
window. A second trainer resumes from that checkpoint.
"""

import contextlib
import functools
import gc
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.tools import agent, resumable, sharded, tiny, wide
from trl_steady import StepRewards
from trl_steady.reference.part import ReferencePart

Run = dict[str, Any]

STEPS, SAVED, WINDOW_END = 10, 6, 8
COMMON: Run = {
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "num_generations": 8,  # a group is on both processes
    "num_iterations": 2,  # a window is 4 steps
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "epsilon": 5e-3,
    "epsilon_high": 8e-3,
    "beta": 0.04,
    "gradient_checkpointing": False,
    # with Adam's usual epsilon, a gradient of rounding errors would get a step of its own
    "adam_epsilon": 1e-2,
    "learning_rate": 2e-2,
    "max_grad_norm": 0.5,
}
MOVING: Run = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 3}
"""The reference moves after 4 and 8 steps, and the checkpoint is between them."""


def in_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Return steps for some completions, a number for others, and no verdict for a few."""
    rewards: list[Any] = []
    for number, ids in enumerate(completion_ids):
        half, total = max(1, len(ids) // 2), sum(ids) % 7
        steps = StepRewards.at_tokens([total / 3, 1.0][: 1 + (half < len(ids))], sorted({half, len(ids)}))
        rewards.append(None if total == 3 else float(total) if number % 3 == 0 else steps)
    return rewards


def in_steps_on_the_first(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """Return steps in the first half of the global batch, which is on one of two processes, and numbers elsewhere."""
    state, count = PartialState(), len(completion_ids)
    first, half = state.process_index * count, state.num_processes * count // 2
    return [
        StepRewards.at_tokens([float(ids[0] % 5), 0.5][: len(ids)], sorted({1, len(ids)}))
        if place < half
        else float(sum(ids) % 11)
        for place, ids in enumerate(completion_ids, first)
    ]


def disagreeing(prompts: list[str], trainer: Any) -> Run:
    """Return answers and the log-probs of an engine that is off by up to 1.5 nats per token."""
    first = trainer.accelerator.process_index * len(prompts) + 3 * trainer.state.global_step
    answers = [
        [(13 * (first + i) + 5 * t) % 200 + 45 for t in range(1 + (first + i) % 6)] for i in range(len(prompts))
    ]
    logprobs = [[-5.5 + 1.5 * math.sin(first + i + t) for t in range(len(answer))] for i, answer in enumerate(answers)]
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": logprobs}


CALLING: Run = {
    "model": "agent",
    "loss_type": "gspo_token",
    "keep_sampling_mask": True,
    "min_p": 0.05,
    "temperature": 0.9,
    "max_completion_length": 160,
    # TRL lets each process decide alone how often it generates. With one round of calls, all of them generate twice.
    "max_tool_calling_iterations": 1,
    "gradient_checkpointing": True,
    **MOVING,
    "build": {"reward_funcs": in_steps},
}
"""A model that calls tools."""

RUNS: dict[str, Run] = {
    "gspo": {
        "shows": ["gspo", "moving reference, full", "trim_padding"],
        "loss_type": "gspo",
        **MOVING,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "steps": {
        "shows": ["gspo_token", "step rewards", "moving reference, LoRA", "share_prompts", "KL corrections"],
        "loss_type": "gspo_token",
        "kl_estimator": "k2",
        "share_prompts": True,
        **MOVING,
        "lora": True,
        "build": {"reward_funcs": in_steps},
    },
    "engine": {
        "shows": ["KL corrections", "masks", "gspo_token", "step rewards"],
        "loss_type": "gspo_token",
        "kl_ratio_denominator": "sampler",
        "geometric_mask_range": (0.5, 2.0),
        "off_policy_mask_threshold": 0.2,
        "token_veto_threshold": 0.005,
        "vllm_importance_sampling_mode": "token_truncate",
        # every update has all sequences, so that one process trains as two do
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "num_iterations": 4,
        "build": {"rollout_func": disagreeing, "reward_funcs": in_steps_on_the_first},
    },
    "gmpo": {
        "shows": ["gmpo", "ref_model_sync_kl", "router_replay R3"],
        "model": "moe",
        "loss_type": "gmpo",
        "router_replay": "R3",
        **MOVING,
        "ref_model_sync_steps": 7,
        "ref_model_sync_kl": 1e-4,
        "lora": True,
    },
    "reset": {
        "shows": ["ref_model_sync_reset_optimizer"],
        "loss_type": "gspo",
        **MOVING,
        "lora": True,
        "ref_model_sync_reset_optimizer": True,
        "refused": {"ZeRO-2", "ZeRO-3"},
    },
    "nf4": {
        "shows": ["quantised base", "moving reference, quantised base"],
        "model": "wide",
        "base": "nf4",
        "loss_type": "gspo",
        **MOVING,
        "lora": True,
    },
    "nf4 float32": {
        "shows": ["quantised base", "moving reference, quantised base", "adapter_dtype", "keep_sampling_mask"],
        "model": "wide",
        "base": "nf4",
        "loss_type": "dapo",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        **MOVING,
        "lora": True,
        "adapter_dtype": "float32",
        "refused": {"ZeRO-3"},
    },
    "R2": {
        "shows": ["router_replay R2", "gspo", "moving reference, full", "share_prompts"],
        "stays_whole": True,
        "model": "moe",
        "loss_type": "gspo",
        "router_replay": "R2",
        "router_replay_reference": True,
        "router_aux_loss_coef": 0.0,
        "share_prompts": True,
        "gradient_checkpointing": True,
        **MOVING,
    },
    "R3": {
        "shows": ["router_replay R3", "keep_sampling_mask"],
        "model": "moe",
        "loss_type": "dapo",
        "router_replay": "R3",
        "keep_sampling_mask": True,
        "top_p": 0.9,
    },
    "R3 LoRA": {
        "shows": ["router_replay R3", "gspo_token", "step rewards", "moving reference, LoRA"],
        "stays_whole": True,
        "model": "moe",
        "loss_type": "gspo_token",
        "router_replay": "R3",
        **MOVING,
        "lora": True,
        "build": {"reward_funcs": in_steps},
    },
    "tools": {
        "shows": ["keep_sampling_mask", "step rewards", "moving reference, full"],
        **CALLING,
        "learning_rate": 1e-3,
    },
    "tools LoRA": {
        "shows": ["keep_sampling_mask", "step rewards", "moving reference, LoRA"],
        **CALLING,
        "lora": True,
        # an adapter that changes nothing yet, because the model has learned to call tools
        "build": {"reward_funcs": in_steps, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    },
    "budget": {
        "shows": ["token_budget", "router_replay R2", "share_prompts", "keep_sampling_mask", "moving reference, full"],
        "model": "moe",
        "loss_type": "dapo",
        "router_replay": "R2",
        "token_budget": 24,
        "share_prompts": True,
        "router_aux_loss_coef": 0.0,
        "keep_sampling_mask": True,
        "top_p": 0.9,
        **MOVING,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "refused": {"ZeRO-2", "ZeRO-3"},
    },
    "rloo": {
        "shows": ["RLOO", "router_replay R2", "keep_sampling_mask", "moving reference, full"],
        "method": "RLOO",
        "model": "moe",
        "router_replay": "R2",
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "normalize_advantages": True,
        **MOVING,
    },
}
"""Each with the features that it shows, and the engines that refuse it."""

PPO: Run = {
    "method": "PPO",
    "num_generations": 1,
    "beta": 0.0,
    "kl_coef": 0.1,
    "value_learning_rate": 1e-2,
    "lora": True,
    "refused": {"ZeRO-2", "ZeRO-3"},
}
TEXTS = Dataset.from_dict({"text": [f"{i}+{i}={2 * i}" * (1 + i % 3) for i in range(11)]})
RUNS |= {
    "ppo": {
        "shows": ["PPO, LoRA", "moving reference, LoRA", "step rewards", "ptx_coef"],
        **PPO,
        **MOVING,
        "kl_target": 0.5,
        "kl_horizon": 64,
        "value_updates": 2,
        "value_warmup_steps": 1,
        "bootstrap_truncated": True,
        "ptx_coef": 0.2,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "build": {"reward_funcs": in_steps, "ptx_dataset": TEXTS},
    },
    # the checkpoint is inside the warm-up
    "ppo warm-up": {
        "shows": ["PPO, LoRA", "token_budget", "share_prompts"],
        **PPO,
        "stays_whole": True,
        "saves_shards": True,
        "value_warmup_steps": 7,
        "token_budget": 24,
        "share_prompts": True,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "build": {"value_peft_config": LoraConfig(r=2, target_modules="all-linear")},
    },
    "ppo nf4": {
        "shows": ["PPO, quantised base", "adapter_dtype", "ref_model_sync_reset_optimizer"],
        "model": "wide",
        "base": "nf4",
        **PPO,
        **MOVING,
        "adapter_dtype": "float32",
        "ref_model_sync_reset_optimizer": True,
    },
}

RESIZED = (("gspo", SAVED), ("gspo", WINDOW_END), ("engine", WINDOW_END))
"""Checkpoints from which one process also resumes."""
for _name, _ in RESIZED:
    RUNS[_name]["save_steps"] = 2
RUNS["engine"]["saves_shards"] = True


OF_CRITIC = ("ppo", "ppo warm-up", "ppo nf4")
"""Runs that show PPO."""
OF_TOKENS = ("R2", "R3", "R3 LoRA", "tools", "tools LoRA", "budget", "rloo")
"""Runs that show what is kept or computed per token. The others show losses and references."""


def runs_of(engine: str, *, of_tokens: bool = False, of_critic: bool = False) -> list[str]:
    """Return the runs that an engine does not refuse."""
    group = of_tokens, of_critic
    return [
        name
        for name, run in RUNS.items()
        if (name in OF_TOKENS, name in OF_CRITIC) == group and engine not in refusing(run)
    ]


def refusing(run: Run) -> set[str]:
    """Return the engines that refuse a run."""
    return run.get("refused", set())


def features(names: Iterable[str]) -> set[str]:
    """Return the features that runs show."""
    return {"exact resume", *(feature for name in names for feature in RUNS[name]["shows"])}


def build(name: str, engine: str, models: dict[str, Path], output: Path, **changes: Any) -> Any:
    """Return the trainer of a run."""
    options: Run = {**COMMON, **RUNS[name], **changes}
    for key in ("shows", "refused"):
        options.pop(key, None)
    of_fsdp2 = {name: options.pop(name) for name in ("saves_shards", "stays_whole") if name in options}
    options |= sharded.options(engine, **of_fsdp2)
    folder = models[options.pop("model", "dense")]
    if options.pop("base", None):
        # FSDP2 shards floating-point tensors only
        quantised = BitsAndBytesConfig(**wide.NF4, bnb_4bit_quant_storage=torch.float32)
        options["model_init_kwargs"] = {"quantization_config": quantised, "dtype": "float32", "device_map": None}
    if folder == models["agent"]:
        build = {"tools": agent.tools([]), "train_dataset": agent.dataset(agent.one_by_one)}
        options["build"] = {**build, "processing_class": agent.tokenizer(), **options.get("build", {})}
    if "peft_config" in (options.get("build") or {}):
        options["lora"] = False
    torch.manual_seed(0)  # the adapter of every engine
    return tiny.trainer(folder, output, **options)


@contextlib.contextmanager
def reseeded() -> Iterator[None]:
    """Draw each turn of a rollout from a seed of its own.

    Under FSDP2 and ZeRO-3, a process that has finished its answers keeps generating until the other has finished too.
    Without new seeds, its next rollout would draw other tokens than under DDP.
    """
    with contextlib.ExitStack() as stack:
        for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
            turn = functools.partial(_reseeded_turn, kind._generate_single_turn)
            stack.enter_context(patch.object(kind, "_generate_single_turn", functools.partialmethod(_called, turn)))
        yield


def _called(trainer: Any, turn: Any, *arguments: Any, **options: Any) -> Any:
    return turn(trainer, *arguments, **options)


def _reseeded_turn(generate: Any, trainer: Any, prompt_ids: list[list[int]], *arguments: Any, **options: Any) -> Any:
    # the prompt of a later turn is longer
    torch.manual_seed(1000 * trainer.state.global_step + 2 * len(prompt_ids[0]) + trainer.accelerator.process_index)
    return generate(trainer, prompt_ids, *arguments, **options)


def reference(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a reference that moves, as the trainer has them."""
    callback = trainer.part(ReferencePart).callback
    return {pair.name: pair.reference for pair in callback.pairs()} if callback else {}


def critic(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a critic, as the trainer has them."""
    return dict(trainer.critic.named_parameters()) if hasattr(trainer, "critic") else {}


def state(trainer: Any) -> dict[str, Any]:
    """Return this process' part of all that a resumed run must have in common with the uninterrupted one."""
    return {
        "policy": {name: sharded.bits(sharded.local(p)) for name, p in trainer.model.named_parameters()},
        "reference": {name: sharded.bits(sharded.local(tensor)) for name, tensor in reference(trainer).items()},
        "critic": {name: sharded.bits(sharded.local(p)) for name, p in critic(trainer).items()},
        "kl_coef": getattr(trainer, "kl_coef", None),
        "refreshes": [tuple(refresh) for refresh in trainer.reference_refreshes],
        "history": tiny.history(trainer)[:-1],  # the last row is a summary of this process
    }


def do(name: str, engine: str, models: dict[str, Path], output: Path) -> dict[str, Any]:
    """Do a run and return what it leaves. Under an engine other than DDP, also save its model and resume it."""
    trainer = build(name, engine, models, output)
    trainer.train()
    ended = state(trainer)
    of_critic = set(map(id, critic(trainer).values()))
    parameters = {name: p for name, p in trainer.model.named_parameters() if id(p) not in of_critic}
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    base = {
        name: p for name, p in parameters.items() if not p.requires_grad and not {"ref", "value"} & {*name.split(".")}
    }
    result = {
        "distributed": trainer.accelerator.distributed_type.value,
        "trained": sharded.whole(trained),
        "base": {name: sharded.bits(tensor) for name, tensor in sharded.whole(base).items()},
        "reference": sharded.whole(reference(trainer)),
        "critic": sharded.whole(critic(trainer)),
        "here of critic": sum(sharded.local(p).numel() for p in critic(trainer).values()),
        "here": sum(sharded.local(p).numel() for p in trained.values()),
        "refreshes": ended["refreshes"],
        "history": ended["history"],
    }
    if engine != "DDP":
        trainer.save_model(str(output / "saved"))
        resumed = build(name, engine, models, output / "resumed")
        resumed.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED}"))
        result["differences of the resumed run"] = resumable.differences(ended, state(resumed))
    return result


def work(rank: int, *, engine: str, models: dict[str, Path], output: Path, names: Iterable[str] = RUNS) -> None:
    """Do the runs of an engine on this process, and write what each leaves, or the error that refuses it."""
    sharded.enable(engine)
    for name in names:
        folder = output / engine / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with reseeded():
                result = do(name, engine, models, folder)
        except ValueError as error:
            if engine not in refusing(RUNS[name]):
                raise
            result = {"refused": str(error)}
        gc.collect()  # DeepSpeed's config of this run, which transformers finds as long as it is alive
        torch.save(result, folder / f"rank_{rank}.pt")


def resize(rank: int, *, engine: str, models: dict[str, Path], output: Path) -> None:
    """Resume runs of two processes on one, inside a window and at its end, and write what each leaves."""
    sharded.enable(engine)
    for name, step in RESIZED:
        folder = output / engine / name
        # at the end of a window, the same global batch is asked for
        times = 2 if step == WINDOW_END else 1
        size = times * {**COMMON, **RUNS[name]}["per_device_train_batch_size"]
        trainer = build(name, engine, models, folder / f"alone-{step}", per_device_train_batch_size=size)
        result: dict[str, Any]
        try:
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        except Exception as error:  # the engine's own
            result = {"refused": f"{type(error).__name__}: {error}"}
        else:
            trained = sharded.whole(dict(trainer.model.named_parameters()))
            result = {"trained": trained, "history": tiny.history(trainer)[:-1]}
        torch.save(result, folder / f"alone-{step}" / f"rank_{rank}.pt")
        del trainer
        gc.collect()
