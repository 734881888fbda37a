"""`skip_old_pass`: gradients and metrics are those with the pass, which is run where anything needs it."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import Tensor

import trl_steady
from tests.tools import engines, tiny
from tests.tools.engines import Engine
from trl_steady.features.active_features import summary
from trl_steady.features.policy_loss import PolicyLoss

engine, mixture = engines.engine, engines.mixture

Built = Callable[..., Any]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# bounds that single tokens and whole sequences both pass
BOUNDS = {"vllm_importance_sampling_clip_min": 0.85, "vllm_importance_sampling_clip_max": 1.2}
# three updates of two micro-batches, each on a rollout of its own
ON_POLICY = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 3, "beta": 0.0}


def plain_scores(trainer: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """Log-probs (B, T) in the model's dtype."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # the same for a prompt with padding and without
    logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -width - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


@pytest.fixture
def built(
    models: dict[str, Path], mixture: Path, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Built:
    """Builds on-policy trainers with an engine that has the policy, but noise in its log-probs."""
    engines.colocate(engine, monkeypatch)

    def build(model: Any = "dense", **options: Any) -> Any:
        engines.alone(monkeypatch)
        engine.syncs = 0
        engine._asked.clear()  # so that each trainer gets the same answers
        options = {**ON_POLICY, **BOUNDS, "use_vllm": True, "vllm_mode": "colocate", "engine_check": None, **options}
        if options.get("method") == "RLOO":
            options = {name: value for name, value in options.items() if "importance" not in name}
        model = {**models, "mixture": mixture}[model] if isinstance(model, str) else model
        trainer = tiny.trainer(model, tmp_path, **options)

        def spoken(prompt: list[int], number: int) -> list[int]:
            ids = engine.anything(prompt, number)
            return [*ids[:7], tiny.SIZES["eos_token_id"][0]] if number % 2 else ids  # the others are cut off

        @torch.no_grad()
        def scored(prompt: list[int], ids: list[int]) -> list[float]:
            sequence = torch.tensor([[*prompt, *ids]])
            scores = plain_scores(trainer, sequence, torch.ones_like(sequence), len(ids))[0].tolist()
            noise = engines._random([prompt, ids]).normal(0, 0.15, len(ids))
            noise[0] = math.nan if len(ids) == 3 else noise[0]  # which the engine could not score
            return [float(score + each) for score, each in zip(scores, noise, strict=True)]

        engine.spoken, engine.scored = spoken, scored
        return trainer

    return build


@pytest.fixture
def exact(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Gives models in float64, whose log-probs are too: TRL's fused head returns float32."""
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):

        def score(
            self: Any, model: Any, ids: Tensor, mask: Tensor, logits_to_keep: int, *_: Any, **asked: Any
        ) -> tuple[Tensor, Tensor, None]:
            logps = plain_scores(self, ids, mask, logits_to_keep)
            return logps, torch.linspace(0.1, 2, logps.numel()).view_as(logps).double(), None

        monkeypatch.setattr(kind, "_get_per_token_logps_and_entropies", score)
    return lambda: transformers.AutoModelForCausalLM.from_pretrained(models["gpt2"], dtype=torch.float64)


def check(exact: Callable[[], Any], built: Built, **options: Any) -> list[dict[str, float]]:
    """Gradients are equal to 1e-10, relative to the largest, and logs to 1e-9: three steps carry rounding on."""
    gradients, logs = list[tiny.Gradients](), list[list[dict[str, float]]]()
    for skip in (True, False):
        trainer = built(exact(), skip_old_pass=skip, **options)
        gradients.append(tiny.Gradients())
        trainer.add_callback(gradients[-1])
        logs.append(tiny.history(tiny.train(trainer))[:-1])
        assert trainer.skips_old_pass == skip
    without, expected = gradients
    assert len(without.steps) == len(expected.steps) == 3
    for found, with_pass in zip(without.steps, expected.steps, strict=True):
        largest = max(gradient.abs().max() for gradient in with_pass.values())
        assert largest > 0
        for name, gradient in with_pass.items():
            assert (found[name] - gradient).abs().max() <= 1e-10 * largest, name
    for row, theirs in zip(*logs, strict=True):
        assert row == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True)
    return logs[0]


@pytest.mark.fast_rows(1)
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts")
@pytest.mark.parametrize(("loss_type", "mode"), zip(("gspo", "gspo_token", "gmpo", "dapo"), MODES, strict=True))
def test_gradients_and_metrics_are_those_with_the_pass(
    exact: Callable[[], Any], built: Built, loss_type: str, mode: str
) -> None:
    logs = check(exact, built, loss_type=loss_type, vllm_importance_sampling_mode=mode)
    for row in logs:  # the bounds act, but not on all
        low, mean, high = (row[f"sampling/importance_sampling_ratio/{each}"] for each in ("min", "mean", "max"))
        assert low in (0, 0.85) and low < mean < high <= 1.2


@pytest.mark.fast_rows(1)
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts")
@pytest.mark.parametrize(
    ("name", "others"),
    {
        "masks": {
            "geometric_mask_range": (0.95, 1.05),
            "token_veto_threshold": 0.75,
            "off_policy_mask_threshold": 0.05,
        },
        "KL": {"beta": 0.1, "kl_ratio_denominator": "sampler", "kl_estimator": "k2", "loss_type": "gspo"},
        "penalty": {"sampler_penalty": 0.1},
        "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "loss_type": "gmpo"},
        "two rollouts for each update": {"gradient_accumulation_steps": 4},
        "used twice in an update": {"gradient_accumulation_steps": 4, "num_iterations": 2},
        "PPO": {"method": "PPO", "kl_coef": 0.0},
        "RLOO": {"method": "RLOO"},
    }.items(),
)
def test_so_they_are_with_other_settings(
    exact: Callable[[], Any], built: Built, name: str, others: dict[str, Any]
) -> None:
    options = {"vllm_importance_sampling_mode": "token_truncate", **others}
    for row in check(exact, built, **options):
        shares = [value for key, value in row.items() if key.startswith("dropped/")]
        assert len(shares) == (3 if name == "masks" else 0)
        assert not shares or max(shares) > 0


def counted(trainer: Any) -> dict[str, int]:
    """Counts of passes through the policy and of their tokens, with and without a gradient."""
    counts = dict.fromkeys(("old passes", "old tokens", "passes", "tokens"), 0)

    def count(_: Any, __: Any, asked: dict[str, Any]) -> None:
        if asked.get("fused_lm_head"):
            kind = "" if torch.is_grad_enabled() else "old "
            counts[f"{kind}passes"] += 1
            counts[f"{kind}tokens"] += asked["input_ids"].numel()

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    return counts


@pytest.mark.parametrize(
    ("options", "skips"),
    [
        ({}, True),
        ({"beta": 0.1}, True),
        ({"method": "PPO", "kl_coef": 0.0}, True),
        ({"method": "RLOO"}, True),
        ({"method": "RLOO", "use_vllm": False}, True),
        ({"use_vllm": False}, False),  # TRL does so
        ({"vllm_importance_sampling_correction": False}, False),  # and so
        ({"skip_old_pass": False}, False),
        ({"trim_padding": False}, False),
        ({"trim_padding": False, "skip_old_pass": True}, True),
        ({"method": "PPO"}, False),  # a KL in the reward
        ({"method": "RLOO", "beta": 0.1}, False),
        ({"steps_per_generation": 4}, False),
        ({"num_iterations": 2}, False),
        ({"gradient_accumulation_steps": 3}, False),  # an update of one and a half rollouts
        ({"model": "moe", "router_replay": "R2"}, False),
        ({"model": "moe"}, True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:router_replay='R2' has no effect")
def test_the_pass_is_skipped_where_nothing_needs_it(built: Built, options: dict[str, Any], skips: bool) -> None:
    trainer = built(**options)
    assert trainer.skips_old_pass == skips
    said = [line for line in summary(trainer).splitlines() if "pass of the old policy" in line]
    assert said == [f"  on: no pass of the old policy: skip_old_pass={options.get('skip_old_pass')}"] * skips


def test_a_rollout_has_one_pass_less(built: Built) -> None:
    counts = []
    for options in ({}, {"skip_old_pass": False}, {"loss_type": "dppo"}):
        trainer = built(**options)
        counts.append(counted(trainer))
        trainer.train()
    without, expected, dppo = counts
    assert dppo == without  # its ratio is to the engine, so that TRL needs none either
    history = tiny.history(trainer)[:-1]
    assert all(row["mismatch/kl"] > 0 and row["ratio/sequence_max"] == 1 for row in history)
    # three rollouts of two micro-batches, which TRL scores in batches of the same size
    assert expected["old passes"] == expected["passes"] == without["passes"] == 6
    assert without["old passes"] == without["old tokens"] == 0
    assert without["tokens"] == expected["tokens"] == expected["old tokens"] > 0


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 30, "gradient_accumulation_steps": 4, "loss_type": "gspo"},
        {"share_prompts": True},
        {"method": "RLOO", "token_budget": 30, "keep_sampling_mask": True, "top_k": 20},
        {"model": "mixture", "router_replay": "R3", "router_aux_loss_coef": 0.0},
    ],
    ids=str,
)
def test_it_composes_with_what_changes_passes(built: Built, options: dict[str, Any]) -> None:
    """Up to float32's rounding, which packing and batches change: 1e-4 of the largest gradient, and of a log-prob."""
    found: list[tiny.Gradients] = []
    logs: list[dict[str, float]] = []
    for skip in (None, False):
        trainer = built(
            skip_old_pass=skip, vllm_importance_sampling_mode="token_truncate", **{**options, "max_steps": 1}
        )
        assert trainer.skips_old_pass == (skip is None)
        found.append(tiny.Gradients())
        trainer.add_callback(found[-1])
        trainer.train()
        logs.append({key: value for key, value in tiny.history(trainer)[0].items() if key.startswith("sampling")})
    (without,), (expected,) = (each.steps for each in found)
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert all((without[name] - gradient).abs().max() <= 1e-4 * largest for name, gradient in expected.items())
    is_merged = options.get("gradient_accumulation_steps") == 4  # two rollouts of one update
    if is_merged:
        logs = [{key: row[key] for key in row if key.endswith("mean")} for row in logs]
    assert logs[0] == pytest.approx(logs[1], rel=1e-2 if is_merged else 1e-4, abs=1e-4)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_an_evaluation_scores_its_rollouts(built: Built, method: str) -> None:
    rows = []
    for skip in (True, False):
        trainer = built(skip_old_pass=skip, per_device_eval_batch_size=4, method=method)
        counts = counted(trainer)
        rows.append(trainer.evaluate(eval_dataset=tiny.dataset(4)))
        assert counts["old passes"] == 2 * 4  # four batches, each with a rollout and a loss
    clocks = ("runtime", "per_second", "time")
    without, expected = ({k: v for k, v in row.items() if not any(c in k for c in clocks)} for row in rows)
    assert without == expected and len(expected) > 10
    assert ("eval_sampling/importance_sampling_ratio/mean" in expected) == (method == "GRPO")


def test_a_step_that_raised_leaves_nothing_in_the_metrics(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = built(max_steps=1)
    loss, calls = trainer._compute_loss, []

    def raising(*arguments: Any) -> Tensor:
        calls.append(loss(*arguments))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(trainer, "_compute_loss", raising)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    part = trainer.feature(PolicyLoss)
    assert len(part._engine_differences) == len(part._engine_weights) == 2
    part.on_step_begin()
    assert part._engine_differences == part._engine_weights == []


def test_rloo_refuses_it_with_the_kl_in_its_reward(built: Built) -> None:
    with pytest.raises(
        ValueError, match=r"skip_old_pass=True does not work with beta=0\.1: the KL in the reward needs"
    ):
        built(method="RLOO", beta=0.1, skip_old_pass=True)


@pytest.mark.parametrize(
    ("adapter", "config", "said"),
    [
        ({"lora_dropout": 0.1}, {}, r"q_proj\.lora_dropout\.default\.p=0\.1"),
        ({}, {"attention_dropout": 0.2}, r"attention_dropout=0\.2"),
    ],
    ids=["dropout of an adapter", "dropout of attention"],
)
def test_dropout_keeps_the_pass_and_the_start_says_so(
    built: Built, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, adapter: Any, config: Any, said: str
) -> None:
    monkeypatch.setattr(tiny, "LORA", {**tiny.LORA, **adapter})
    load = transformers.AutoModelForCausalLM.from_pretrained
    trainer = built(load(models["dense"], **config), lora=True)
    assert not trainer.skips_old_pass
    (line,) = (line for line in summary(trainer).splitlines() if "old policy" in line)
    assert line.startswith("  off: no pass of the old policy: ") and re.search(said, line)
    with pytest.raises(ValueError, match=rf"skip_old_pass=True does not work here: .*{said}"):
        built(load(models["dense"], **config), lora=True, skip_old_pass=True)


def test_dropout_that_is_disabled_does_not(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "LORA", {**tiny.LORA, "lora_dropout": 0.1})
    assert built(lora=True, disable_dropout=True).skips_old_pass


def test_a_subclass_that_may_read_old_log_probs_gets_them(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(trl_steady.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            samples = super()._generate_and_score_completions(inputs)
            self.has_old = "old_per_token_logps" in samples
            return samples

    monkeypatch.setattr(trl_steady, "GRPOTrainer", Reads)
    trainer = built(max_steps=1)
    assert "off: no pass of the old policy" in summary(
        trainer
    ) and "Reads._generate_and_score_completions may need it" in summary(trainer)
    assert tiny.train(trainer).has_old
    assert not tiny.train(built(max_steps=1, skip_old_pass=True)).has_old
