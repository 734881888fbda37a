"""Training through kernels that attend within all segments at once is TRL's on padded batches."""

from pathlib import Path
from typing import Any

import pytest

from tests.oracles import kernels
from tests.padding.test_unpadded import UNEQUAL, assert_same_training
from tests.tools import tiny

SETTINGS: dict[str, Any] = {
    "beta": 0.1,
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "learning_rate": 3e-3,
    "max_grad_norm": 1.0,
    "build": {"rollout_func": UNEQUAL},
}
MIXTURE = {"model": "moe", "router_aux_loss_coef": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "budget": {"token_budget": 30, "share_prompts": True},
    "checkpointed": {"share_prompts": True, "gradient_checkpointing": True},
    "replayed": {**MIXTURE, "router_replay": "R2", "share_prompts": True},
}


EVERY_TIME = {("flash_attention_2", "budget"), ("flash_attention_2", "replayed"), ("sdpa", "checkpointed")}


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(kernel, case, marks=() if (kernel, case) in EVERY_TIME else pytest.mark.slow)
        for kernel in kernels.KERNELS
        for case in CASES
    ],
)
def test_training_by_a_kernel(models: dict[str, Path], tmp_path: Path, kernel: str, case: str) -> None:
    options = {**SETTINGS, **CASES[case]}
    model = models[options.pop("model", "dense")]
    settings = {name: value for name, value in options.items() if name not in ("token_budget", "share_prompts")}
    padded = tiny.train(tiny.trainer(model, tmp_path / "padded", trim_padding=False, **settings))
    trainer = tiny.trainer(model, tmp_path / "packed", **options)
    for each in (trainer.model, trainer.ref_model):
        kernels.use(each, kernel)
    with kernels.KERNELS[kernel]() as calls:
        tiny.train(trainer)
    assert calls.count
    assert_same_training(
        padded, trainer, metrics=case not in ("budget", "replayed")
    )  # means over other sets of tokens
