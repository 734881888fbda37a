"""Losses and whole steps of policy and critic: which option acts on which, and what a step leaves alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, TrainerCallback

from tests.features.critic import tools as critics
from tests.features.critic.tools import KINDS, Samples, Twin, build, critic_parameters, policy_parameters, snapshot
from tests.oracles import ppo as oracles
from tests.tools import tiny
from tests.tools.headroom import within
from trl_steady.features.critic.feature import Critic
from trl_steady.features.scalar_head import optimizer as learner
from trl_steady.features.scalar_head.construction import build_adapter_model, build_whole_model

BUDGET = {"token_budget": 30, "share_prompts": True}


def everything(trainer: Any) -> dict[str, Tensor]:
    critic = {f"critic {name}": own for name, own in critic_parameters(trainer).items()}
    return snapshot({**policy_parameters(trainer), **critic})


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("kind", "loss_type"), [("lora", "grpo"), ("lora", "vespo"), ("full", "dapo")])
def test_loss_and_gradient_of_the_policy_are_trls(
    models: dict[str, Path], tmp_path: Path, loss_type: str, kind: str
) -> None:
    """Bit for bit: TRL's loss gets the critic's advantages, and the critic adds nothing to the gradient."""
    options = {"loss_type": loss_type, "epsilon": 0.2, **KINDS[kind]}
    if loss_type != "vespo":
        options.update(beta=0.1, kl_coef=0.0)
    trainer = build(models["dense"], tmp_path, known=True, trim_padding=False, **options)
    trainer.feature(Critic).on_train_begin()
    inputs = trainer._generate_and_score_completions(critics.rows())
    critics.stir(trainer, seed=1, by=0.05)  # the models have moved since
    trainer.current_gradient_accumulation_steps = 2
    found, of_policy = [], trainer._compute_loss
    trainer._compute_loss = lambda *arguments: found.append(of_policy(*arguments)) or found[-1]
    with trainer.until_backward():
        trainer.compute_loss(trainer.model, inputs).backward()

    options.pop("kl_coef", None)
    theirs = tiny.trainer(models["dense"], tmp_path, ours=False, **options)
    own = policy_parameters(trainer)
    theirs.model.load_state_dict({**theirs.model.state_dict(), **snapshot(own)})
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = 2
    expected = theirs._compute_loss(theirs.model, inputs)
    expected.backward()
    assert torch.equal(found[0], expected) and found[0] != 0
    after = critics.gradients(own)
    assert critics.same(after, critics.gradients(dict(theirs.model.named_parameters())))
    assert any(each.any() for each in after.values())
    assert inputs["advantages"].shape == inputs["completion_ids"].shape


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *KINDS.items(),
        ("lora", {"lora": True, **BUDGET}),
        ("dropout", {"build": {"peft_config": LoraConfig(**tiny.LORA, lora_dropout=0.3)}}),
        ("elsewhere", {"lora": True, "build": {"value_peft_config": LoraConfig(r=2, target_modules=["k_proj"])}}),
    ],
)
def test_recomputed_layers_give_the_same_gradients(
    model_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Bit for bit: backward recomputes layers of the critic with its adapter, and those of the policy with its own."""
    critics.descend(monkeypatch)
    runs, calls = [], []
    for checkpointing in (False, True):
        of_run = {"optim": "sgd", "max_steps": 2, "gradient_checkpointing": checkpointing, **options}
        trainer = build(model_of(kind), tmp_path, known=True, **of_run)
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


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {"loss_type": "grpo", "value_learning_rate": 0.05, **BUDGET}),
        ("full", {"max_grad_norm": 0.0, "cliprange_value": None}),
        ("full", {"loss_type": "gspo_token", "value_warmup_steps": 1, "gradient_accumulation_steps": 1}),
    ],
    ids=str,
)
def test_the_critic_after_some_steps_is_that_of_updates_by_hand(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Sums over micro-batches, gradients clipped by their own norm, one step of SGD."""

    def token_weights(inputs: Samples, mask: Tensor) -> Tensor:
        """(B, T) weights of the tokens in TRL's loss, by its docs: means of sequences, or of all tokens of a step."""
        if args.loss_type == "dapo":  # the window's share of the tokens of the rollout
            return mask / (inputs["num_items_in_batch"].double() * window / args.steps_per_generation)
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask) / window

    def by_hand(inputs: Samples) -> tuple[Tensor, list[Tensor]]:
        """The losses of tokens, and the gradient of their weighted sum. Answers without a reward have no loss."""
        actions = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        mask = actions & ~inputs["returns"].isnan()
        values = twin.values(inputs)[:, :-1]
        old, returns = inputs["values"].double(), inputs["returns"].double()
        tables = [own.tolist() for own in (values, old, returns, mask)]
        losses = torch.tensor(oracles.value_loss(*tables, args.cliprange_value))
        error, is_flat = values - returns, torch.zeros_like(mask)
        if args.cliprange_value is not None:
            bounded = torch.maximum(torch.minimum(values, old + args.cliprange_value), old - args.cliprange_value)
            is_flat = mask & ((bounded - returns) ** 2 > error**2)  # the larger term does not depend on the value
        flat.append(is_flat[mask])
        slopes = (token_weights(inputs, actions.double()) * error).where(mask & ~is_flat, 0).detach()
        return losses[mask], [*torch.autograd.grad(values, [*twin.parameters.values()], slopes)]

    critics.descend(monkeypatch)
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.02, "optim": "sgd", **options}
    options = {"lr_scheduler_type": "linear", "cliprange_value": 0.2, **options, **KINDS[kind]}
    trainer = build(models["dense"], tmp_path, exact=True, known=True, **options)
    twin, args = Twin(trainer), trainer.args
    window = args.gradient_accumulation_steps
    before, flat, clipped = snapshot(twin.parameters), list[Tensor](), list[bool]()
    steps: list[list[Samples]] = []  # the micro-batches of each optimizer step, as they reach the loss
    compute_loss = trainer.compute_loss

    def keeping(model: Any, inputs: Samples, *rest: Any, **others: Any) -> Tensor:
        if len(steps) == trainer.state.global_step:
            steps.append([])
        steps[-1].append(dict(inputs))
        return compute_loss(model, inputs, *rest, **others)

    trainer.compute_loss = keeping
    trainer.train()
    assert [len(own) for own in steps] == [window] * 2
    logged = [row["value/loss"] for row in tiny.history(trainer) if "value/loss" in row]
    for number, step in enumerate(steps):
        rate = (args.value_learning_rate or args.learning_rate) * (1 - number / 2)
        of_step = [by_hand(inputs) for inputs in step]
        assert logged[number] == pytest.approx(torch.cat([losses for losses, _ in of_step]).mean().item(), rel=1e-5)
        total = [sum(parts) for parts in zip(*(gradients for _, gradients in of_step), strict=True)]
        norm = torch.stack([own.norm() for own in total]).norm()
        scale = min(1.0, args.max_grad_norm / norm.item()) if args.max_grad_norm else 1.0
        clipped.append(scale < 1)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters.values(), total, strict=True):
                parameter -= rate * scale * gradient
    assert any(clipped) == bool(args.max_grad_norm)
    if args.value_learning_rate is not None:  # the critic is fast enough to leave the clip range
        assert 0 < torch.cat(flat).sum() < len(torch.cat(flat))
    found = {name: own - before[name] for name, own in snapshot(critic_parameters(trainer)).items()}
    expected = {name: own.detach() - before[name] for name, own in twin.parameters.items()}
    assert within(critics.distance(found, expected), 5e-5)  # of norms in float32


@pytest.mark.fast_rows(1)
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


@pytest.mark.fast_rows(1)
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


@pytest.mark.fast_rows(1)
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


def test_a_module_of_the_adapters_name_stays_the_policys() -> None:
    """BERT's attention has a projection `value`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bare = BertLMHeadModel(BertConfig(**sizes, vocab_size=20, is_decoder=True))
    policy = get_peft_model(bare, LoraConfig(target_modules=["query", "value"]))
    before = {name for name, own in policy.named_parameters() if own.requires_grad}
    critic = build_adapter_model(policy, None)
    added = {name.replace(".default.", ".value.") for name in before}
    own = {f"base_model.model.bert.{name}" for name, _ in critic.named_parameters() if name != "score.weight"}
    assert own == added and len(own) == 4
    assert {name for name, own in policy.named_parameters() if own.requires_grad} == before
