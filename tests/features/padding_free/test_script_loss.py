"""A script's `_compute_loss` with `token_budget`: it sees TRL's micro-batches, and what it adds counts as in TRL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

import trl_steady
from tests.features.padding_free.rollouts import UNEQUAL
from tests.tools import tiny
from trl_steady.core.sequences import select_sequences
from trl_steady.features.critic.feature import Critic

BUDGET = {"token_budget": 30}
OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "steps_per_generation": 4,
    "max_steps": 4,
    "optim": "sgd",  # Adam would blow rounding up to the size of an update where a gradient is zero on paper
    "learning_rate": 3e-3,
    "max_grad_norm": 0.0,
}


def decay(trainer: Any) -> Tensor:
    return sum((each.square().sum() for each in trainer.model.parameters() if each.requires_grad), torch.zeros(()))


def divided(trainer: Any, inputs: Any) -> Tensor:
    return 0.5 * decay(trainer) / trainer.current_gradient_accumulation_steps


def divided_by_the_option(trainer: Any, inputs: Any) -> Tensor:
    return 0.5 * decay(trainer) / trainer.args.gradient_accumulation_steps


def in_every_second_call(trainer: Any, inputs: Any) -> Tensor:
    return 0.5 * decay(trainer) * (len(trainer.seen) % 2)


def by_width(trainer: Any, inputs: Any) -> Tensor:
    return 1e-2 * decay(trainer) * inputs["completion_mask"].sum()


def adds(kind: Any, term: Callable[[Any, Any], Tensor]) -> Any:
    class Adds(kind):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            self.seen: list[int] = []  # rows of each call
            super().__init__(*arguments, **keywords)

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            self.seen.append(len(inputs["completion_ids"]))
            return super()._compute_loss(model, inputs) + term(self, inputs)

    return Adds


def whitens(kind: Any) -> Any:
    """It changes inputs, by values of the whole micro-batch."""

    class Whitens(kind):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            advantages = inputs["advantages"]
            return super()._compute_loss(model, {**inputs, "advantages": advantages / advantages.abs().sum()})

    return Whitens


def trained(kind: Any, model: Path, folder: Path, **options: Any) -> Any:
    build: dict[str, Any] = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    package = trl_steady if issubclass(kind, trl_steady.GRPOTrainer | trl_steady.RLOOTrainer) else trl
    method = kind._name
    if method == "GRPO":
        build["rollout_func"] = UNEQUAL
        if package is trl_steady:
            options["engine_check"] = None
    args = tiny.arguments(getattr(package, f"{method}Config"), folder, **{**OPTIONS, **options})
    return tiny.train(kind(str(model), tiny.reward, args, **build))


def assert_same(ours: Any, theirs: Any) -> None:
    expected = tiny.parameters(theirs)
    for name, value in tiny.parameters(ours).items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("method", "term", "options"),
    [
        ("GRPO", divided, {"loss_type": "dapo"}),
        ("GRPO", divided_by_the_option, {"loss_type": "grpo"}),
        ("GRPO", in_every_second_call, {"loss_type": "dr_grpo"}),
        ("GRPO", by_width, {"loss_type": "dapo", "gradient_accumulation_steps": 8}),
        ("RLOO", by_width, {}),
    ],
)
def test_a_term_counts_as_in_trl(
    models: dict[str, Path], tmp_path: Path, method: str, term: Callable[[Any, Any], Tensor], options: dict[str, Any]
) -> None:
    name = f"{method}Trainer"
    theirs = trained(adds(getattr(trl, name), term), models["dense"], tmp_path, **options)
    ours = trained(adds(getattr(trl_steady, name), term), models["dense"], tmp_path, **BUDGET, **options)
    assert ours.seen == theirs.seen and {*ours.seen} == {4}
    assert_same(ours, theirs)
    without = trained(getattr(trl_steady, name), models["dense"], tmp_path, **BUDGET, **options)
    sizes = [decay(trainer).item() for trainer in (ours, without)]
    assert sizes[0] < sizes[1] * (1 - 1e-3)  # the term is no rounding error


def test_inputs_are_changed_by_trls_micro_batches(models: dict[str, Path], tmp_path: Path) -> None:
    theirs = trained(whitens(trl.GRPOTrainer), models["dense"], tmp_path)
    assert_same(trained(whitens(trl_steady.GRPOTrainer), models["dense"], tmp_path, **BUDGET), theirs)
    plain = tiny.parameters(trained(trl_steady.GRPOTrainer, models["dense"], tmp_path, **BUDGET))
    assert any(not torch.allclose(value, plain[name]) for name, value in tiny.parameters(theirs).items())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_critic_of_ppo_reads_what_the_script_leaves_alone(
    models: dict[str, Path], tmp_path: Path, warmup: int
) -> None:
    """The term does not move the policy in a warm-up, as without a budget."""
    kind = adds(whitens(trl_steady.PPOTrainer), divided)
    options = {"num_generations": 1, "value_warmup_steps": warmup, "value_learning_rate": 1e-3}
    keywords: dict[str, Any] = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    runs = []
    for budget in ({}, BUDGET):
        args = tiny.arguments(trl_steady.PPOConfig, tmp_path, **{**OPTIONS, **options, **budget})
        runs.append(tiny.train(kind(str(models["dense"]), tiny.reward, args, **keywords)))
    assert_same(*reversed(runs))
    first, second = (trainer.feature(Critic).critic.parameters for trainer in runs)
    for value, expected in zip(second, first, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


class Half(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return 0.5 * super()._compute_loss(model, inputs)


class Detaches(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return super()._compute_loss(model, inputs).detach() + decay(self)


class Twice(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return super()._compute_loss(model, inputs) + super()._compute_loss(model, inputs)


class Drops(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        keep = range(1, len(inputs["completion_ids"]))
        return super()._compute_loss(model, select_sequences(inputs, keep))


class Conditional(trl_steady.GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return decay(self) if self.model.training else super()._compute_loss(model, inputs)


ONCE = "does not pass each sequence of a micro-batch on to super\\(\\) once"


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Half, r"multiplies the loss of super\(\) by 0\.5\. It may only add to it"),
        (Detaches, r"multiplies the loss of super\(\) by 0\."),
        (Twice, ONCE),
        (Drops, ONCE),
        (Conditional, ONCE),
    ],
)
def test_what_would_not_count_as_in_trl_is_refused(
    models: dict[str, Path], tmp_path: Path, kind: Any, why: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"token_budget=30 does not work here: .*{kind.__name__}\._compute_loss {why}"
    ):
        trained(kind, models["dense"], tmp_path, **BUDGET)


def test_a_loss_without_super_is_refused_when_the_trainer_is_built(models: dict[str, Path], tmp_path: Path) -> None:
    class Own(trl_steady.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return trl.GRPOTrainer._compute_loss(self, model, inputs)

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, **BUDGET)
    with pytest.raises(ValueError, match=r"token_budget=30 .*Own\._compute_loss does not call super\(\)"):
        Own(str(models["dense"]), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer())
