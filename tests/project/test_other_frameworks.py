"""The adapters of docs/other-frameworks.md give our trainer's loss and gradients, called as each framework calls them.

Stand-ins have the signatures that the page dates. The frameworks themselves are not installed.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.project.code_blocks import blocks, run
from tests.tools.batches import Batch, Evaluate, Outcome, random_batch
from trl_steady.functional import masks

LOSSES, VERL, SKYRL, PRIME = (block for block in blocks("docs/other-frameworks.md") if block.language == "python")
LOW, HIGH = 0.1, 0.15  # clips some ratios of `random_batch` under each loss
Case = tuple[str, Batch, Callable[..., Outcome]]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a module with these attributes importable, and the packages that it is in."""

    def provide(name: str, **attributes: Any) -> None:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:i]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        vars(sys.modules[name]).update(attributes)

    provide("steady_losses", **run(LOSSES))
    return provide


@pytest.fixture(params=["gspo", "gspo_token", "gmpo"])
def case(request: pytest.FixtureRequest, evaluate: Evaluate) -> Case:
    """A method, a batch in which it clips, and our trainer's loss of it."""
    batch = random_batch(per_token=request.param == "gspo_token")

    def trained(**options: Any) -> Outcome:
        return evaluate(batch, **{"loss_type": request.param, "epsilon": LOW, "epsilon_high": HIGH, **options})

    clipped = trained().grad[batch.mask] == 0
    assert 2 < clipped.sum() < len(clipped) - 2
    return request.param, batch, trained


def garbage(batch: Batch) -> Batch:
    """Return the batch with NaN for padding."""
    nan = lambda values: values.where(batch.mask, torch.nan)
    return batch._replace(logps=nan(batch.logps), old_logps=nan(batch.old_logps))


def per_token(batch: Batch) -> Tensor:
    """Return advantages of shape (B, T), 0 for padding, as all three frameworks have them."""
    advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    return advantages * batch.mask


def outcome(loss: Tensor, logps: Tensor) -> Outcome:
    loss.backward()
    assert logps.grad is not None
    return Outcome(loss.detach(), logps.grad, {})


def is_same(found: Outcome, expected: Outcome, factor: float = 1.0) -> bool:
    """To 1e-10, in float64. The gradient of padding is exactly 0, whatever stood there."""
    same = torch.allclose(found.loss, expected.loss * factor, rtol=1e-10, atol=0)
    return same and torch.allclose(found.grad, expected.grad * factor, rtol=1e-10, atol=1e-16)


def weighted(trained: Callable[..., Outcome], weights: Tensor) -> Outcome:
    """Our trainer's loss with weights of an engine."""
    inputs = {"importance_sampling_ratio": weights, "sampling_per_token_logps": torch.zeros_like(weights)}
    return trained(inputs=inputs, attributes={"use_vllm": True})


@pytest.mark.fast_rows(1)
def test_verl(case: Case, provide: Callable[..., None]) -> None:
    """Two processes, with two and four answers, whose gradients are averaged."""
    method, batch, trained = case
    adapters: dict[str, Callable[..., Any]] = {}

    def agg_loss(
        loss_mat: Tensor,
        loss_mask: Tensor,
        loss_agg_mode: str,
        dp_size: int = 1,
        batch_num_tokens: int | None = None,
        global_batch_size: int | None = None,
        loss_scale_factor: int | None = None,
    ) -> Tensor:
        """verl's mean over the answers of the global batch, for a backward pass that averages over processes."""
        assert loss_agg_mode == "seq-mean-token-mean" and loss_mask.dtype == torch.bool
        means = (loss_mat * loss_mask).sum(-1) / loss_mask.sum(-1).clamp(min=1)
        return means.sum() * dp_size / (len(means) if global_batch_size is None else global_batch_size)

    register = lambda name: lambda func: adapters.setdefault(name, func)
    provide("verl.trainer.ppo.core_algos", agg_loss=agg_loss, register_policy_loss=register)
    run(VERL)

    def in_verl(batch: Batch, weights: Tensor | None = None) -> Outcome:
        logps, loss, count = (
            batch.logps.clone().requires_grad_(),
            torch.zeros((), dtype=torch.float64),
            len(batch.mask),
        )
        info = {"dp_size": 2, "batch_num_tokens": 99, "global_batch_size": count, "loss_scale_factor": None}
        config = SimpleNamespace(clip_ratio_low=LOW, clip_ratio_high=HIGH, global_batch_info=info)
        for rows in (slice(0, 2), slice(2, count)):
            part, metrics = adapters[f"steady_{method}"](
                old_log_prob=batch.old_logps[rows],
                log_prob=logps[rows],
                advantages=per_token(batch)[rows],
                response_mask=batch.mask[rows],
                loss_agg_mode="token-mean",
                config=config,
                rollout_is_weights=None if weights is None else weights[rows],
            )
            assert metrics == {}
            loss = loss + part / 2
        return outcome(loss, logps)

    assert is_same(in_verl(garbage(batch)), trained())
    weights = 0.5 + torch.rand(batch.mask.shape, generator=torch.manual_seed(0), dtype=torch.float64)
    assert is_same(in_verl(garbage(batch), weights), weighted(trained, weights))
    assert not is_same(weighted(trained, weights), trained())


@pytest.mark.fast_rows(1)
def test_skyrl(case: Case, provide: Callable[..., None]) -> None:
    """Micro-batches of two answers, whose losses are added; the advantages are divided before."""
    method, batch, trained = case
    adapters: dict[str, Callable[..., Any]] = {}

    def correct(
        loss: Tensor, old_log_probs: Tensor, rollout_logprobs: Tensor | None, loss_mask: Tensor, correction: Any
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """SkyRL's truncated ratio per token, and a mask of answers."""
        if rollout_logprobs is None:
            return loss, loss_mask, {}
        ratio = (old_log_probs - rollout_logprobs).exp().clamp(max=correction.high)
        return loss * ratio, loss_mask * correction.keep, {"is_ratio_max": ratio.max().item()}

    utils = "skyrl.backends.skyrl_train.utils"
    provide(f"{utils}.ppo_utils", PolicyLossRegistry=SimpleNamespace(register=adapters.__setitem__))
    provide(f"{utils}.off_policy_correction_utils", apply_off_policy_correction=correct)
    run(SKYRL)

    def in_skyrl(batch: Batch, rollout: Tensor | None = None, keep: Tensor | None = None) -> Outcome:
        logps, loss, count = (
            batch.logps.clone().requires_grad_(),
            torch.zeros((), dtype=torch.float64),
            len(batch.mask),
        )
        divisor = count * batch.mask.sum(-1, keepdim=True).clamp(min=1)
        advantages = per_token(batch) / divisor
        for start in range(0, count, 2):
            rows = slice(start, start + 2)
            correction = SimpleNamespace(high=1.2, keep=1.0 if keep is None else keep[rows])
            part, metrics = adapters[f"steady_{method}"](
                logps[rows],
                batch.old_logps[rows],
                advantages[rows],
                config=SimpleNamespace(eps_clip_low=LOW, eps_clip_high=HIGH, off_policy_correction=correction),
                loss_mask=batch.mask[rows].float(),
                rollout_logprobs=None if rollout is None else rollout[rows],
            )
            assert bool(metrics) == (rollout is not None)
            loss = loss + part
        return outcome(loss, logps)

    assert is_same(in_skyrl(garbage(batch)), trained())
    rollout = batch.old_logps + 0.3 * torch.randn(batch.mask.shape, generator=torch.manual_seed(0)).double()
    mismatch, keep = masks.log_ratio(batch.old_logps, rollout), torch.tensor([1.0, 1, 0, 1, 0, 1])[:, None]
    weights = masks.engine_weights(mismatch, batch.mask, mode="token_truncate", high=1.2)
    assert (weights == 1.2).any()
    assert is_same(in_skyrl(batch, rollout, keep), weighted(trained, weights * keep))


@dataclass
class LossInputs:
    """prime-rl's, of one sequence, prompt included."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """prime-rl's."""

    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture
def in_prime(provide: Callable[..., None]) -> Callable[..., Outcome]:
    """The page's loss in prime-rl: sequences one by one, divided by the number of loss tokens."""
    provide("prime_rl.trainer.rl.loss", LossInputs=LossInputs, LossOutputs=LossOutputs)
    loss_fn = run(PRIME)["loss"]
    prompt = lambda row: torch.nn.functional.pad(row, (2, 0))  # of two tokens

    def in_prime(batch: Batch, ref: Tensor | None = None, scale: float | None = None, **given: Any) -> Outcome:
        logps, loss = batch.logps.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        for i in range(len(batch.mask)):
            inputs = LossInputs(
                prompt(logps[i]),
                prompt(batch.old_logps[i]),
                None if ref is None else prompt(ref[i]),
                prompt(per_token(batch)[i]),
                prompt(batch.mask[i]),
                None if scale is None else torch.full((batch.mask.size(1) + 2,), scale).double(),
            )
            loss = loss + loss_fn(inputs, low=LOW, high=HIGH, **given).loss
        return outcome(loss / batch.mask.sum(), logps)

    return in_prime


@pytest.mark.fast_rows(1)
def test_prime_rl(case: Case, in_prime: Callable[..., Outcome]) -> None:
    method, batch, trained = case
    length = batch.mask.sum().item() / len(batch.mask)
    given: dict[str, Any] = {"method": method, "mean_length": length}
    assert is_same(in_prime(garbage(batch), **given), trained())
    assert is_same(in_prime(batch, scale=0.5, **given), trained(), 0.5)
    # the corrected KL
    ref = batch.old_logps + 0.2
    found = in_prime(garbage(batch), ref.where(batch.mask, torch.nan), beta=0.3, **given)
    expected = trained(beta=0.3, inputs={"ref_per_token_logps": ref})
    assert is_same(found, expected) and not is_same(expected, trained())


def test_without_a_mean_length_prime_rl_weighs_tokens(evaluate: Evaluate, in_prime: Callable[..., Outcome]) -> None:
    """TRL's "dapo" does so too."""
    batch = random_batch()
    options = {
        "importance_sampling_level": "sequence",
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "steps_per_generation": 1,
    }
    expected = evaluate(batch, loss_type="dapo", **options)
    assert is_same(in_prime(batch, method="gspo"), expected)
    assert not is_same(evaluate(batch, loss_type="gspo", **options), expected)


def test_the_losses_need_torch_only() -> None:
    code = LOSSES.source + "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded and not loaded & {"trl", "transformers", "accelerate", "datasets", "peft", "bitsandbytes"}
