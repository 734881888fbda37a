"""When the reference moves: by steps, by KL, only before a generation; and what is logged and cleared then."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.tools import tiny
from tests.tools.cases import cases
from trl_steady import ReferenceRefreshCallback

OPTIONS: dict[str, Any] = {"beta": 0.04, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "max_steps": 24}


def train(models: dict[str, Path], output: Path, **options: Any) -> Any:
    return tiny.train(tiny.trainer(models["dense"], output, lora=True, **{**OPTIONS, **options}))


def rows(trainer: Any) -> list[dict[str, float]]:
    return [row for row in tiny.history(trainer) if "kl" in row]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("settings", "steps", "moved"),
    [
        # micro-batches a step, of a window = steps_per_generation * num_iterations
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 4}, 5, [8, 12, 16, 20]),  # due at 5, 10, 15, 20
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 3}, 5, [6, 12, 18]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 6}, 2, [2, 4]),  # on-policy
        # windows of 3 in steps of 2, and an epoch of 15 whose last step has 1
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 12}, 1, [3, 6, 8, 11]),
    ],
)
def test_it_moves_before_the_first_generation_after_it_is_due(
    models: dict[str, Path], tmp_path: Path, settings: dict[str, int], steps: int, moved: list[int]
) -> None:
    trainer = train(models, tmp_path, ref_model_sync_steps=steps, **settings)
    assert [(step, rule) for step, _, rule in trainer.reference_refreshes] == [(n, "steps") for n in moved]
    counts = [row["ref/refreshes"] for row in rows(trainer)]
    assert counts == [sum(n < step for n in moved) for step in range(1, len(counts) + 1)]


def test_it_moves_when_the_kl_of_an_update_exceeds_the_limit(models: dict[str, Path], tmp_path: Path) -> None:
    limit = 0.01
    trainer = train(models, tmp_path, ref_model_sync_steps=10, ref_model_sync_kl=limit)
    expected, due = [], None
    for step, row in enumerate(rows(trainer)):
        if due and step % 4 == 0:
            expected.append((step, rows(trainer)[step - 1]["kl"], due))
            due = None
        due = due or ("kl" if row["kl"] > limit else "steps" if (step + 1) % 10 == 0 else None)
    assert [tuple(refresh) for refresh in trainer.reference_refreshes] == expected
    assert {rule for _, _, rule in expected} == {"kl", "steps"}


@pytest.mark.slow
def test_the_kl_rule_looks_at_every_update_whatever_is_logged(models: dict[str, Path], tmp_path: Path) -> None:
    """An update of two micro-batches, a window of two updates: the KL is the mean of both, as it is logged."""
    options = {"ref_model_sync_steps": 100, "gradient_accumulation_steps": 2, "max_steps": 6}
    frozen = [row["kl"] for row in rows(train(models, tmp_path, **options))]
    limit = frozen[1] * 0.999  # the second update's KL is just above
    runs = [
        train(models, tmp_path, ref_model_sync_kl=limit, logging_steps=logging_steps, **options)
        for logging_steps in (1, 3)
    ]
    assert runs[0].reference_refreshes[0] == (2, frozen[1], "kl")
    assert runs[0].reference_refreshes == runs[1].reference_refreshes
    above = train(models, tmp_path, ref_model_sync_kl=frozen[1] * 1.001, **options)
    assert above.reference_refreshes[0].step > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own"),
    cases([("PPO", {"beta": 0.0, "kl_coef": 0.04}), ("GRPO", {}), ("RLOO", {})], fast=1),
    ids=["PPO", "GRPO", "RLOO"],
)
def test_the_kl_rule_measures_no_dropout(
    models: dict[str, Path], tmp_path: Path, method: str, own: dict[str, Any]
) -> None:
    """The logged KL is never 0, although nothing has learned. Samples are the same as without the further pass."""

    def run(**options: Any) -> Any:
        config = LoraConfig(**tiny.LORA, lora_dropout=0.3)
        options = {**OPTIONS, "ref_model_sync_steps": 100, "max_steps": 13, **own, **options}
        return tiny.train(
            tiny.trainer(models["dense"], tmp_path, method=method, build={"peft_config": config}, **options)
        )

    still = run(learning_rate=0.0, ref_model_sync_kl=1e-9)
    assert all(row["kl"] != 0 for row in rows(still)) and not still.reference_refreshes
    assert [row["ref/kl"] for row in still.state.log_history if "ref/kl" in row] == [0.0] * 4
    learning, unlimited = run(ref_model_sync_kl=1e-6), run()
    # A window is 4 steps. The second rollout is the first after an update
    ((step, measured, rule),) = learning.reference_refreshes
    assert (step, rule) == (8, "kl")
    measures = {row["step"]: row["ref/kl"] for row in learning.state.log_history if "ref/kl" in row}
    assert measures == {1: 0.0, 5: measured, 9: 0.0, 13: measures[13]} and measured > 1e-6
    before = [
        [
            {name: value for name, value in row.items() if name != "ref/kl"}
            for row in tiny.history(run)
            if row["step"] < 9
        ]
        for run in (learning, unlimited)
    ]
    assert before[0] == before[1] and len(before[0]) == 8


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("reset", [False, True])
def test_the_optimizer_is_cleared_if_asked_and_the_schedule_goes_on(
    models: dict[str, Path], tmp_path: Path, reset: bool
) -> None:
    options = {"ref_model_sync_steps": 8, "max_steps": 22, "lr_scheduler_type": "linear"}
    trainer = train(models, tmp_path, ref_model_sync_reset_optimizer=reset, **options)
    assert [step for step, _, _ in trainer.reference_refreshes] == [8, 16]
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {6 if reset else 22}
    rates = [row["learning_rate"] for row in rows(trainer)]
    assert rates == pytest.approx([1e-2 * (1 - i / 22) for i in range(22)])


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("lora", [False, True])
def test_the_callback_makes_trls_trainer_ours(models: dict[str, Path], tmp_path: Path, lora: bool) -> None:
    options = {"ref_model_sync_steps": 3, "ref_model_sync_kl": 0.05}
    ours = tiny.train(tiny.trainer(models["moe"], tmp_path, lora=lora, padded=True, **{**OPTIONS, **options}))
    theirs = tiny.trainer(models["moe"], tmp_path, ours=False, lora=lora, beta=0.04, max_steps=24)
    callback = ReferenceRefreshCallback(theirs, steps=3, alpha=1.0, kl=0.05)
    theirs.add_callback(callback)
    theirs.train()
    assert len(callback.refreshes) == 5 and callback.refreshes == ours.reference_refreshes
    after = tiny.parameters(ours)
    assert all(torch.equal(value, after[name]) for name, value in tiny.parameters(theirs).items())
    assert tiny.history(theirs) == tiny.history(ours)


def test_the_callback_works_with_rloo(models: dict[str, Path], tmp_path: Path) -> None:
    """RLOO's KL is part of its reward, and logged once a rollout."""
    options = {"method": "RLOO", "lora": True, "beta": 0.04, "max_steps": 13}
    trainer = tiny.trainer(models["dense"], tmp_path, ours=False, **options)
    callback = ReferenceRefreshCallback(trainer, steps=8)
    trainer.add_callback(callback)
    trainer.train()
    kl = {row["step"]: row["kl"] for row in trainer.state.log_history if "kl" in row}
    assert [(step, rule) for step, _, rule in callback.refreshes] == [(8, "steps")]
    assert callback.refreshes[0].kl == kl[5]
    assert kl[1] == 0.0 and kl[5] > 0 and kl[9] == 0.0 and kl[13] > 0


def test_the_callback_resumes_with_trls_trainer(models: dict[str, Path], tmp_path: Path) -> None:
    """At the end of a window, as TRL itself does."""

    def build(output: Path) -> Any:
        options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 8}
        trainer = tiny.trainer(models["dense"], output, ours=False, lora=True, beta=0.04, **options)
        callback = ReferenceRefreshCallback(trainer, steps=4, alpha=0.6)  # what it was goes into what it becomes
        trainer.add_callback(callback)
        return trainer

    whole, resumed = build(tmp_path), build(tmp_path)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    after = tiny.parameters(resumed)
    assert all(torch.equal(value, after[name]) for name, value in tiny.parameters(whole).items())
    (tmp_path / "checkpoint-8" / "reference.safetensors").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-8 holds no reference.safetensors"):
        build(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        ({"beta": 0.0}, {}, "beta=0.0.*no reference"),
        ({"beta": 0.04}, {"steps": 0}, "steps=0, .*above 0"),
        ({"beta": 0.04}, {"alpha": 1.1}, "alpha=1.1 .*at most 1"),
        ({"beta": 0.04}, {"kl": -1.0}, "kl=-1.0 .*above 0"),
        ({"beta": 0.04, "ours": True, "sync_ref_model": True}, {}, "sync_ref_model=True on trl_steady"),
        ({"beta": 0.04, "sync_ref_model": True}, {}, r"sync_ref_model=True on trl\."),
    ],
)
def test_a_callback_that_cannot_work_is_refused(
    models: dict[str, Path], tmp_path: Path, build: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **{"ours": False, **build})
    with pytest.raises(ValueError, match=message):
        trainer.add_callback(ReferenceRefreshCallback(trainer, **arguments))
