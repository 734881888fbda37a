"""Sequences without a gradient are left out, and the loss and its gradient stay those of all sequences."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from trl.generation import vllm_generation

import trl_steady
from tests.features.dynamic_sampling.tools import number
from tests.features.padding_free.rollouts import UNEQUAL, Widths
from tests.tools import tiny
from tests.tools.engines import UNCHECKED, Engine, alone, colocate
from trl_steady.losses import LOSSES

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 3e-3, "max_grad_norm": 0.0, "num_iterations": 2}
SGD |= {"gradient_accumulation_steps": 4, "max_steps": 3}


@pytest.fixture
def with_float64_everywhere(all_in_float64: None) -> Iterator[None]:
    """Also the loss of a step, which begins as a new 0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def constant(idle: float) -> Callable[..., list[float]]:
    """A reward that is the same for all answers of a share of the prompts: 0, 1/2 or 1. Others never earn the mean."""

    def reward(prompts: list[str], **_: Any) -> list[float]:
        is_idle = [idle == 1 or (idle == 0.5 and number(prompt) % 2 == 1) for prompt in prompts]
        return [1.0 if none else 2.0 ** (row % 4) for row, none in enumerate(is_idle)]

    return reward


class Recorded(tiny.Gradients):
    """The loss and the gradient of each optimizer step, and the widths of the policy's passes in training."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer, self.losses, self.widths = trainer, [torch.tensor(0.0)], Widths(trainer.model)
        step = trainer.training_step

        def recorded(*arguments: Any) -> Tensor:
            loss = step(*arguments)
            self.losses[-1] = self.losses[-1] + loss
            return loss

        trainer.training_step = recorded
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        super().on_pre_optimizer_step(*arguments, **keywords)
        self.losses.append(torch.tensor(0.0))


def run(name: str, folder: Path, idle: float = 0.5, **options: Any) -> Recorded:
    """Three optimizer steps with a model in float64, on rollouts of 16 sequences. `resume` is a checkpoint."""
    resume = options.pop("resume", None)
    torch.manual_seed(0)
    config = copy.deepcopy(tiny.CONFIGS[name])  # which is written to
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    # RLOO takes no rollout_func, and no rollout_func has routes or kept sets
    is_generated = options.get("router_replay") == "R3" or {"method", "use_vllm", "keep_sampling_mask"} & {*options}
    build = {"reward_funcs": constant(idle), **({} if is_generated else {"rollout_func": UNEQUAL})}
    build |= options.pop("build", {})
    recorded = Recorded(tiny.trainer(model, folder, **{**SGD, **options, "build": build}))
    recorded.trainer.train(resume_from_checkpoint=resume)
    return recorded


def assert_same(one: Recorded, other: Recorded) -> None:
    """Sums of at most thousands of float64 numbers, in another order."""
    assert len(one.losses) == len(other.losses) > 2
    torch.testing.assert_close(torch.stack(one.losses), torch.stack(other.losses), rtol=1e-10, atol=1e-13)
    for found, expected in zip(one.steps, other.steps, strict=True):
        scale = max(value.abs().max() for value in expected.values())
        for name, value in expected.items():
            if "value" in name:  # the critic's
                continue
            other_value = found.get(name, torch.zeros_like(value))
            assert (other_value - value).abs().max() <= 1e-10 * scale, name


def skipped(recorded: Recorded) -> list[float]:
    return [row["skipped/sequences"] for row in tiny.history(recorded.trainer) if "skipped/sequences" in row]


@pytest.mark.fast_rows(1)
@pytest.mark.usefixtures("with_float64_everywhere")
@pytest.mark.parametrize(
    ("loss_type", "window", "idle"),
    [
        *(("grpo", 4, 0.5), ("bnpo", 1, 0.5), ("dapo", 4, 0.5), ("luspo", 1, 0.5), ("vespo", 4, 0.5)),
        *(("gspo_token", 1, 0.5), ("grpo", 4, 0), ("dapo", 1, 1)),
    ],
)
def test_loss_and_gradient_are_those_of_all_sequences(
    tmp_path: Path, loss_type: str, window: int, idle: float
) -> None:
    settings: dict[str, Any] = {"loss_type": loss_type, "gradient_accumulation_steps": window}
    of_all = run("dense", tmp_path, idle, **settings)
    of_some = run("dense", tmp_path, idle, skip_zero_weight=True, **settings)
    assert_same(of_some, of_all)
    computed, before = (sum(width for _, width in each.widths.shapes) for each in (of_some, of_all))
    assert computed == before if idle == 0 else computed < before
    assert idle != 1 or all(not grad.any() for step in of_some.steps for grad in step.values())


def with_steps(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[trl_steady.StepRewards]:
    """In half of the groups all steps earn the same. In the others the second step differs, where there are two."""
    earned = [1.0 if number(prompt) % 2 else 2.0 ** (row % 4) for row, prompt in enumerate(prompts)]
    return [
        trl_steady.StepRewards.at_tokens([1.0, value][-len(ids) :], [1, len(ids)][-len(ids) :])
        for value, ids in zip(earned, completion_ids, strict=True)
    ]


@pytest.mark.fast_rows(1)
@pytest.mark.usefixtures("with_float64_everywhere")
@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 30, "loss_type": "dapo", "share_prompts": True},
        {"off_policy_mask_threshold": 1e-4, "loss_type": "dapo"},
        {"method": "RLOO", "beta": 0.0, "token_budget": 30, "mask_truncated_completions": True},
        {"name": "moe", "router_replay": "R2", "token_budget": 30, "router_aux_loss_coef": 0.0},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "steps_per_generation": 16},
        pytest.param({"build": {"reward_funcs": with_steps}, "loss_type": "gspo_token"}, id="steps"),
        {"trim_padding": False},
    ],
    ids=str,
)
def test_with_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    settings = {"name": "dense", "beta": 0.0, **options}
    of_all, of_some = (run(folder=tmp_path, skip_zero_weight=skip, **settings) for skip in (False, True))
    assert_same(of_some, of_all)
    assert max(skipped(of_some)) > 0 and skipped(of_all) == []


@pytest.mark.usefixtures("with_float64_everywhere")
def test_rloo_takes_it_beside_the_kl_in_its_reward(tmp_path: Path) -> None:
    options = {"method": "RLOO", "beta": 0.1, "lora": True}
    of_all, of_some = (run("dense", tmp_path, skip_zero_weight=skip, **options) for skip in (False, True))
    assert_same(of_some, of_all)
    assert len(skipped(of_some)) == 3


MASKS: list[dict[str, Any]] = [
    {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": 1e-3},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.3, "loss_type": "dapo"},
    {"vllm_importance_sampling_correction": False, "geometric_mask_range": (0.3, 3.0)},
    {"geometric_mask_range": (0.3, 3.0), "token_veto_threshold": 0.01, "token_budget": 30},
]


def ended(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Every second answer ends. The others were cut off."""
    made = UNEQUAL(prompts, trainer)
    for ids in made["completion_ids"][::2]:
        ids.append(trainer.processing_class.eos_token_id)
    return made


@pytest.mark.usefixtures("with_float64_everywhere")
def test_answers_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    options = {"mask_truncated_completions": True, "loss_type": "luspo", "build": {"rollout_func": ended}}
    of_all, of_some = (run("dense", tmp_path, 0, skip_zero_weight=skip, **options) for skip in (False, True))
    assert_same(of_some, of_all)
    assert skipped(of_some) == [0.5] * 3


@pytest.fixture
def training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_float64_everywhere: None
) -> Callable[..., Recorded]:
    """Runs with an engine, which answers the same in each run."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda **_: True)

    def training(idle: float, **options: Any) -> Recorded:
        alone(monkeypatch)
        colocate(Engine(), monkeypatch)
        return run("dense", tmp_path, idle, **UNCHECKED, vllm_mode="colocate", **options)

    return training


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_sequences_that_the_rollout_drops_are_left_out(
    training: Callable[..., Recorded], options: dict[str, Any]
) -> None:
    of_all, of_some = (training(0, skip_zero_weight=skip, **options) for skip in (False, True))
    assert_same(of_some, of_all)
    assert max(skipped(of_some)) > 0
    for option, name in (("geometric_mask_range", "dropped/geometric"), ("token_veto_threshold", "dropped/veto")):
        found, expected = (
            [row[name] for row in tiny.history(each.trainer) if name in row] for each in (of_some, of_all)
        )
        assert found == expected
        assert (option in options) == (max([0, *found]) > 0)


def test_vespo_trains_on_sequences_whose_tokens_all_have_an_engine_weight_of_0(
    training: Callable[..., Recorded],
) -> None:
    """TRL bounds these weights in VESPO's exponent."""
    options = {**MASKS[1], "loss_type": "vespo"}
    of_all, of_some = (training(0, skip_zero_weight=skip, **options) for skip in (False, True))
    assert_same(of_some, of_all)
    assert max(skipped(of_some)) == 0 < max(skipped(training(0, skip_zero_weight=True, **MASKS[1])))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("token_budget", [None, 30])
def test_both_options_together(training: Callable[..., Recorded], token_budget: int | None) -> None:
    """Each rollout feeds one update, and the masks are decided there, not in the rollout."""
    options = {"num_iterations": 1, "geometric_mask_range": (0.3, 3.0), "token_budget": token_budget}
    of_all = training(0.5, skip_old_pass=False, **options)
    of_some = training(0.5, skip_old_pass=True, skip_zero_weight=True, **options)
    assert_same(of_some, of_all)
    before, after = (sum(width for _, width in each.widths.shapes) for each in (of_all, of_some))
    assert after < 0.4 * before


def counts(recorded: Recorded) -> tuple[int, int]:
    """The tokens of the last rollout, and of those of its sequences that have a gradient."""
    batches = recorded.trainer._buffered_inputs
    tokens = torch.cat([batch["prompt_mask"].sum(-1) + batch["completion_mask"].sum(-1) for batch in batches])
    advantages = torch.cat([batch["advantages"] for batch in batches])
    return int(tokens.sum()), int(tokens[advantages != 0].sum())


def test_tokens_and_passes_are_counted(models: dict[str, Path], tmp_path: Path) -> None:
    """One update of a rollout with half of the groups idle, in TRL's micro-batches and in those of a budget."""
    options = {"num_iterations": 1, "max_steps": 1}
    of_all = run("dense", tmp_path, **options)
    total, needed = counts(of_all)
    assert 0.3 * total < needed < 0.7 * total and sum(width for _, width in of_all.widths.shapes) == total
    for budget in ({}, {"token_budget": 10_000}, {"token_budget": 30}):
        of_some = run("dense", tmp_path, skip_zero_weight=True, **budget, **options)
        shapes = of_some.widths.shapes
        assert sum(width for _, width in shapes) == needed
        assert len(shapes) == 1 if budget.get("token_budget") == 10_000 else len(shapes) <= 8
        logged = tiny.history(of_some.trainer)[0]
        assert logged["skipped/sequences"] == 0.5
        assert logged["skipped/tokens"] == pytest.approx(1 - needed / total, rel=1e-6)
    # a micro-batch of which nothing is left has no pass, but the last one
    one_by_one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "steps_per_generation": 16}
    for more in (one_by_one, {"token_budget": 30}):
        of_some = run("dense", tmp_path, 1, skip_zero_weight=True, **more, **options)
        assert len(of_some.widths.shapes) == 1


@pytest.mark.usefixtures("with_float64_everywhere")
def test_ppo_leaves_them_out_of_the_policy_only(tmp_path: Path) -> None:
    """Answers that were cut off have no token in the loss. The critic reads them in its passes all the same."""
    settings = {"method": "PPO", "kl_coef": 0.0, "mask_truncated_completions": True, "max_completion_length": 9}
    settings |= {"loss_type": "dapo", "build": {"rollout_func": ended}, "value_init": "policy"}

    def training(**options: Any) -> tuple[Recorded, int]:
        widths: list[Widths] = []
        building = trl_steady.PPOTrainer.__init__

        def built(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            building(trainer, *arguments, **keywords)
            widths.append(Widths(trainer.critic.backbone))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trl_steady.PPOTrainer, "__init__", built)
            recorded = run("dense", tmp_path, **settings, **options)
        return recorded, sum(width for _, width in widths[0].shapes)

    of_all, of_critic = training()
    for budget in ({}, {"token_budget": 30}):
        of_some, still_of_critic = training(skip_zero_weight=True, **budget)
        assert_same(of_some, of_all)
        assert still_of_critic == of_critic
        assert min(skipped(of_some)) == (7 / 16 if budget else 0.5)  # a sequence stays in a micro-batch without any


def test_a_run_without_the_option_says_what_it_would_leave_out(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**options: Any) -> str:
        run("dense", tmp_path, num_iterations=1, max_steps=1, **options)
        lines = [line for line in capsys.readouterr().out.splitlines() if "no gradient" in line]
        return lines[0] if lines else ""

    of_all = run("dense", tmp_path, num_iterations=1, max_steps=1)
    total, needed = counts(of_all)
    assert f" {1 - needed / total:.0%} of the tokens" in said() and "skip_zero_weight=True" in said()
    # with nearly none, the run is dead, and no pass would be worth saving
    assert said(idle=0) == said(idle=1) == said(skip_zero_weight=True) == said(entropy_coef=0.1) == ""
    # nobody knows what a loss of a script does with an advantage of 0
    monkeypatch.setitem(
        LOSSES, "own", dataclasses.replace(LOSSES["gspo_token"], name="Own", rewrite=lambda batch: batch)
    )
    assert said(loss_type="own") == ""


@pytest.mark.fast_rows(1)
@pytest.mark.usefixtures("with_float64_everywhere")
@pytest.mark.parametrize(
    ("kind", "token_budget"),
    [("rollout", None), ("rollout", 30), ("compute_loss", None), ("_compute_loss", None), ("_compute_loss", 30)],
)
def test_the_advantages_that_the_loss_gets_decide(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    token_budget: int | None,
) -> None:
    """A script changes advantages, which are 0 because all answers earn the same: docs/your-own-loss.md shows how."""

    def shaped(inputs: dict[str, Any]) -> dict[str, Any]:
        """Advantages that are 0 for half of the answers, and not for the same ones as TRL's."""
        return {**inputs, "advantages": inputs["advantages"] * 0 + (inputs["completion_mask"].sum(1) % 2)}

    class InRollout(trl_steady.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            return shaped(super()._generate_and_score_completions(inputs))

    class InComputeLoss(trl_steady.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Tensor:
            return super().compute_loss(model, shaped(inputs), *arguments, **keywords)

    class InInnerLoss(trl_steady.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super()._compute_loss(model, shaped(inputs))

    scripts = {"rollout": InRollout, "compute_loss": InComputeLoss, "_compute_loss": InInnerLoss}
    monkeypatch.setattr(trl_steady, "GRPOTrainer", scripts[kind])
    options = {"token_budget": token_budget, "loss_type": "dapo"}
    of_all = run("dense", tmp_path, 1, **options)
    said = capsys.readouterr().out
    of_some = run("dense", tmp_path, 1, skip_zero_weight=True, **options)
    assert_same(of_some, of_all)
    assert all(any(value.any() for value in step.values()) for step in of_all.steps)
    assert 0 < max(skipped(of_some)) < 1
    assert "100% of the tokens" not in said
    assert ("% of the tokens had no gradient" in said) == (kind == "rollout")  # a script's loss may have more terms


def test_masks_are_decided_from_the_log_probs_that_the_loss_gets(
    training: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutCorrection(trl_steady.GRPOTrainer):
        """A script that takes the sampler's word for the old log-probs."""

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            old = {"old_per_token_logps": inputs["sampling_per_token_logps"]}
            return super()._compute_loss(model, {**inputs, **old})

    monkeypatch.setattr(trl_steady, "GRPOTrainer", WithoutCorrection)
    of_all, of_some = (training(0, skip_zero_weight=skip, **MASKS[2]) for skip in (False, True))
    assert_same(of_some, of_all)
    assert max(skipped(of_some)) == 0


def test_switched_off_at_a_resume_it_leaves_out_nothing_more_of_the_window(tmp_path: Path) -> None:
    """An entropy bonus, which counts all sequences, may then be added."""
    widths: list[list[int]] = []
    for skip in (False, True):
        folder = tmp_path / str(skip)
        run("dense", folder, skip_zero_weight=skip, max_steps=1, save_strategy="steps", save_steps=1)
        resumed = run("dense", folder, entropy_coef=0.5, max_steps=2, resume=str(folder / "checkpoint-1"))
        widths.append([width for _, width in resumed.widths.shapes])
    assert widths[0] == widths[1] and len(widths[0]) == 4  # the micro-batches of one step, with all of their tokens


def test_models_that_count_all_sequences_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        tiny.trainer(models["moe"], tmp_path, skip_zero_weight=True, router_aux_loss_coef=0.1)
