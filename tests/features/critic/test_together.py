"""Short runs of PPO with everything else of this package."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from tests.features.critic.tools import policy_parameters, same, snapshot
from tests.tools import later_trl, resumable, tiny
from trl_steady.features.reference.feature import Reference


def build(model: Any, output: Path, kind: str = "lora", **options: Any) -> Any:
    """A PPO trainer whose critic has values that are not 0."""
    options = {"kl_coef": 0.1, "optim": "sgd", "learning_rate": 0.05, "lora": kind == "lora", **options}
    options["lora"] = options["lora"] and "peft_config" not in options.get("build", {})
    trainer = tiny.trainer(model, output, method="PPO", num_generations=1, **options)
    with torch.no_grad():
        trainer.critic.head.weight.copy_(torch.linspace(-0.2, 0.2, trainer.critic.head.weight.numel()).view(1, -1))
    return trainer


def run(trainer: Any) -> list[dict[str, float]]:
    """The logs of a training without the summary. They are finite."""
    trainer.train()
    history = tiny.history(trainer)[:-1]
    for row in history:
        wrong = {name: value for name, value in row.items() if not math.isfinite(value)}
        assert not wrong, wrong
    return history


def of(history: Iterable[dict[str, float]], metric: str) -> list[float]:
    return [row[metric] for row in history if metric in row]


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reference_moves_for_the_kl_in_the_reward(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """A window is 4 steps. The KL of a rollout is exactly 0 right after a move, and only then."""
    moving = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 8}
    options = {"learning_rate": 0.01, "optim": "adamw_torch", "beta": 0.0, "max_steps": 13}
    trainer = build(models["dense"], tmp_path, kind, **moving, **options)
    history = run(trainer)
    assert [(step, rule) for step, _, rule in trainer.reference_refreshes] == [(8, "steps")]
    kl = of(history, "kl")
    assert len(kl) == 4 and kl[0] == kl[2] == 0 and min(abs(kl[1]), abs(kl[3])) > 1e-4
    assert of(history, "kl_per_answer")[2] == 0
    pairs = trainer.feature(Reference).callback.pairs()
    assert pairs and not any("value" in pair.name.split(".") for pair in pairs)
    assert trainer.beta == 0


def test_the_off_policy_mask_drops_sequences_for_the_policy_only(models: dict[str, Path], tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Answers of an engine, whose log-probs are up to 1.5 nats off, with two tokens of an environment."""
        answers = [[(7 * i + 3 * t) % 200 + 45 for t in range(4 + i % 3)] for i in range(len(prompts))]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": answers,
            "logprobs": [[-5.5 + 1.5 * math.sin(i + t) for t in range(len(own))] for i, own in enumerate(answers)],
            "env_mask": [[1, 0, 0, *[1] * (len(own) - 3)] for own in answers],
        }

    options = {"build": {"rollout_func": rollout}, "max_steps": 4}
    masked = build(models["dense"], tmp_path, off_policy_mask_threshold=0.05, **options)
    history = run(masked)
    plain = build(models["dense"], tmp_path, **options)
    other = run(plain)
    assert any(0 < share < 1 for share in of(history, "dropped/off_policy"))
    assert not same(snapshot(policy_parameters(masked)), snapshot(policy_parameters(plain)))
    assert of(history, "value/loss") == of(other, "value/loss")  # the critic learns from all
    assert same(masked.critic.state(), plain.critic.state())


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_routes_are_replayed_for_the_policy_and_not_for_the_critic(
    models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Step 1 has the policy's own routes. After it policy and critic are what they are without replay.

    In step 2, the replay changes the policy's gradient. The values of the critic must be those without replay.
    """
    options: dict[str, Any] = {"max_steps": 4, "router_aux_loss_coef": 0.0}
    options |= {"gradient_checkpointing": kind == "full", "learning_rate": 0.1}
    if kind == "lora":
        options["build"] = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
    else:  # all of the base trains, and few routes change at a lower rate
        options["learning_rate"] = 0.5
    histories: list[list[dict[str, float]]] = []
    values: list[list[Tensor]] = []
    for replay in ("R2", None):
        trainer = build(models["moe"], tmp_path, kind, router_replay=replay, **options)
        of_critic, seen = trainer.values, list[Tensor]()

        def noted(
            critic: Any,
            samples: Any,
            *rest: Any,
            of_critic: Any = of_critic,
            seen: list[Tensor] = seen,
            **others: Any,
        ) -> Tensor:
            found = of_critic(critic, samples, *rest, **others)
            seen.append(found.detach() * samples["completion_mask"])
            return found

        trainer.values = noted
        histories.append(run(trainer))
        values.append(seen)
    history, live = histories
    changed = of(history, "routing/changed")
    assert changed[0] == 0 and max(changed[1:]) > 0.01 and of(history, "routing/fallback") == [0]
    replayed, expected = values
    assert torch.equal(replayed[0], expected[0])  # of the rollout
    for number in (1, 2):  # of steps 1 and 2
        torch.testing.assert_close(replayed[number], expected[number], rtol=1e-4, atol=1e-5)
    assert history[0]["grad_norm"] == pytest.approx(live[0]["grad_norm"], rel=1e-4)
    assert any(abs(own["grad_norm"] / other["grad_norm"] - 1) > 1e-3 for own, other in zip(history, live, strict=True))


def test_replay_with_recomputed_layers_of_both_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router_replay='R2' and gradient_checkpointing=True"):
        build(models["moe"], tmp_path, router_replay="R2", router_aux_loss_coef=0.0, gradient_checkpointing=True)


def test_a_generation_that_rounds_its_adapter_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL casts the whole model to bf16 and back for it, in every rollout. A critic of its own is not cast."""
    rounding = {"use_transformers_continuous_batching": True, "bf16": True}
    with pytest.raises(ValueError, match=r"continuous_batching=True and bf16=True.* Use bf16=False, or another"):
        build(models["dense"], tmp_path, **rounding)
    build(models["dense"], tmp_path, **rounding, lora=False)


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("form", later_trl.ARGUMENTS)
def test_a_run_is_the_same_with_a_trl_whose_head_takes_more_arguments(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The critic's values and the log-probs among kept tokens replace those of TRL's function."""
    options: dict[str, Any] = {"keep_sampling_mask": True, "top_p": 0.8, "top_k": 30, "entropy_coef": 0.01}
    today = build(models["dense"], tmp_path, **options)
    history = run(today)
    later_trl.install(monkeypatch, form)
    later = build(models["dense"], tmp_path, **options)
    assert run(later) == history
    assert resumable.differences(tiny.parameters(today), tiny.parameters(later)) == []
