"""What is logged of mismatch, masks and KL: raw, over all samples since the last log, and of the right ones."""

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import corrections as correction_oracles
from tests.tools import tiny
from tests.tools.batches import Evaluate, random_batch
from tests.tools.headroom import within
from trl_steady.core.metrics import _MOST_WAITING, Metrics
from trl_steady.functional import pooling

ENGINE = {"rollout_func": print}
BIN = 0.024  # the histogram's relative width, half of it
EPS = torch.finfo(torch.float32).eps


def in_bin(found: float, expected: float) -> bool:
    return within(abs(found - expected), 1e-6 * abs(expected) + 1e-9, granted=BIN * abs(expected))


@pytest.mark.parametrize("loss_type", ["gspo", "dapo"])
def test_mismatch_is_measured_before_any_mask_or_clip(evaluate: Evaluate, loss_type: str) -> None:
    batch = random_batch(12, 6)
    generator = torch.Generator().manual_seed(4)
    sampler_logps = batch.old_logps + 0.6 * torch.randn(12, 6, generator=generator, dtype=torch.float64)
    sampler_logps[1, 0] = torch.nan
    everything_dropped = {"geometric_mask_range": (1.0, 1.0), "off_policy_mask_threshold": 0.0}
    inputs = {"sampling_per_token_logps": sampler_logps, "importance_sampling_ratio": torch.zeros(12, 1).double()}
    outcome = evaluate(
        batch,
        loss_type=loss_type,
        build=ENGINE,
        inputs=inputs,
        attributes={"use_vllm": True},
        **everything_dropped,
    )
    assert outcome.loss.item() == 0
    of_sampler = (batch.old_logps, sampler_logps, batch.mask)
    above, below = correction_oracles.mismatch_shares(*of_sampler)
    expected = {
        "mismatch/log_ratio_mean": correction_oracles.mismatch_mean_log_ratio(*of_sampler),
        "mismatch/kl": correction_oracles.mismatch_k3(*of_sampler),
        "mismatch/above_2": above,
        "mismatch/below_half": below,
        "mismatch/effective_sample_size": correction_oracles.mismatch_effective_sample_size(*of_sampler),
    }
    assert {name: outcome.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert 0 < above < 0.5 and 0 < below < 0.5
    log_ratios = correction_oracles.mismatch_log_ratios(*of_sampler)
    statistics = correction_oracles.off_policy_statistic(batch.logps, sampler_logps, batch.mask)
    for suffix, share in {"q01": 0.01, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
        for name, values in {"mismatch/log_ratio": log_ratios, "off_policy": statistics}.items():
            quantile = correction_oracles.quantile(values, share)
            assert in_bin(outcome.metrics[f"{name}_{suffix}"], quantile), (name, suffix)


@pytest.mark.parametrize(
    ("weights", "expected"), [((350.0, 0.0), 0.5), ((400.0, 0.0), math.nan), ((-900.0, -900.0), math.nan)]
)
def test_weights_that_no_number_can_hold_end_no_training(weights: tuple[float, ...], expected: float) -> None:
    """An engine that returns the log-prob of a whole answer for each token has such weights."""
    totals = pooling.sample_size_totals(torch.tensor(weights))
    assert pooling.effective_sample_size(totals) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_kl_by_each_estimator(evaluate: Evaluate, corrected: bool) -> None:
    batch = random_batch(12, 6)
    noise = torch.randn(12, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ref_logps = batch.logps + 0.3 * noise
    options = {"inputs": {"ref_per_token_logps": ref_logps}, "beta": 0.1, "use_bias_correction_kl": corrected}
    metrics = evaluate(batch, loss_type="gspo", **options).metrics
    ratio = (batch.logps - batch.old_logps).exp() if corrected else torch.ones_like(batch.logps)
    log_r = ref_logps - batch.logps
    for name, values in {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - log_r - 1}.items():
        assert metrics[f"kl/{name}"] == pytest.approx((ratio * values)[batch.mask].mean().item(), rel=1e-12)
    assert metrics["kl"] == pytest.approx(metrics["kl/k3"], rel=1e-12)


def test_quantiles_are_those_of_sorting() -> None:
    """Over four decades on both sides of zero, zeros among them, in unequal parts."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator) * 10 ** (4 * torch.rand(5000, generator=generator) - 4)
    values[::10] = 0
    counts = sum(pooling.histogram(part) for part in values.split([1, 999, 4000]))
    assert isinstance(counts, Tensor)
    for share in (0.01, 0.2, 0.44, 0.5, 0.6, 0.9, 0.99, 1.0):
        expected = correction_oracles.quantile(values.double().tolist(), share)
        assert in_bin(pooling.quantile(counts, share), expected), share
    assert pooling.quantile(counts, 0.5) == 0
    assert math.isnan(pooling.quantile(torch.zeros_like(counts), 0.5))


def test_values_beyond_the_bins_are_counted_at_their_ends() -> None:
    counts = pooling.histogram(torch.tensor([-1e9, -math.inf, 1e-12, 1e9, math.nan]))
    assert counts.sum() == 4
    low, middle, high = (pooling.quantile(counts, share) for share in (0.2, 0.6, 0.9))
    assert in_bin(low, -1e3) and middle == 0 and in_bin(high, 1e3)


def logged(trained: Any) -> dict[str, float]:
    """The first log's values of the pooled metrics."""
    names = ("off_policy", "dropped", "kl/", "mismatch")
    return {k: v for row in trained.state.log_history[:1] for k, v in row.items() if k.startswith(names)}


def test_they_are_of_all_micro_batches_since_the_last_log(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence a micro-batch, as on a small GPU: a mean of each one's quantiles would be the mean."""

    def collected(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
        """Everything that is recorded in a run, by metric."""
        samples: dict[str, list[Tensor]] = {}
        original = Metrics.pooled

        def record(self: Any, **kinds: Any) -> None:
            for masked in kinds.values():
                for name, (values, mask) in masked.items():
                    samples.setdefault(name, []).append(values.detach()[mask])
            original(self, **kinds)

        monkeypatch.setattr(Metrics, "pooled", record)
        return samples

    samples = collected(monkeypatch)
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 16,
        "beta": 0.1,
        "logging_steps": 4,
        "max_steps": 4,
        "off_policy_mask_threshold": 0.01,
    }
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, loss_type="grpo", **options))
    metrics = logged(trained)
    assert len(samples["off_policy"]) == 16
    statistic = torch.cat(samples["off_policy"])
    for suffix, share in {"q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
        expected = correction_oracles.quantile(statistic.tolist(), share)
        assert in_bin(metrics[f"off_policy_{suffix}"], expected)
    assert metrics["off_policy_q99"] > statistic.mean() + statistic.std()
    for name in ("kl/k1", "kl/k2", "kl/k3", "dropped/off_policy"):
        values = torch.cat(samples[name]).double()
        # a micro-batch's sum of up to 12 numbers is rounded in float32
        assert within(abs(metrics[name] - values.mean()), 12 * EPS * values.abs().mean()), name
    assert 0 < metrics["dropped/off_policy"] < 1


def test_the_next_log_begins_anew_and_evaluation_has_its_own(models: dict[str, Path], tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "build": {"eval_dataset": tiny.dataset(4)},
        "max_steps": 4,
        "loss_type": "gspo",
    }
    trained = tiny.train(tiny.trainer(models["dense"], tmp_path, **options))
    rows = tiny.history(trained)
    training = [row for row in rows if "off_policy_q50" in row]
    assert len(training) == 4
    assert training[0]["off_policy_q99"] == 0  # the first update of a rollout is on-policy, whatever followed
    assert all(row["off_policy_q99"] != 0 for row in training[1:])
    assert [row["eval_off_policy_q99"] for row in rows if "eval_off_policy_q99" in row] == [0, 0]
    assert training[0]["ratio/sequence_min"] == 1 > max(row["ratio/sequence_min"] for row in training[1:])
    assert [row["eval_ratio/sequence_min"] for row in rows if "eval_ratio/sequence_min" in row] == [1, 1]


def test_extremes_depend_neither_on_micro_batches_nor_on_logs(models: dict[str, Path], tmp_path: Path) -> None:
    """One sequence each, as on a small GPU, and a small `token_budget`: means of extremes would be nearer to 1."""
    singles = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 16}

    def extremes(**options: Any) -> Tensor:
        options = {"loss_type": "gspo", "optim": "sgd", "max_steps": 4, **options}
        rows = tiny.history(tiny.train(tiny.trainer(models["dense"], tmp_path, **options)))[:-1]
        return torch.tensor([[row[f"ratio/sequence_{name}"] for name in ("min", "mean", "max")] for row in rows])

    whole = extremes()
    lowest, _, highest = whole.T
    assert len(whole) == 4 and (highest - lowest)[1:].min() > 0.01
    # gradients are summed in another order, so the weights of the next steps round otherwise
    torch.testing.assert_close(extremes(**singles), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(extremes(token_budget=24), whole, rtol=0, atol=1e-5)
    seldom = extremes(logging_steps=2)
    assert torch.equal(seldom[:, 0], lowest.view(2, 2).amin(1)) and torch.equal(
        seldom[:, 2], highest.view(2, 2).amax(1)
    )


class Source:
    """A trainer with nothing but its metrics."""

    def __init__(self, **accelerator: Any) -> None:
        device = torch.device("cpu")
        self.accelerator: Any = SimpleNamespace(**{"num_processes": 1, "device": device, **accelerator})
        self.model = torch.nn.Identity().train()
        self.logged_values = {"train": defaultdict[str, list[float]](list)}


@pytest.mark.parametrize("is_main", [True, False])
def test_totals_of_a_checkpoint_count_once_over_all_processes(is_main: bool) -> None:
    """Each process reads the totals of all, so only one may go on with them, and all must have the same names."""
    metrics = Metrics(Source(is_main_process=is_main))
    metrics.restore({("mean", "a"): [6.0, 3.0], ("size", "b"): [2.0, 4.0, 1.0], ("max", "c"): [-2.0]})
    assert list(metrics.state()) == [("mean", "a"), ("size", "b"), ("max", "c")]
    assert metrics.state()["max", "c"] == [-2.0]  # counts on each, where 0 would be greater
    assert metrics.state()["mean", "a"] == ([6.0, 3.0] if is_main else [0.0, 0.0])
    metrics.pooled(means={"a": (torch.tensor([1.0, 9.0]), torch.tensor([True, False]))})
    assert metrics.state()["mean", "a"] == ([7.0, 4.0] if is_main else [1.0, 1.0])


def test_means_do_not_pile_up_on_the_device_of_a_run_that_never_logs() -> None:
    trainer = Source()
    metrics = Metrics(trainer)
    for number in range(_MOST_WAITING):
        metrics.token_mean("kl", torch.full((1, 1), float(number)), torch.ones(1, 1, dtype=torch.bool))
        assert metrics.is_settled == (number == _MOST_WAITING - 1)
    assert trainer.logged_values["train"]["kl"] == [float(number) for number in range(_MOST_WAITING)]


def test_means_over_processes_are_those_of_their_means_as_trls() -> None:
    """One process has 1 and 3, another one has 10 and the last has nothing: (2 + 10 + 0) / 3."""
    others = [[2.0, 1.0, 1.0, 3.0], [0.0, 1.0, 0.0, 0.0]]
    trainer = Source(num_processes=3, gather=lambda ours: torch.cat([ours, torch.tensor(others).double()]))
    metrics = Metrics(trainer)
    names = {"min": "lowest", "mean": "mean", "max": "highest"}
    for values, mask in (([1.0, 3.0, 9.0], [1, 1, 0]), ([9.0, 9.0, 9.0], [0, 0, 0])):  # what the others have sent
        metrics.over_processes(names, torch.tensor(values), torch.tensor(mask).bool())
    assert [statistics.tolist() for _, statistics in metrics._of_micro_batches["train"]] == others
    metrics._of_micro_batches.clear()
    metrics.over_processes(names, torch.tensor([10.0]), torch.tensor([True]))
    metrics.settle()
    assert trainer.logged_values["train"] == {"lowest": [0.0], "mean": [4.0], "highest": [10.0]}


def test_a_rare_mean_of_nothing_is_not_logged() -> None:
    trainer = Source()
    metrics = Metrics(trainer)
    values = torch.tensor([1.0, 3.0])
    for counts in (False, True):
        metrics.pooled(rare_means={"rare": (values, torch.full((2,), counts))})
        metrics.log({"loss": 0.0}, is_collective=True)
        assert trainer.logged_values["train"].get("rare") == ([2.0] if counts else None)


def test_extremes_over_processes_are_those_of_all_values() -> None:
    """One process has two micro-batches, another one has a single one, and the last has nothing that counts."""

    def record(metrics: Metrics, *values: float, counts: bool = True) -> None:
        found = torch.tensor(values)
        masked = found, torch.full_like(found, counts, dtype=torch.bool)
        metrics.pooled(minima={"low": masked, "none": (found, found > 99)}, maxima={"high": masked})

    others = [Metrics(Source()) for _ in range(2)]
    record(others[0], -7.0, -3.0)
    record(others[1], 9.0, -9.0, counts=False)
    sent = [torch.cat([*each._pools["train"].values()]) for each in others]
    trainer = Source(num_processes=3, gather=lambda ours: torch.stack([ours[0], *sent]))
    metrics = Metrics(trainer)
    record(metrics, -2.0, -4.0)
    record(metrics, -5.0)
    metrics.log({"loss": 0.0}, is_collective=True)
    logged = trainer.logged_values["train"]
    assert math.isnan(logged.pop("none")[0]) and logged == {"low": [-7.0], "high": [-2.0]}
