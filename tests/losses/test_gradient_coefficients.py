"""The table of docs/gradient-coefficients.md against autograd, on a task of which all 15 answers are enumerated."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor

from tests.tools import tiny
from tests.tools.batches import HIGH, LOW, Batch, Evaluate

PAGE = Path(__file__).parents[2] / "docs/gradient-coefficients.md"
_, *ROWS = re.findall(r"^\| \[?([^|\]]+?)(?:\]\S+)? \|.*\| \$(.*)\$ \|$", PAGE.read_text(), flags=re.MULTILINE)
TABLE = dict(ROWS)
CLIPPED: dict[str, dict[str, Any]] = {
    "PPO": {"method": "PPO", "loss_type": "grpo", "beta": 0.0, "kl_coef": 0.0},
    "GRPO, DeepSeekMath's KL": {"loss_type": "grpo", "use_bias_correction_kl": False},
    "GRPO": {"loss_type": "grpo"},
    "GSPO": {"loss_type": "gspo"},
    "GSPO-token": {"loss_type": "gspo_token"},
    "GMPO": {"loss_type": "gmpo"},
}
BETA = 0.1

# an answer ends with token 0, or after three tokens
LENGTH = 3
ANSWERS = [
    answer
    for length in range(1, LENGTH + 1)
    for answer in itertools.product(range(3), repeat=length)
    if 0 not in answer[:-1] and (answer[-1] == 0 or length == LENGTH)
]
PREFIXES = [*dict.fromkeys(answer[:t] for answer in ANSWERS for t in range(len(answer)))]
PLACES = torch.tensor(
    [[PREFIXES.index(answer[: min(t, len(answer) - 1)]) for t in range(LENGTH)] for answer in ANSWERS]
)
TOKENS = torch.tensor([[*answer, 0, 0][:LENGTH] for answer in ANSWERS])
SIZES = torch.tensor([[len(answer)] for answer in ANSWERS])
MASK = torch.arange(LENGTH) < SIZES
RIGHT = torch.tensor([[float(sum(answer) % 2 == 0)] for answer in ANSWERS], dtype=torch.float64)  # (B, 1)


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of the policy, the old policy and the reference: one row for each prefix."""
    noise = torch.randn(3, len(PREFIXES), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return noise[0].clone().requires_grad_(), noise[0] + 0.6 * noise[1], noise[0] + 0.6 * noise[2]


def of_answers(table: Tensor) -> Tensor:
    """Return log π of each token of each answer, (B, T), with 0 outside of the mask."""
    return table.log_softmax(-1)[PLACES, TOKENS].where(MASK, 0)


def mean(values: Tensor) -> Tensor:
    """Return the mean over the tokens of each answer, (B, 1)."""
    return values.where(MASK, 0).sum(1, keepdim=True) / SIZES


def coefficient(method: str, mask: Tensor = MASK, **symbols: Any) -> Tensor:
    """Return what the formula on the page gives for these symbols, (B, T) with 0 outside of the mask."""
    text = re.sub(r"\\log (\w+)", r"log(\1)", TABLE[method].replace(r"\,", "").replace("\\rho", "rho"))
    text = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", text.replace("\\", ""))
    return eval(text, {"log": torch.log, "sigma": torch.sigmoid, **symbols}) * mask.double()


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Compare numbers near 1 that float64 rounds a few dozen times."""
    return torch.allclose(found, expected, rtol=0, atol=1e-13) and bool(expected.any())


@pytest.mark.parametrize("delta", [None, 1.4])
@pytest.mark.parametrize("method", CLIPPED)
def test_the_clipped_losses(evaluate: Evaluate, method: str, delta: float | None) -> None:
    logps, old_logps, ref_logps = (of_answers(table).detach() for table in tables())
    A = (RIGHT - RIGHT.mean()) / RIGHT.std()
    if method in ("PPO", "GSPO-token"):  # another advantage for each token
        A = A + torch.randn(MASK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = Batch(logps, old_logps, MASK, A if A.size(1) > 1 else A[:, 0])
    inputs: dict[str, Any] = {"ref_per_token_logps": ref_logps}
    if method == "PPO":  # `evaluate` gives the log-probs to the critic too, whose loss is then 0
        inputs |= {"values": logps, "returns": logps}
    outcome = evaluate(batch, **{"beta": BETA, "delta": delta, "inputs": inputs, **CLIPPED[method]})

    low, high = (math.exp(-LOW), math.exp(HIGH)) if method == "GMPO" else (1 - LOW, 1 + HIGH)
    most = delta or math.inf
    rho = (logps - old_logps).exp()
    s = mean(rho.log()).exp()
    m = mean(torch.where(A > 0, rho.clamp(max=high), rho.clamp(low, most)).log()).exp()

    def F(x: Tensor) -> Tensor:
        return ~(((A > 0) & (x > high)) | ((A < 0) & ((x < low) | (x > most))))

    expected = coefficient(method, rho=rho, s=s, m=m, A=A, F=F, beta=BETA, r=(ref_logps - logps).exp())
    assert is_close(-outcome.grad * SIZES * len(ANSWERS), expected)
    # both signs are below, in and above the clip range
    x = (s if "GSPO" in method else rho).expand(MASK.shape)[MASK]
    zones = {*zip((A.expand(MASK.shape)[MASK] > 0).tolist(), (x > low).tolist(), (x > high).tolist(), strict=True)}
    assert len(zones) == 6 and (delta is None or x.max() > delta)


def test_supervised_losses_and_both_kinds_of_rft(evaluate: Evaluate) -> None:
    def following(coefficients: Tensor, policy: Tensor) -> Tensor:
        """Return the gradient of the policy's table, as the page has it: up the objective."""
        weights = coefficients / (SIZES * len(ANSWERS))
        return torch.autograd.grad((weights * of_answers(policy)).sum(), policy)[0]

    policy, *_ = tables()
    losses = mean(torch.nn.functional.cross_entropy(policy[PLACES].mT, TOKENS, reduction="none"))
    for method, loss in {"SFT": losses.mean(), "RFT": losses[RIGHT > 0].sum() / len(ANSWERS)}.items():
        (found,) = torch.autograd.grad(-loss, policy, retain_graph=True)
        assert is_close(found, following(coefficient(method, R=RIGHT), policy))
    logps = of_answers(policy).detach()
    for method in ("RFT", "Online RFT"):  # as advantages, in the first update after a rollout
        outcome = evaluate(Batch(logps, logps, MASK, RIGHT[:, 0]), loss_type="grpo")
        assert is_close(-outcome.grad * SIZES * len(ANSWERS), coefficient(method, R=RIGHT))


def test_online_rft_is_the_policy_gradient_of_right_answers(evaluate: Evaluate) -> None:
    policy, *_ = tables()
    logps = of_answers(policy)
    odds = logps.sum(1, keepdim=True).exp()  # of each answer
    assert odds.sum().item() == pytest.approx(1, abs=1e-14)
    share, by_length = (odds * RIGHT).sum(), (odds * RIGHT / SIZES).sum()

    def expected(**options: Any) -> Tensor:
        """Return the gradient of the policy's table, in expectation over the answers."""
        weighted = (coefficient("Online RFT", R=RIGHT)[:, 0] * odds[:, 0]).detach() * len(ANSWERS)
        found = evaluate(Batch(logps.detach(), logps.detach(), MASK, weighted), **options)
        return torch.autograd.grad(logps, policy, -found.grad, retain_graph=True)[0]

    summed = expected(loss_type="dr_grpo", max_completion_length=LENGTH) * LENGTH
    assert is_close(summed, torch.autograd.grad(share, policy, retain_graph=True)[0])
    assert is_close(summed / share.detach(), torch.autograd.grad(share.log(), policy, retain_graph=True)[0])
    assert is_close(expected(loss_type="grpo"), torch.autograd.grad(by_length, policy, retain_graph=True)[0])


def test_dpo_of_trl(models: dict[str, Path], tmp_path: Path) -> None:
    """All pairs of a right and a wrong answer."""
    pairs = [(i, j) for i, j in itertools.product(range(len(ANSWERS)), repeat=2) if RIGHT[i] > RIGHT[j]]
    rows = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    logps, _, ref_logps = (of_answers(table).detach()[rows] for table in tables())
    logps.requires_grad_()
    args = trl.DPOConfig(str(tmp_path), beta=BETA, precompute_ref_log_probs=True, report_to="none", use_cpu=True)
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = trl.DPOTrainer(str(models["dense"]), args=args, train_dataset=data, processing_class=tiny.tokenizer())
    ones = torch.ones_like(logps)
    scores: Any = lambda **_: SimpleNamespace(
        log_probs=logps.where(MASK[rows], 0), entropy=ones, mean_logits=ones, is_top1=ones > 0
    )
    chosen, rejected = ref_logps.sum(1).chunk(2)
    ids = torch.ones(len(rows), 1 + LENGTH, dtype=torch.long)
    mask = torch.nn.functional.pad(MASK[rows].long(), (1, 0))  # one token of prompt
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    trainer.compute_loss(scores, inputs).backward()

    A = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(len(pairs))[:, None]
    one, two = (A[:, 0] * (logps - ref_logps).detach().sum(1)).chunk(2)
    expected = coefficient("DPO", A=A, beta=BETA, Delta=BETA * (one + two).repeat(2)[:, None], mask=MASK[rows])
    assert logps.grad is not None and is_close(-logps.grad * len(pairs), expected)


def test_the_table_has_no_other_method() -> None:
    assert {*TABLE} == {"SFT", "RFT", "Online RFT", "DPO", *CLIPPED}
