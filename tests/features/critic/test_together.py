"""Short runs of PPO with everything else of this package."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor

from tests.features.critic.tools import policy_parameters, same, snapshot
from tests.tools import later_trl, resumable, tiny
from trl_steady.features.reference.feature import Reference

PPO: dict[str, Any] = {"method": "PPO", "num_generations": 1, "kl_coef": 0.1, "optim": "sgd", "learning_rate": 0.05}
KINDS = ("lora", "full")


class Witness:
    """The columns of a trainer's rollouts, and the values that its critic gives in losses."""

    def __init__(self, trainer: Any) -> None:
        self.rollouts: list[dict[str, Tensor]] = []
        self.values: list[Tensor] = []
        self._rollout, self._values = trainer._generate_and_score_completions, trainer.values
        trainer._generate_and_score_completions, trainer.values = self.rollout, self.value

    def rollout(self, inputs: Any) -> dict[str, Any]:
        samples = self._rollout(inputs)
        self.rollouts.append({name: own.clone() for name, own in samples.items() if isinstance(own, Tensor)})
        return samples

    def value(self, critic: Any, samples: Any, rollout: Any = None, batch_size: Any = None) -> Tensor:
        found = self._values(critic, samples, rollout, batch_size)
        if rollout is None:
            self.values.append(found.detach() * samples["completion_mask"])
        return found


def build(model: Any, output: Path, kind: str = "lora", **options: Any) -> tuple[Any, Witness]:
    options = {**PPO, "lora": kind == "lora" and "peft_config" not in options.get("build", {}), **options}
    trainer = tiny.trainer(model, output, **options)
    with torch.no_grad():  # values that are not 0
        trainer.critic.head.weight.copy_(torch.linspace(-0.2, 0.2, trainer.critic.head.weight.numel()).view(1, -1))
    return trainer, Witness(trainer)


def run(model: Any, output: Path, kind: str = "lora", **options: Any) -> tuple[Any, list[dict[str, float]], Witness]:
    """A trainer that has trained, its logs without the summary, which are finite, and what was seen."""
    trainer, witness = build(model, output, kind, **options)
    trainer.train()
    history = tiny.history(trainer)[:-1]
    check_finite(history)
    return trainer, history, witness


def check_finite(history: Iterable[dict[str, float]]) -> None:
    for row in history:
        wrong = {name: value for name, value in row.items() if not math.isfinite(value)}
        assert not wrong, wrong


def of(history: Iterable[dict[str, float]], metric: str) -> list[float]:
    return [row[metric] for row in history if metric in row]


# a moving reference

MOVING: dict[str, Any] = {
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 1.0,
    "learning_rate": 0.01,
    "optim": "adamw_torch",
}


class References(transformers.TrainerCallback):
    """The reference at each step."""

    def __init__(self, trainer: Any) -> None:
        self._pairs, self.steps = trainer.feature(Reference).callback.pairs, list[dict[str, Tensor]]()
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append({pair.name: pair.reference.detach().clone() for pair in self._pairs()})


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_moves_for_the_kl_in_the_reward(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """A window is 4 steps. The KL of a rollout is exactly 0 right after a move, and only then."""
    options = {**MOVING, "beta": 0.0, "ref_model_sync_steps": 8, "max_steps": 13}
    trainer, witness = build(models["dense"], tmp_path, kind, **options)
    references = References(trainer)
    trainer.train()
    history = tiny.history(trainer)
    check_finite(history)
    assert [(step, rule) for step, _, rule in trainer.reference_refreshes] == [(8, "steps")]
    kl = of(history, "kl")
    assert len(kl) == 4 and kl[0] == kl[2] == 0 and min(abs(kl[1]), abs(kl[3])) > 1e-4
    assert of(history, "kl_per_answer")[2] == 0
    ref = [rollout["ref_per_token_logps"] for rollout in witness.rollouts]
    assert torch.equal(ref[2], witness.rollouts[2]["old_per_token_logps"])
    assert same(references.steps[0], references.steps[7]) and not same(references.steps[7], references.steps[8])
    assert not any("value" in name.split(".") for name in references.steps[0])
    assert trainer.beta == 0


# losses and masks


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers of an engine, whose log-probs are up to 1.5 nats off, with two tokens of an environment."""
    answers = [[(7 * i + 3 * t) % 200 + 45 for t in range(4 + i % 3)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": answers,
        "logprobs": [[-5.5 + 1.5 * math.sin(i + t) for t in range(len(own))] for i, own in enumerate(answers)],
        "env_mask": [[1, 0, 0, *[1] * (len(own) - 3)] for own in answers],
    }


def test_the_off_policy_mask_drops_sequences_for_the_policy_only(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"build": {"rollout_func": rollout}, "max_steps": 4}
    masked, history, _ = run(models["dense"], tmp_path, off_policy_mask_threshold=0.05, **options)
    plain, other, _ = run(models["dense"], tmp_path, **options)
    assert any(0 < share < 1 for share in of(history, "dropped/off_policy"))
    assert not same(snapshot(policy_parameters(masked)), snapshot(policy_parameters(plain)))
    assert of(history, "value/loss") == of(other, "value/loss")  # the critic learns from all
    assert same(masked.critic.state(), plain.critic.state())


# mixtures of experts


EVERYWHERE = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_routes_are_replayed_for_the_policy_and_not_for_the_critic(
    models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Step 1 has the policy's own routes. After it policy and critic are what they are without replay.

    In step 2, the replay changes the policy's gradient. The values of the critic must be those without replay.
    """
    options: dict[str, Any] = {"max_steps": 4, "router_aux_loss_coef": 0.0}
    options |= {"gradient_checkpointing": kind == "full", "learning_rate": 0.1}
    options["build"] = {"peft_config": EVERYWHERE} if kind == "lora" else {}
    if kind == "full":  # all of the base trains, and few routes change at a lower rate
        options["learning_rate"] = 0.5
    runs = [run(models["moe"], tmp_path, kind, router_replay=replay, **options) for replay in ("R2", None)]
    (_, history, witness), (_, live, unwitnessed) = runs
    changed = of(history, "routing/changed")
    assert changed[0] == 0 and max(changed[1:]) > 0.01 and of(history, "routing/fallback") == [0]
    assert torch.equal(witness.rollouts[0]["values"], unwitnessed.rollouts[0]["values"])
    seen, expected = witness.values[:2], unwitnessed.values[:2]  # of steps 1 and 2
    for number in range(2):
        torch.testing.assert_close(seen[number], expected[number], rtol=1e-4, atol=1e-5)
    assert history[0]["grad_norm"] == pytest.approx(live[0]["grad_norm"], rel=1e-4)
    assert any(abs(own["grad_norm"] / other["grad_norm"] - 1) > 1e-3 for own, other in zip(history, live, strict=True))


def test_replay_with_recomputed_layers_of_both_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router_replay='R2' and gradient_checkpointing=True"):
        build(models["moe"], tmp_path, router_replay="R2", router_aux_loss_coef=0.0, gradient_checkpointing=True)


@pytest.mark.parametrize("form", later_trl.ARGUMENTS)
def test_a_run_is_the_same_with_a_trl_whose_head_takes_more_arguments(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The critic's values and the log-probs among kept tokens replace those of TRL's function."""
    options: dict[str, Any] = {"keep_sampling_mask": True, "top_p": 0.8, "top_k": 30, "entropy_coef": 0.01}
    today, history, _ = run(models["dense"], tmp_path, **options)
    later_trl.install(monkeypatch, form)
    later, later_history, _ = run(models["dense"], tmp_path, **options)
    assert later_history == history
    assert resumable.differences(tiny.parameters(today), tiny.parameters(later)) == []
