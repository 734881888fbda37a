"""Between two logs our metrics, masks and KL make nobody wait: TRL's own loss does, in every micro-batch."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import tiny
from tests.tools.batches import random_batch
from tests.trl_bridge.syncs import counted
from trl_steady.features.policy_loss import PolicyLoss
from trl_steady.features.skip_old_pass import SkipOldPass

OPTIONS: dict[str, Any] = {
    "loss_type": "gspo_token",
    "beta": 0.1,
    "kl_estimator": "k2",
    "use_bias_correction_kl": True,
    "kl_ratio_denominator": "sampler",
    "off_policy_mask_threshold": 0.1,
    "geometric_mask_range": [0.5, 2.0],
    "token_veto_threshold": 0.01,
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token", "gmpo", "dapo"])
def test_a_micro_batch_of_ours_waits_for_nothing(
    models: dict[str, Path], tmp_path: Path, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Never called: it only makes the trainer expect log-probs of a sampler."""
        raise NotImplementedError

    options = {**OPTIONS, "loss_type": loss_type}
    trainer = tiny.trainer(models["dense"], tmp_path, padded=True, build={"rollout_func": engine}, **options)
    vars(trainer)["current_gradient_accumulation_steps"] = 1
    batch = random_batch()
    inputs = batch.inputs(
        ref_per_token_logps=batch.old_logps - 0.1,
        sampling_per_token_logps=batch.old_logps + 0.05 * torch.randn(batch.logps.shape),
        advantages=batch.advantages.float(),
    )
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    trainer.model.train()
    with counted() as syncs:
        for _ in range(3):
            trainer.compute_loss(trainer.model, inputs).backward()
    assert syncs.transfers["trl_steady"] == 0 and syncs.collectives["trl_steady"] == 0
    assert syncs.transfers["trl"] > 0 and syncs.collectives["trl"] > 0  # the counter counts
    with counted() as syncs:
        trainer.metrics._exchange("eval", {("mean", "a"): torch.zeros(2)})
    assert syncs.collectives == Counter()  # alone, there is nobody to ask
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with counted() as syncs:
        trainer.log({"loss": 1.0, "of a script": 1.0})
        assert syncs.collectives == Counter()  # it may run on one process
        exec("trainer.log({'loss': 0.0})", {"__name__": "transformers.trainer", "trainer": trainer})
    assert syncs.collectives == Counter({"trl_steady": 1})
    logged = trainer.state.log_history[-1]
    assert {"kl", "kl/k2", "ratio/sequence_min", "off_policy_q50", "dropped/veto", "mismatch/kl"} <= logged.keys()


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_weights_of_an_engine_wait_for_nothing(models: dict[str, Path], tmp_path: Path, mode: str) -> None:
    """Without a pass of the old policy they are computed in micro-batches, and logged after the last of an update."""
    options = {"loss_type": "gmpo", "vllm_importance_sampling_mode": mode}
    trainer = tiny.trainer(models["dense"], tmp_path, padded=True, **options)
    vars(trainer).update(current_gradient_accumulation_steps=1, use_vllm=True)
    trainer.feature(SkipOldPass).is_skipped = True  # as with an engine
    batch = random_batch()
    inputs = batch.inputs(sampling_per_token_logps=batch.old_logps.float(), advantages=batch.advantages.float())
    del inputs["old_per_token_logps"]
    trainer.model.train()
    with counted() as syncs:
        for _ in range(2):
            trainer.compute_loss(trainer.model, inputs).backward()
        trainer.feature(PolicyLoss).on_backward_end()
    assert syncs.transfers["trl_steady"] == 0 and syncs.collectives["trl_steady"] == 0
    trainer.metrics.settle()
    logged = {name: values for name, values in trainer._metrics["train"].items() if name.startswith("sampling/")}
    assert len(logged) == 5 and all(len(values) == 1 for values in logged.values())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_leaving_steps_out_reads_the_norm_that_is_logged(models: dict[str, Path], tmp_path: Path, method: str) -> None:
    """In a finite step of the policy nothing else is read; of a critic, its norm."""
    found: list[tuple[int, int]] = []
    for limit in (None, 3):
        options = {"method": method, "skip_nonfinite_steps": limit, "gradient_accumulation_steps": 2}
        trainer = tiny.trainer(models["dense"], tmp_path, **options, max_steps=4)
        with counted() as syncs:
            trainer.train()
        transfers = syncs.transfers["trl_steady"] + syncs.transfers["transformers"]
        found.append((transfers, syncs.collectives["trl_steady"]))
    (before, collectives), after = found
    assert after == (before + (4 if method == "PPO" else 0), collectives)
