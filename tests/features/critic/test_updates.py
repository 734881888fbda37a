"""Whole steps of policy and critic: which option acts on which, and what a step leaves alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback

from tests.features.critic import tools as critics
from tests.features.critic.tools import KINDS, Samples, Twin, build, critic_parameters, policy_parameters, snapshot
from tests.tools import tiny
from tests.tools.headroom import within
from trl_steady.features.critic import optimizer as learner
from trl_steady.features.critic.construction import build_whole_model

STEPS = {"optim": "sgd", "max_steps": 2}  # whose updates are proportional to gradients
BUDGET = {"token_budget": 30, "share_prompts": True}


def everything(trainer: Any) -> dict[str, Tensor]:
    critic = {f"critic {name}": own for name, own in critic_parameters(trainer).items()}
    return snapshot({**policy_parameters(trainer), **critic})


ELSEWHERE = LoraConfig(r=2, target_modules=["k_proj", "down_proj"])
RECOMPUTED: dict[str, dict[str, Any]] = {
    **KINDS,
    "lora budget": {"lora": True, **BUDGET},
    "dropout": {"build": {"peft_config": LoraConfig(**tiny.LORA, lora_dropout=0.3)}},
    "elsewhere": {"lora": True, "build": {"value_peft_config": ELSEWHERE}},
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_recomputed_layers_give_the_same_gradients(
    model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Bit for bit: backward recomputes layers of the critic with its adapter, and those of the policy with its own."""
    critics.descend(monkeypatch)
    runs, calls = [], []
    for checkpointing in (False, True):
        options = {**STEPS, **RECOMPUTED[kind], "gradient_checkpointing": checkpointing}
        trainer = build(model_of(kind), tmp_path, known=True, **options)
        count: list[int] = []
        layer = trainer.critic.bare.base_model.layers[0].self_attn  # inside what is recomputed, which stops early
        layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        before = everything(trainer)
        trainer.train()
        runs.append(everything(trainer))
        calls.append(len(count))
    assert critics.same(*runs)
    assert calls[1] > calls[0]
    moved = [name for name in before if not torch.equal(before[name], runs[0][name])]
    assert {name.startswith("critic") for name in moved} == {True, False}


def kept_samples(trainer: Any) -> list[list[Samples]]:
    """A list that gets the micro-batches of each optimizer step, as they reach the loss."""
    steps: list[list[Samples]] = []
    compute_loss = trainer.compute_loss

    def keeping(model: Any, inputs: Samples, *rest: Any, **others: Any) -> Tensor:
        if len(steps) == trainer.state.global_step:
            steps.append([])
        steps[-1].append(dict(inputs))
        return compute_loss(model, inputs, *rest, **others)

    trainer.compute_loss = keeping
    return steps


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {"loss_type": "grpo", "value_learning_rate": 0.05, **BUDGET}),
        ("full", {"max_grad_norm": 0.0, "cliprange_value": None}),
        ("full", {"value_warmup_steps": 1, "gradient_accumulation_steps": 1}),
    ],
    ids=str,
)
def test_the_critic_after_some_steps_is_that_of_updates_by_hand(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Sums over micro-batches, gradients clipped by their own norm, one step of SGD."""
    critics.descend(monkeypatch)
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.02, "optim": "sgd", **options}
    options = {"lr_scheduler_type": "linear", "cliprange_value": 0.2, **options, **KINDS[kind]}
    trainer = build(models["dense"], tmp_path, exact=True, known=True, **options)
    steps, twin, args = kept_samples(trainer), Twin(trainer), trainer.args
    before, clipped = snapshot(twin.parameters), list[bool]()
    trainer.train()
    window = args.gradient_accumulation_steps
    assert [len(own) for own in steps] == [window] * 2
    for number, step in enumerate(steps):
        rate = (args.value_learning_rate or args.learning_rate) * (1 - number / 2)
        total = {name: torch.zeros_like(own) for name, own in twin.parameters.items()}
        for inputs in step:
            weights = critics.token_weights(inputs, args.loss_type, window, args)
            _, gradient, _ = critics.by_hand(twin, inputs, weights, args.cliprange_value)
            total = {name: own + gradient[name] for name, own in total.items()}
        norm = torch.stack([own.norm() for own in total.values()]).norm()
        scale = min(1.0, args.max_grad_norm / norm.item()) if args.max_grad_norm else 1.0
        clipped.append(scale < 1)
        with torch.no_grad():
            for name, parameter in twin.parameters.items():
                parameter -= rate * scale * total[name]
    assert any(clipped) == bool(args.max_grad_norm)
    found = {name: own - before[name] for name, own in snapshot(critic_parameters(trainer)).items()}
    expected = {name: own.detach() - before[name] for name, own in twin.parameters.items()}
    assert within(critics.distance(found, expected), 5e-5)  # of norms in float32


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("lora", {"cliprange_value": 1e-3}),
        ("full", {"value_learning_rate": 0.2}),
    ],
    ids=str,
)
def test_options_of_the_critic_act_on_the_critic_only(
    models: dict[str, Path], tmp_path: Path, kind: str, other: dict[str, Any]
) -> None:
    """Bit for bit, over all steps of a rollout: its advantages are those of the critic before."""
    policies, critics_after, logged = [], [], []
    for options in ({}, other):
        trainer = build(models["dense"], tmp_path, known=True, max_steps=4, weight_decay=0.1, **KINDS[kind], **options)
        trainer.train()
        policies.append(snapshot(policy_parameters(trainer)))
        critics_after.append(snapshot(critic_parameters(trainer)))
        logged.append([row["learning_rate"] for row in tiny.history(trainer) if "learning_rate" in row])
    assert critics.same(*policies)
    assert not any(torch.equal(own, critics_after[1][name]) for name, own in critics_after[0].items())
    assert logged[0] == logged[1] == [0.01] * 4


@pytest.mark.parametrize("kind", ["lora", "full", "nf4"])
def test_in_warm_up_only_the_critic_learns(model_of: Any, tmp_path: Path, kind: str) -> None:
    """Neither weight decay nor another term of the loss moves the policy. The optimizer has no state of it."""
    options = {"weight_decay": 0.1, "entropy_coef": 0.1, "ptx_coef": 1.0, "value_warmup_steps": 2, "max_steps": 3}
    text = {"ptx_dataset": Dataset.from_dict({"text": ["one", "two"]})}
    trainer = build(model_of(kind), tmp_path, known=True, build=text, **KINDS[kind], **options)
    before, seen = everything(trainer), []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            own = [bool(trainer.optimizer.state.get(p)) for p in policy_parameters(trainer).values()]
            seen.append((everything(trainer), any(own)))

    trainer.add_callback(Watch())
    trainer.train()
    for step, (after, has_state) in enumerate(seen):
        moved = {name.startswith("critic") for name in before if not torch.equal(before[name], after[name])}
        assert moved == ({True} if step < 2 else {True, False})
        assert has_state == (step == 2)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_critic_does_not_change_the_first_rollout(models: dict[str, Path], tmp_path: Path, lora: bool) -> None:
    """Prompts, completions and log-probs of a GRPOTrainer with the same seed: the critic draws no random number."""

    def first(method: str, **options: Any) -> Samples:
        options |= {"method": method, "num_generations": 2, "lora": lora, "max_steps": 1}
        trainer, found = tiny.trainer(models["dense"], tmp_path, **options), list[Samples]()
        rollout = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: found.append(rollout(inputs)) or {**found[-1]}
        trainer.train()
        return found[0]

    ours, theirs = first("PPO"), first("GRPO", beta=0.1)
    for name in ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps"):
        assert torch.equal(ours[name], theirs[name]), name
    assert len({*map(tuple, ours["completion_ids"].tolist())}) > 4


def test_a_new_critic_keeps_the_random_state_of_one_gpu(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would warn, and go on to all GPUs of the machine."""
    trainer = build(models["dense"], tmp_path)
    states: list[Any] = []
    for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states.append(device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.append(device))
    build_whole_model(trainer, None, "value_init")
    assert [str(device).removeprefix("cuda:") for device in states] == ["2", "2"]  # read, and set


def test_an_evaluation_between_steps_changes_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    how = {"gradient_accumulation_steps": 2, "kl_target": 0.7, "max_steps": 2}
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1, "build": {"eval_dataset": tiny.dataset(8)}}):
        trainer = build(models["dense"], tmp_path, known=True, lora=True, **how, **options)
        trainer.train()
        runs.append((everything(trainer), trainer.kl_coef))
    (first, coef), (second, other_coef) = runs
    assert critics.same(first, second) and coef == other_coef != 0.05


def test_the_critics_updates_are_adamws(models: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """With betas, epsilon and decay of the options, at `value_learning_rate` under the scheduler of the policy."""
    rates = {"learning_rate": 0.01, "value_learning_rate": 0.05, "lr_scheduler_type": "linear", "max_steps": 3}
    of_adam = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    trainer = build(models["dense"], tmp_path, exact=True, known=True, **rates, **of_adam)
    parameters, gradients = dict(trainer.critic.named_parameters()), list[dict[str, Tensor]]()
    expected = snapshot(parameters)
    step = learner.ScalarHeadOptimizer.step

    def noted(updated: learner.ScalarHeadOptimizer, rate: float, owner: str) -> Tensor | None:
        gradients.append(critics.gradients(parameters))
        return step(updated, rate, owner)

    monkeypatch.setattr(learner.ScalarHeadOptimizer, "step", noted)
    trainer.train()
    assert len(gradients) == 3
    first, second = ({name: torch.zeros_like(own) for name, own in expected.items()} for _ in range(2))
    for number, of_step in enumerate(gradients, 1):
        rate = 0.05 * (1 - (number - 1) / 3)
        norm = torch.stack([gradient.norm() for gradient in of_step.values()]).norm().item()
        scale = min(1.0, trainer.args.max_grad_norm / norm)
        for name, gradient in of_step.items():
            first[name] = 0.8 * first[name] + 0.2 * scale * gradient
            second[name] = 0.9 * second[name] + 0.1 * (scale * gradient) ** 2
            decayed = expected[name] * (1 - (rate * 0.1 if gradient.dim() > 1 else 0))
            size = (second[name] / (1 - 0.9**number)).sqrt() + 1e-3
            expected[name] = decayed - rate * first[name] / (1 - 0.8**number) / size
    assert within(
        critics.distance(snapshot(parameters), expected), 1e-6
    )  # clip_grads_with_norm_ adds 1e-6 to the norm
