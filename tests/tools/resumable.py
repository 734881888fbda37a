"""Runs with a moving reference in processes of their own, which may be killed at any moment and resumed."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.tools import tiny, wide
from trl_steady.features.critic.feature import Critic
from trl_steady.features.reference.feature import Reference
from trl_steady.features.reward_model.feature import RewardModel

KINDS = ("full", "lora", "nf4")
STEPS = 18
# A window is 4 steps, an epoch 12; checkpoints at 3, 6, 9 and 15 lie inside a window. A move is due at 7 and 14, and
# comes after 8 and 16: a run resumed at 9 or 12 reads the restored reference in its rollout at 12.
OPTIONS: dict[str, Any] = {
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "ref_model_sync_steps": 7,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
    "build": {"train_dataset": tiny.dataset(6)},
}

# what a signal interrupts -> a method of the trainer on the way
PLACES = {
    "data": "get_batch_samples",
    "rollout": "_generate",
    "loss": "compute_loss",
    "log": "log",
    "evaluation": "evaluate",
    "save": "_save_checkpoint",
}


def build(kind: str, folder: Path, output: Path, **options: Any) -> Any:
    """A trainer; `folder` holds the model. `then`, a function that can be pickled, gets the trainer before it runs."""
    model = wide.load(folder, "nf4") if kind == "nf4" else folder
    then = options.pop("then", None)
    trainer = tiny.trainer(model, output, lora=kind != "full", **{**OPTIONS, **options})
    if then is not None:
        then(trainer)
    return trainer


def state(trainer: Any) -> dict[str, Any]:
    """All that a resumed run must have in common with one that was never killed."""
    moving, critic = trainer.feature(Reference).callback, getattr(trainer, "critic", None)
    return {
        "policy": {k: v.clone() for k, v in trainer.model.state_dict().items() if isinstance(v, torch.Tensor)},
        "reference": {pair.name: pair.reference.clone() for pair in moving.pairs()} if moving else {},
        "critic": {name: tensor.clone() for name, tensor in critic.state().items()} if critic else {},
        "critic optimizer": trainer.feature(Critic).optimizer.state_dict() if critic else {},
        "kl_coef": getattr(trainer, "kl_coef", None),
        "reward model": of_reward_model(trainer.feature(RewardModel)),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "groups": trainer.optimizer.state_dict()["param_groups"],
        "refreshes": [tuple(refresh) for refresh in trainer.reference_refreshes],
        # without the summary row, which tells of this process only, and without clocks
        "history": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in tiny.history(trainer)[:-1]],
    }


def of_reward_model(feature: RewardModel) -> dict[str, Any]:
    """A reward model, and what retrains it. Every process must call this function."""
    refresher, found = feature.refresher, {}
    if feature.model is not None:
        found["weights"] = {name: tensor.clone() for name, tensor in feature.model.state().items()}
    if refresher is not None:
        found |= {
            "completions": [list(each) for each in refresher._gather_completions()],
            "rollouts": refresher._rollouts,
            "refreshes": [tuple(refresh) for refresh in refresher.refreshes],
            "optimizer": refresher.optimizer.state_dict(),
            "history": refresher.history.state(),
        }
    return found


def kill_before(event: str, pattern: str, count: int) -> None:
    """SIGKILL this process right before the `count`-th audit event whose first argument contains `pattern`."""
    seen = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == event and pattern in str(arguments[:2]):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def interrupt(trainer: Any, place: str, step: int) -> None:
    """Let this process get SIGTERM when the trainer calls a method after `step` optimizer steps, once."""
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end the tests
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback)]
    method, sent = getattr(trainer, PLACES[place]), list[int]()

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
            while not callback.jit_manager.is_checkpoint_requested:  # a thread of transformers notes it
                time.sleep(0.001)
        return method(*arguments, **keywords)

    vars(trainer)[PLACES[place]] = interrupted


def train(kind: str, folder: Path, output: Path, kill: tuple[str, str, int] | None, options: dict[str, Any]) -> None:
    """Train to the end, from the last checkpoint if there is one, and leave the state in `output/state.pt`."""
    torch.set_num_threads(1)
    checkpoint = get_last_checkpoint(str(output)) if output.exists() else None
    trainer = build(kind, folder, output, **options)
    if kill:
        kill_before(*kill)
    trainer.train(resume_from_checkpoint=checkpoint)
    torch.save(state(trainer), output / "state.pt")


_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["tests.tools.resumable"])


def run(kind: str, folder: Path, output: Path, *, kill: tuple[str, str, int] | None = None, **options: Any) -> int:
    """The exit code of one process, which may kill itself."""
    return exit_code(train, kind, folder, output, kill, options)


def exit_code(function: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process that calls a function."""
    process = _forked.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and expected.dtype == found.dtype and torch.equal(expected, found)
        return [] if same else [path]
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [line for k in expected for line in differences(expected[k], found[k], f"{path}/{k}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            x for i, pair in enumerate(zip(expected, found, strict=True)) for x in differences(*pair, f"{path}/{i}")
        ]
    return [] if expected == found else [f"{path}: {expected} != {found}"]
