"""Values, returns and advantages of a rollout, against an oracle and a second forward of the critic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from tests.features.critic import tools as critics
from tests.features.critic.tools import ANSWERS, WEIGHTS, Twin, build, rows
from tests.oracles import ppo as oracles
from tests.tools import tiny

EVERYTHING = {
    **{"kl_coef": 0.3, "gamma": 0.9, "lam": 0.5, "value_lam": 0.8, "whiten_rewards": True},
    **{"missing_eos_penalty": 3.0, "bootstrap_truncated": True},
}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("options", "lora"),
    [
        ({"whiten_advantages": False}, True),
        ({"kl_coef": 0.0}, True),
        ({"bootstrap_truncated": True}, True),
        (EVERYTHING, True),
        ({**EVERYTHING, "mask_truncated_completions": True}, True),
        (EVERYTHING, False),
    ],
    ids=str,
)
def test_advantages_and_returns_are_the_oracles(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], lora: bool
) -> None:
    """Tools, step rewards, two weighted functions, answers without a reward, and others that are cut off."""

    defaults = {"gamma": 1.0, "lam": 0.95, "kl_coef": 0.05, "whiten_advantages": True, "whiten_rewards": False}

    def targets(samples: dict[str, Any], after: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the answers from the oracle. Those without a reward are left out beforehand.

        `after` (B,) has the values after the last tokens.
        """
        options = {**defaults, **options}
        scored = [number for number, own in enumerate(ANSWERS) if own.is_scored]
        mask = (samples["completion_mask"] * samples["tool_mask"]).bool()
        steps = [ANSWERS[number].earned(WEIGHTS) for number in scored]
        penalty = options.get("missing_eos_penalty")
        if penalty is not None:
            steps = [
                [*own, (len(ANSWERS[number].ids), -penalty)] if ANSWERS[number].is_cut else own
                for own, number in zip(steps, scored, strict=True)
            ]
        size = max(map(len, steps))
        padded = [[*own, *[(0, math.nan)] * (size - len(own))] for own in steps]
        logps = [samples.get(f"{name}_per_token_logps") for name in ("old", "ref")]
        tables = [None if own is None else own[scored] for own in logps]
        bootstrap = [after[number] if ANSWERS[number].is_cut else 0.0 for number in scored]
        found = oracles.ppo_targets(
            [[end for end, _ in own] for own in padded],
            [[value for _, value in own] for own in padded],
            *([] if tables[0] is None else tables[0], tables[1]),
            samples["values"][scored],
            mask[scored],
            bootstrap if options.get("bootstrap_truncated") else None,
            value_lam=options.get("value_lam", options["lam"]),
            **{name: options[name] for name in defaults},
        )
        whole = [torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)]
        whole[1][[number for number in range(len(ANSWERS)) if number not in scored]] = math.nan
        for table, own in zip(whole, found, strict=True):
            table[scored] = torch.tensor(own, dtype=torch.float64)
        return whole[0], whole[1]

    def apart(found: Tensor, expected: Tensor) -> float:
        """The largest difference; infinite if they are not NaN at the same places."""
        if not torch.equal(found.isnan(), expected.isnan()):
            return math.inf
        return (found.double() - expected).nan_to_num(nan=0.0).abs().max().item()

    trainer = build(models["dense"], tmp_path, lora=lora, known=True, **options)
    samples = trainer._generate_and_score_completions(rows())
    with torch.no_grad():
        values = Twin(trainer, exact=True).values(samples)
    after = values.gather(1, samples["completion_mask"].sum(1, keepdim=True)).squeeze(1)
    advantages, returns = targets(samples, after, options)
    # float32: returns of up to 10, sums of eight of them
    assert torch.allclose(samples["advantages"].double(), advantages, rtol=0, atol=2e-5)
    assert torch.allclose(samples["returns"].double(), returns, rtol=0, atol=5e-5, equal_nan=True)
    if options.get("kl_coef") != 0:  # the option is what makes the difference
        others = targets(samples, after, {})
        assert max(apart(*pair) for pair in zip(others, (advantages, returns), strict=True)) > 1e-2


@pytest.mark.fast_rows(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {"trim_padding": False}),
        ("lora", {}),
        *(
            (kind, {"token_budget": 20, "share_prompts": True})
            for kind in ("lora", "full", "nf4", "lora moe", "full moe", "value_peft_config", "modules_to_save", "dora")
        ),
    ],
    ids=str,
)
def test_values_and_log_probs_are_those_of_a_plain_forward(
    models: dict[str, Path], wide: Path, tmp_path: Path, options: dict[str, Any], kind: str
) -> None:
    """The critic's adapter acts in the critic's pass, and in no other."""
    own: dict[str, Any] = {"nf4": kind == "nf4", "lora": not kind.startswith("full")}
    if kind == "value_peft_config":
        own["build"] = {"value_peft_config": LoraConfig(r=2, target_modules=["k_proj", "down_proj"])}
    elif kind == "modules_to_save":
        own["build"] = {"peft_config": LoraConfig(**tiny.LORA, modules_to_save=["embed_tokens"])}
    elif kind == "dora":
        own["build"] = {"peft_config": LoraConfig(**tiny.LORA, use_dora=True)}
    if "moe" in kind:
        own["router_aux_loss_coef"] = 0.0  # prompts are not shared with a load-balancing loss
    model = wide if kind == "nf4" else models["moe" if "moe" in kind else "dense"]
    trainer = build(
        model, tmp_path, known=True, bootstrap_truncated=True, per_device_train_batch_size=3, **own, **options
    )
    before = critics.snapshot(dict(trainer.model.named_parameters()))
    samples = trainer._generate_and_score_completions(rows())
    twin = Twin(trainer)
    with torch.no_grad():
        values, old = twin.values(samples)[:, :-1], twin.logps(samples)
        reference = twin.logps(samples, of_reference=True)
    mask = (samples["completion_mask"] * samples["tool_mask"]).bool()
    # float32 sums of other shapes, of values and log-probs up to 10
    for column, expected in (("values", values), ("old_per_token_logps", old), ("ref_per_token_logps", reference)):
        assert torch.allclose(samples[column][mask], expected[mask], rtol=0, atol=1e-4), column
    assert (samples["values"][~mask] == 0).all()
    assert (old - reference)[mask].abs().mean() > 0.1 and values[mask].std() > 0.1
    # nothing is trained, frozen or switched by it
    assert critics.same(before, critics.snapshot(dict(trainer.model.named_parameters())))
    if twin.is_lora:
        whole = trainer.accelerator.unwrap_model(trainer.model)
        layers = [own for own in whole.modules() if isinstance(own, BaseTunerLayer)]
        assert layers and all(own.active_adapters == ["default"] and not own.disable_adapters for own in layers)
        trained = {n for n, p in whole.named_parameters() if p.requires_grad}
        assert trained == {n for n, _ in whole.named_parameters() if "default" in n.split(".")}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_passes_of_a_rollout(models: dict[str, Path], tmp_path: Path, lora: bool) -> None:
    """Without coefficients there is no reference. On-policy, only the KL in the reward needs old log-probs."""

    def passes(**options: Any) -> tuple[int, int]:
        trainer = build(models["dense"], tmp_path, lora=lora, **options)
        calls, own = [], trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *args, **keywords: (
            calls.append(1) or own(*args, **keywords)
        )
        samples = trainer._generate_and_score_completions(rows(4))
        assert ("ref_per_token_logps" in samples) == any(options.get(name) != 0 for name in ("kl_coef", "beta"))
        if not lora:
            assert (trainer.ref_model is not None) == ("ref_per_token_logps" in samples)
        return len(calls), sum("per_token_logps" in name for name in samples)

    on_policy = {"steps_per_generation": 1}
    assert passes(kl_coef=0.0, beta=0.0, **on_policy) == (0, 0)
    assert passes(kl_coef=0.0, beta=0.0) == (1, 1)
    assert passes(kl_coef=0.0, beta=0.1, **on_policy) == (1, 1)
    assert passes(kl_coef=0.1, beta=0.0, **on_policy) == (2, 2)
    assert passes(kl_coef=0.1, beta=0.1) == (2, 2)


def test_the_coefficient_of_the_kl_moves_toward_its_target(models: dict[str, Path], tmp_path: Path) -> None:
    """The rollout that moves it still uses the old one. An evaluation does not move it."""
    how = {"kl_coef": 0.5, "kl_target": 0.7, "kl_horizon": 50}
    torch.manual_seed(0)
    trainer = build(models["dense"], tmp_path, lora=True, known=True, whiten_advantages=False, **how)
    coefs = [0.5]
    for _ in range(2):
        assert trainer.kl_coef == coefs[-1]
        samples = trainer._generate_and_score_completions(rows())
        mask = (samples["completion_mask"] * samples["tool_mask"]).bool()
        torch.manual_seed(0)  # the same adapter
        fixed = build(models["dense"], tmp_path, lora=True, known=True, whiten_advantages=False, kl_coef=coefs[-1])
        expected = fixed._generate_and_score_completions(rows())["returns"]
        assert torch.allclose(samples["returns"], expected, rtol=0, atol=5e-5, equal_nan=True)
        ratios = (samples["old_per_token_logps"] - samples["ref_per_token_logps"]).double().where(mask, 0).sum(1)
        answers = int(mask.any(1).sum())
        assert answers == len(ANSWERS) - 1
        kl = (ratios.sum() / answers).item()
        coefs.append(oracles.adaptive_kl(coefs[-1], kl, target=0.7, horizon=50, answers=answers))
        assert trainer.kl_coef == pytest.approx(coefs[-1], rel=1e-6)  # of a float32 sum
        coefs[-1] = trainer.kl_coef
    assert len({*coefs}) == 3
    trainer.model.eval()
    trainer._generate_and_score_completions(rows())
    assert trainer.kl_coef == coefs[-1]


@pytest.mark.parametrize("options", [{}, {"whiten_rewards": True, "missing_eos_penalty": 3.0}], ids=str)
def test_metrics_by_hand(models: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    """Scaled rewards have the same mean, which is what is logged."""
    trainer = build(models["dense"], tmp_path, lora=True, known=True, kl_coef=0.3, **options)
    samples = trainer._generate_and_score_completions(rows())
    mask = (samples["completion_mask"] * samples["tool_mask"]).bool()
    counts = mask & torch.tensor([own.is_scored for own in ANSWERS]).unsqueeze(1)
    values, returns = samples["values"][counts].double(), samples["returns"][counts].double()
    ratios = (samples["old_per_token_logps"] - samples["ref_per_token_logps"]).double()
    kl, penalty = ratios.where(mask, 0).sum(1), options.get("missing_eos_penalty", 0.0)
    rewards = torch.tensor([sum(v for _, v in own.earned(WEIGHTS)) - penalty * own.is_cut for own in ANSWERS])
    logged: dict[str, float] = {}
    trainer.log(logged)
    expected = {
        "value/mean": values.mean(),
        "value/returns": returns.mean(),
        "value/explained_variance": 1 - (returns - values).var() / returns.var(),
        "kl": ratios[mask].mean(),
        "kl_coef": torch.tensor(0.3),
        "kl_per_answer": kl[mask.any(1)].mean(),
        "reward_with_kl": (rewards - 0.3 * kl)[counts.any(1)].mean(),
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value.item(), rel=1e-4), name  # of float32 columns
