"""Do runs of tiny models on two processes that share one engine, and write what each of them leaves.

Each run draws its rollouts, updates the policy several times with each, and saves a checkpoint inside a generation
window. A second trainer resumes from that checkpoint.
"""

import contextlib
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl
from transformers import BitsAndBytesConfig

from tests.distributed import sharded
from tests.sharded.runs import COMMON, RUNS, SAVED, Run, refusing
from tests.tools import agent, resumable, tiny, wide
from trl_steady.features.reference.feature import Reference


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
    callback = trainer.feature(Reference).callback
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
