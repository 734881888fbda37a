"""A step whose gradient is not finite leaves no trace: a run with it is a run in which it was not taken."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.features.critic.tools import critic_parameters
from tests.features.reward_model import tools as reward_models
from tests.tools import resumable, tiny
from tests.tools.cases import cases
from tests.tools.nonfinite import OPTIONS, poison_gradients, poison_loss, state, without
from trl_steady.features.critic.feature import Critic
from trl_steady.features.nonfinite_steps import NonfiniteSteps
from trl_steady.features.reward_model.feature import RewardModel

NAN = float("nan")


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("poison", "own"),
    cases(
        [
            (poison_loss, {}),
            (poison_gradients, {}),
            (poison_gradients, {"lora": True}),
            (poison_loss, {"bf16": True}),
            (poison_gradients, {"max_grad_norm": 0.0}),
            (poison_loss, {"method": "RLOO"}),
        ],
        fast=5,
    ),
)
def test_a_run_of_trl_without_these_steps_is_the_same(
    models: dict[str, Path], tmp_path: Path, poison: Callable[..., Any], own: dict[str, Any]
) -> None:
    steps = (1, 3, 4)
    options = {**OPTIONS, **own}
    ours = tiny.train(poison(tiny.trainer(models["dense"], tmp_path, padded=True, **options), steps))
    theirs = tiny.train(without(tiny.trainer(models["dense"], tmp_path, ours=False, **options), steps))
    assert resumable.differences(state(theirs), state(ours)) == []
    counts = [row.get("steps/nonfinite") for row in ours.state.log_history[:-1]]
    assert counts == [None, 1, None, 1, 1, None] and ours.state.global_step == 6
    every = tiny.trainer(models["dense"], tmp_path, ours=False, **options)
    assert resumable.differences(tiny.parameters(tiny.train(every)), tiny.parameters(ours)) != []


@pytest.mark.parametrize(
    "others",
    [
        {"token_budget": 40, "share_prompts": True},
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_holds_with_other_features(models: dict[str, Path], tmp_path: Path, others: dict[str, Any]) -> None:
    options, model = {**OPTIONS, **others}, models["dense"]
    with_nan = tiny.train(poison_gradients(tiny.trainer(model, tmp_path, **options), (1, 3)))
    options["skip_nonfinite_steps"] = None
    expected = tiny.train(without(tiny.trainer(model, tmp_path, **options), (1, 3)))
    assert resumable.differences(state(expected), state(with_nan)) == []


def test_none_takes_the_step_as_trl_does(models: dict[str, Path], tmp_path: Path) -> None:
    options = {**OPTIONS, "skip_nonfinite_steps": None, "max_steps": 2}
    trainer = tiny.train(poison_gradients(tiny.trainer(models["dense"], tmp_path, **options), (1,)))
    assert any(parameter.isnan().any() for parameter in tiny.parameters(trainer).values())
    assert not any("steps/nonfinite" in row for row in trainer.state.log_history)


def test_a_line_names_step_loss_log_ratio_and_parameters(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **OPTIONS)
    computed: list[
        tuple[int, float, float]
    ] = []  # step, loss and log-ratio of each micro-batch, as a subclass sees it

    class Recording(type(trainer)):
        def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
            result = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
            self.last = result[0].detach()
            return result

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            ratio = (self.last - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()].abs().max()
            computed.append((self.state.global_step, loss.item(), ratio.item()))
            return loss

    trainer.__class__ = Recording
    poison_gradients(trainer, (3,), count=5)
    trainer.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "leaves out" in line]
    names = [name for name, _ in trainer.model.named_parameters()][2:5]
    assert line.endswith(f", {', '.join(names)}") and "leaves out step 4 of the policy: gradient norm nan, " in line
    of_step = [(loss, ratio) for step, loss, ratio in computed if step == 3]
    assert len(of_step) == 2 and max(ratio for _, ratio in of_step) > 0.01
    said = re.search(r"\|log-ratio\| (\S+), loss (\S+),", line)
    assert said is not None
    assert float(said[1]) == pytest.approx(max(ratio for _, ratio in of_step), rel=1e-3)
    assert float(said[2]) == pytest.approx(sum(loss for loss, _ in of_step), rel=1e-3, abs=1e-6)


def test_a_log_counts_the_steps_since_the_last_one(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = poison_loss(tiny.trainer(models["dense"], tmp_path, **OPTIONS, logging_steps=2), (0, 1, 3))
    assert [row.get("steps/nonfinite") for row in tiny.history(tiny.train(trainer))] == [2, 1, None, None]


def test_the_third_in_a_row_names_the_checkpoint_from_which_a_run_resumes(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    model = models["dense"]
    trainer = poison_loss(tiny.trainer(model, tmp_path, **options), (0, 1, 3, 4, 5))  # a finite step between
    before = None

    class Keep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal before
            before = state(trainer)

    trainer.add_callback(Keep())
    with pytest.raises(FloatingPointError, match=r"^3 optimizer steps in a row .*step 6 of the policy") as error:
        trainer.train()
    saved = tmp_path / "checkpoint-5"
    assert str(error.value).endswith(f"the last complete checkpoint: {saved}")
    assert resumable.differences(before, state(trainer)) == []  # nor does the error touch anything
    assert not (tmp_path / "checkpoint-6").exists()
    assert all(tensor.isfinite().all() for tensor in load_file(saved / "model.safetensors").values())

    resumed = poison_loss(tiny.trainer(model, tmp_path, **options), (5, 6))  # which are counted anew
    resumed.train(resume_from_checkpoint=str(saved))
    steps = (0, 1, 3, 4, 5, 6)
    expected = without(tiny.trainer(model, tmp_path / "whole", **options, skip_nonfinite_steps=None), steps)
    expected.train()
    assert resumable.differences(state(expected), state(resumed)) == []


def test_a_second_training_of_a_trainer_counts_anew(models: dict[str, Path], tmp_path: Path) -> None:
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 1, "skip_nonfinite_steps": 2}
    trainer = poison_loss(tiny.trainer(models["dense"], tmp_path, **options), (2, 3))
    with pytest.raises(FloatingPointError, match=r"^2 optimizer steps in a row"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)  # step 3 is not finite again
    assert trainer.state.global_step == trainer.state.max_steps


@pytest.mark.parametrize("saves", [False, True])
def test_the_error_names_a_checkpoint_of_this_run_or_none(
    models: dict[str, Path], tmp_path: Path, saves: bool
) -> None:
    earlier = tmp_path / "checkpoint-100"  # of another run
    earlier.mkdir()
    (earlier / "trainer_state.json").write_text("{}")
    own = {"save_strategy": "steps", "save_steps": 1} if saves else {}
    trainer = tiny.trainer(models["dense"], tmp_path, **OPTIONS, **own, skip_nonfinite_steps=1)

    class Touch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            (tmp_path / "checkpoint-notes.txt").write_text("")
            (earlier / "notes.txt").write_text("")

        on_step_begin = on_step_end

    trainer.add_callback(Touch())
    then = "begin again: no complete checkpoint has been saved"
    if saves:
        then = f"resume .* checkpoint: {tmp_path / 'checkpoint-2'}"
    with pytest.raises(FloatingPointError, match=rf"skip_nonfinite_steps=1\).*learning_rate, and {then}$"):
        poison_loss(trainer, (2,)).train()
    assert trainer.state.global_step == 2


def test_an_optimizer_is_not_called_and_callbacks_see_the_gradients(models: dict[str, Path], tmp_path: Path) -> None:
    class Decaying(torch.optim.SGD):
        """Decays parameters, and counts its steps, whether they have gradients or not."""

        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.9)
            return super().step(closure)

    trainer = tiny.trainer(models["dense"], tmp_path, **OPTIONS, max_steps=5)
    optimizer = trainer.optimizer = Decaying(trainer.model.parameters(), lr=0.01)
    norms, ends = [], []

    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            norms.append(sum(float(each.grad.norm()) for each in trainer.model.parameters()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(next(trainer.model.parameters()).detach().clone())

    trainer.add_callback(Reads())
    poison_gradients(trainer, (1, 4)).train()
    assert [math.isfinite(norm) for norm in norms] == [True, False, True, True, False]
    assert [torch.equal(*pair) for pair in itertools.pairwise(ends)] == [True, False, False, True]
    assert optimizer.steps == 3


def test_a_loss_scaler_decides_itself(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
    trainer = tiny.trainer(models["dense"], tmp_path)
    assert trainer.feature(NonfiniteSteps).judge_step("policy", NAN, [])


PPO = {"method": "PPO", "num_generations": 1, **OPTIONS}


def skip_calls(optimizer: torch.optim.Optimizer, is_skipped: Callable[[int], bool]) -> None:
    """Let some calls of an optimizer's step do nothing, by their number."""
    own, calls = optimizer.step, 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if not is_skipped(calls - 1):
            own()

    optimizer.step = step


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    cases(
        {
            "full": {},
            "lora": {"lora": True},
            "no clip": {"max_grad_norm": 0.0},
            "warm-up": {"value_warmup_steps": 2, "lora": True},
        }.items(),
        2,
    ),
)
def test_steps_of_the_critic_are_left_out_and_those_of_the_policy_taken(
    models: dict[str, Path], tmp_path: Path, kind: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ends, steps = [], (1, 3)
    for is_poisoned in (True, False):
        trainer = tiny.trainer(models["dense"], tmp_path, **PPO, **options)
        critic = trainer.feature(Critic)
        if is_poisoned:
            poison_gradients(trainer, steps, of=critic_parameters(trainer).values())
        else:
            skip_calls(critic.optimizer.adamw, lambda call: call in steps)
        trainer.train()
        ends.append({**state(trainer), "critic": critic.critic.state(), "of critic": critic.optimizer.state_dict()})
        ends[-1] = resumable.differences(ends[-1], ends[0]) if len(ends) > 1 else ends[-1]
        counts = [row.get("steps/nonfinite") for row in tiny.history(trainer)[:-1]]
        assert counts == ([None, 1, None, 1, None, None] if is_poisoned else [None] * 6)
    assert ends[1] == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "leaves out" in line]
    assert len(lines) == 2 and "step 2 of the critic: gradient norm nan, " in lines[0]


def test_a_line_about_the_policy_names_no_parameter_of_the_critic(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.train(poison_loss(tiny.trainer(models["dense"], tmp_path, **PPO, lora=True), (1,)))
    critic, policy = (line for line in capsys.readouterr().out.splitlines() if "leaves out" in line)
    assert critic.count(".value.") == policy.count(".default.") == 3 and ".value." not in policy


def test_the_critics_steps_have_a_count_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **PPO)
    poison_gradients(trainer, (0, 1, 3), of=critic_parameters(trainer).values())
    poison_gradients(trainer, (2, 3, 4))
    with pytest.raises(FloatingPointError, match="step 5 of the policy"):
        trainer.train()
    assert [row["steps/nonfinite"] for row in tiny.history(trainer)] == [1, 1, 1, 2]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_steps_of_a_reward_model_are_left_out(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    ends = []
    for is_poisoned in (True, False):
        trainer = reward_models.refreshed(kind, models["dense"], tmp_path, max_steps=5)
        calls = 0

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return gradient * NAN if calls == 1 else gradient

        if is_poisoned:
            _, parameter = next(trainer.reward_model.named_parameters())
            parameter.requires_grad_(True).register_hook(spoil)
            parameter.requires_grad_(False)
        else:
            skip_calls(reward_models.refresher(trainer).optimizer.adamw, lambda call: call == 0)
        trainer.train()
        end = resumable.of_reward_model(trainer.feature(RewardModel))
        ends.append({name: end[name] for name in ("weights", "optimizer")})
        logged = [row["steps/nonfinite"] for row in trainer.state.log_history if "steps/nonfinite" in row]
        assert logged == [1.0] * is_poisoned and (calls > 1) == is_poisoned
    assert ends[0]["optimizer"] != {} and resumable.differences(*ends) == []
