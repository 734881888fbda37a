"""The docs show what docs/figures/evidence computes, and what is computed is right."""

import importlib
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.batches import Batch, Evaluate
from tests.tools.headroom import within

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = ("staleness", "mismatch", "truncation", "routes", "lengths", "long", "thresholds", "dynamic")
INF = math.inf
EXACT = 1e-12


@pytest.fixture(scope="module")
def evidence() -> Iterator[Any]:
    """The modules of docs/figures/evidence by their names."""
    folder = str(DOCS / "figures/evidence")
    names = ("exact", "shown", *SCRIPTS)
    sys.path.insert(0, folder)
    yield type("Evidence", (), {name: importlib.import_module(name) for name in names})
    sys.path.remove(folder)
    for name in names:
        del sys.modules[name]


def coin(evidence: Any) -> Any:
    """Return a task of one token, 1 of which earns 1, the policy at 1/2, and the pass with an old policy at 1/4."""
    task = evidence.exact.Task.of(2, 1, lambda _: torch.tensor([0.0, 1.0], dtype=torch.float64))
    theta, old = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    softmax = evidence.exact.softmax
    given = evidence.exact.Pass.of(task, softmax, theta, softmax(old), softmax(old))
    return task, given, task.gradient(softmax, theta)


def close(outcome: Tensor, *expected: float) -> bool:
    """Compare bias, 1 - cosine and variance."""
    return within((outcome[: len(expected)] - torch.tensor(expected, dtype=torch.float64)).abs(), EXACT)


def test_staleness_by_hand(evidence: Any) -> None:
    """True: p (1 - p) = 1/4 on the logit of token 1, and -1/4 on the other. The mean reward is 1/4, A = -1/4, 3/4.

    No ratio: 1/4 * 3/4 * 1/2 + 3/4 * 1/4 * 1/2 = 3/16, three quarters of 1/4. With the ratios 2/3 and 2 it is
    1/2 * 3/4 * 1/2 + 1/2 * 1/4 * 1/2 = 1/4. Its second moment is 1/4 * (2 * 3/4)^2 / 2 + 3/4 * (2/3 * 1/4)^2 / 2 =
    7/24, so its variance is 7/24 - 1/8 = 1/6, and 4/3 of |true|^2 = 1/8. A clip at 0.2 stops both tokens.
    """
    task, given, true = coin(evidence)
    assert within((true - torch.tensor([[-0.25, 0.25]])).abs(), EXACT)
    Method = evidence.exact.Method
    assert close(Method("none").outcome(given, task, true), 1 / 4, 0, 3 / 16)
    for name in ("token", "gspo", "gspo_token", "product"):  # the same for one token
        assert close(Method(name, INF).outcome(given, task, true), 0, 0, 4 / 3)
    assert close(Method("gmpo", INF).outcome(given, task, true), 0, 0, 4 / 3)
    for clipped in (Method(), Method("gspo"), Method("gspo_token"), Method("gmpo", 0.4)):
        assert close(clipped.outcome(given, task, true), 1, 1, 0)
    # ln 1.5 = 0.405: the lower clip of GMPO at 0.41 lets token 0 through, 3/4 * 2/3 * 1/4 * 1/2 = 1/16
    assert close(Method("gmpo", 0.41).outcome(given, task, true), 3 / 4, 0)
    # squares 0.164 of token 0 and 0.480 of token 1, whose mean is 0.75 * 0.164 + 0.25 * 0.480 = 0.243
    for budget, *expected in ((0.04, 1, 1, 0), (0.17, 3 / 4, 0), (0.24, 3 / 4, 0), (0.25, 0, 0, 4 / 3)):
        assert close(Method("m2po", m2po_budget=budget).outcome(given, task, true), *expected)
    # token 0 has A < 0 and ln(3/4 / 1/2) = 0.405 above the threshold: what is left is 1/2 * 3/4 * 1/2 = 3/16
    assert close(Method("token", INF, off_policy_mask_threshold=0.4).outcome(given, task, true), 1 / 4, 0)
    assert close(Method("token", INF, off_policy_mask_threshold=0.41).outcome(given, task, true), 0, 0)


def test_the_weights_by_hand(evidence: Any) -> None:
    """Ratios 2 and 2 of two tokens: the product is 4."""
    double = torch.full((1, 2), 2.0, dtype=torch.float64).log()
    zero = torch.zeros_like(double)
    given = evidence.exact.Pass(zero, double, zero, zero)
    mask = torch.ones(1, 2, dtype=torch.bool)
    at_3 = {"token_truncate": [2, 2], "token_mask": [2, 2], "sequence_truncate": [3], "sequence_mask": [0]}
    at_1_5 = {"token_truncate": [1.5, 1.5], "token_mask": [0, 0]}
    for limit, modes in ((3.0, at_3), (1.5, at_1_5), (5.0, {"sequence_truncate": [4], "sequence_mask": [4]})):
        for mode, expected in modes.items():
            options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": limit}
            weights = evidence.exact.Method(**options).engine_weights(given, mask)
            assert within((weights - torch.tensor(expected)).abs(), EXACT)


def biases(outcomes: dict[str, Tensor], *names: str) -> Tensor:
    return torch.stack([outcomes[name][:2] for name in (names or outcomes)])


@pytest.mark.slow
def test_the_product_of_all_ratios_is_unbiased(evidence: Any) -> None:
    product, unlimited = "product of the ratios, no clip", "`sequence_truncate`, no limit"
    cases = [
        (biases(evidence.staleness.outcomes(0)), EXACT),
        (biases(evidence.mismatch.outcomes(0.0)), EXACT),
        *((biases(evidence.truncation.outcomes(1.0, target)), EXACT) for target in evidence.truncation.TARGETS),
        *((biases(evidence.routes.outcomes(0.0, case)), EXACT) for case in evidence.routes.CASES),
        (biases(evidence.staleness.outcomes(32), product), 1e-10),
        (biases(evidence.mismatch.outcomes(0.6), unlimited), EXACT),
        (biases(evidence.long.outcomes(256, "stale"), product), 1e-9),
        (biases(evidence.long.outcomes(64, "engine"), unlimited), 1e-9),
    ]
    assert all(within(bias.abs(), bound) for bias, bound in cases)


def test_the_samplers_log_probs_leave_the_kl_unbiased(evidence: Any) -> None:
    found = evidence.mismatch.of_kl(0.5)
    assert within(biases(found, '`kl_ratio_denominator="sampler"`').abs(), EXACT)
    assert found['`kl_ratio_denominator="old"`'][0] > 0.1


def test_the_kept_mask_has_the_gradient_of_the_truncated_policy(evidence: Any) -> None:
    truncation = evidence.truncation
    for top_p in (0.9, 0.6):
        kept = biases(truncation.outcomes(top_p, truncation.TARGETS[0]), "kept sampling mask")
        assert within(kept.abs(), EXACT)
    with_mask, without = (truncation.outcomes(1.0, truncation.TARGETS[1])[arms] for arms in [*truncation.arms()][::4])
    assert within((with_mask - without).abs(), 1e-9)  # nothing is left out: the same in every column


def test_counts_stand_for_all_orders(evidence: Any) -> None:
    """The gradient of a method over counts is that over every completion."""
    exact = evidence.exact
    counts = evidence.long.counts([5], 0.5)
    every = exact.Task.of(2, 5, lambda n: torch.zeros(n, dtype=torch.float64))
    every = exact.Task(
        every.tokens, every.mask, torch.zeros_like(every.prefixes), (every.tokens.double().mean(1) > 0.5).double()
    )
    theta = 0.3 * exact.gaussians(1, 1, 2)
    old = exact.softmax(theta + 0.3 * exact.gaussians(2, 1, 2))
    for method in (exact.Method(), exact.Method("gspo", 0.1), exact.Method("gmpo", 0.3), exact.Method("product")):
        short, long = (
            method.outcome(exact.Pass.of(task, exact.softmax, theta, old), task, task.gradient(exact.softmax, theta))
            for task in (counts, every)
        )
        assert within((short - long).abs(), 1e-9)


def test_the_true_gradient_is_the_slope_of_the_return(evidence: Any) -> None:
    """J by a loop over completions, and central differences."""
    task, theta = evidence.staleness.problem(0)
    true = task.gradient(evidence.exact.softmax, theta)

    def expected(logits: Tensor) -> float:
        table, total = logits.softmax(-1).tolist(), 0.0
        rows = {own: row for row, own in enumerate(itertools.chain(*(words(n) for n in range(3))))}
        for own, reward in zip(words(3), task.rewards.tolist(), strict=True):
            total += reward * math.prod(table[rows[own[:t]]][own[t]] for t in range(3))
        return total

    def words(length: int) -> list[tuple[int, ...]]:
        return [*itertools.product(range(6), repeat=length)]

    for row, token in ((0, 0), (3, 5), (40, 2)):
        step = torch.zeros_like(theta)
        step[row, token] = 1e-5
        slope = (expected(theta + step) - expected(theta - step)) / 2e-5
        assert within(abs(slope - float(true[row, token])), 1e-9)


@pytest.mark.parametrize(
    ("name", "own", "options"),
    [
        ("grpo", {}, {}),
        ("delta", {"delta": 1.3}, {"delta": 1.3}),
        ("dapo", {"reduction": "rollout_tokens"}, {"loss_type": "bnpo"}),  # which has the batch's own tokens
        ("dr_grpo", {"reduction": "constant"}, {"loss_type": "dr_grpo", "max_completion_length": 4}),
        ("gspo", {"ratio": "gspo"}, {"loss_type": "gspo"}),
        ("gspo_token", {"ratio": "gspo_token"}, {"loss_type": "gspo_token"}),
        ("gmpo", {"ratio": "gmpo"}, {"loss_type": "gmpo"}),
        (
            "dppo",
            {"ratio": "dppo", "epsilon": 0.05, "epsilon_high": 0.04, "reduction": "constant"},
            {"loss_type": "dppo", "epsilon": 0.05, "epsilon_high": 0.04, "max_completion_length": 4},
        ),
        ("penalty", {"sampler_penalty": 0.5, "epsilon": 0.05}, {"sampler_penalty": 0.5, "epsilon": 0.05}),
        ("off-policy mask", {"off_policy_mask_threshold": 0.1}, {"off_policy_mask_threshold": 0.1}),
        (
            "masks",
            {"geometric_mask_range": (0.8, 1.3), "token_veto_threshold": 0.5},
            {"geometric_mask_range": (0.8, 1.3), "token_veto_threshold": 0.5, "build": {"rollout_func": print}},
        ),
        ("weights", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2}, {}),
    ],
)
def test_the_slopes_are_those_of_the_trainers_loss(
    evidence: Any, evaluate: Evaluate, name: str, own: dict[str, Any], options: dict[str, Any]
) -> None:
    exact = evidence.exact
    task, theta = evidence.lengths.problem(0, 1.0)
    tables = [exact.softmax(theta + 0.3 * exact.gaussians(seed, *theta.shape)) for seed in range(2)]
    given = exact.Pass.of(task, exact.softmax, theta, *tables)
    if name == "dapo":  # the mean length of the batch in place of the sampler's
        length = task.mask.sum(-1).double().mean()
        scale = given.mean_length(task) / length
    else:
        scale = 1.0
    method = exact.Method(**{"epsilon": 0.2, "epsilon_high": 0.27, **own})
    advantages = task.rewards - task.rewards.mean()
    slopes = method.slopes(given, task, advantages)
    inputs: dict[str, Any] = {"sampling_per_token_logps": given.sampler_logps}
    if name == "weights":
        inputs["importance_sampling_ratio"] = method.engine_weights(given, task.mask)
        options = {"attributes": {"use_vllm": True}}
    options = {"loss_type": "grpo", **options}  # TRL's default is "dapo"
    batch = Batch(given.logps, given.old_logps, task.mask, advantages)
    outcome = evaluate(batch, inputs=inputs, **options)
    assert (outcome.grad == 0).any() and (outcome.grad != 0).any()
    assert torch.allclose(slopes * scale, -outcome.grad * len(task.mask), rtol=1e-9, atol=1e-12)


RATES = torch.tensor([0.02, 0.3, 0.9], dtype=torch.float64)


def all_groups(size: int) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """All prompts and answers of a group with their probability."""
    for prompt, p in enumerate(RATES.tolist()):
        for answers in itertools.product((0, 1), repeat=size):
            yield prompt, answers, math.prod(p if right else 1 - p for right in answers) / len(RATES)


def of_batch(evidence: Any, batch: Any, loss_type: str, scale_rewards: str) -> list[float]:
    """The gradient of a batch, from the loss's definition."""
    gradient, lengths = [0.0] * len(RATES), evidence.dynamic.LENGTHS
    every = [right for _, answers, _ in batch for right in answers]
    for prompt, answers, _ in batch:
        for right in answers:
            advantage = right - sum(answers) / len(answers)
            spread = {"group": answers, "batch": every}.get(scale_rewards)
            if spread is not None:
                advantage /= torch.tensor(spread, dtype=torch.float64).std().item() + 1e-4
            divisor = {"grpo": len(every) * lengths[right], "dr_grpo": len(every)}.get(loss_type)
            slope = right - RATES[prompt].item()
            gradient[prompt] += advantage * slope / (divisor or sum(lengths[each] for each in every))
    return gradient


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_expected_updates_by_all_batches(evidence: Any, loss_type: str, scale_rewards: str) -> None:
    """A batch is two groups of two answers: all groups, or those that have a signal."""
    options = {"loss_type": loss_type, "scale_rewards": scale_rewards}
    for kept in (None, torch.tensor([False, True, False]), torch.tensor([True, True, False])):
        groups = [each for each in all_groups(2) if kept is None or kept[sum(each[1])]]
        share = sum(chance for *_, chance in groups)
        expected = torch.zeros(len(RATES), dtype=torch.float64)
        for batch in itertools.product(groups, repeat=2):
            chance = math.prod(chance / share for *_, chance in batch)
            expected += chance * torch.tensor(of_batch(evidence, batch, **options), dtype=torch.float64)
        assert within((evidence.dynamic.update(RATES, 2, 2, kept, **options) - expected).abs(), EXACT)


def test_dynamic_sampling_keeps_the_expected_direction(evidence: Any) -> None:
    """By all outcomes of two rounds of two groups. Its size grows by 1 / (1 - z), times the share of filled slots."""
    dynamic, kept = evidence.dynamic, torch.tensor([False, True, False])
    without, z = dynamic.update(RATES, 2, 2), dynamic.idle(RATES, 2, kept)
    groups = [(*each, of_batch(evidence, [each], "grpo", "group")) for each in all_groups(2)]
    expected = torch.zeros(len(RATES), dtype=torch.float64)
    for sampled in itertools.product(groups, repeat=4):
        chance = math.prod(each[2] for each in sampled)
        first, later = ([each for each in of if sum(each[1]) == 1] for of in (sampled[:2], sampled[2:]))
        for *_, gradient in (first + later)[:2]:  # the second round has two groups if one or two are missing
            expected += chance * torch.tensor(gradient, dtype=torch.float64) / 2
    assert within((without / (1 - z) * dynamic.filled(2, 1 - z, 2) - expected).abs(), EXACT)
    assert within((dynamic.update(RATES, 2, 2, kept) - without / (1 - z)).abs(), EXACT)
    assert dynamic.filled(2, 1 - z, 2) < 0.9  # so that idle groups are left
    z, page = dynamic.idle(dynamic.RATES, dynamic.SIZE, dynamic.KEPT), dynamic.PAGE.read_text()
    assert f"{100 * dynamic.filled(dynamic.GROUPS, 1 - z, 3):.0f} % of the slots" in page and f"z = {z:.1f}," in page


def test_prompts_of_passes_by_all_orders(evidence: Any) -> None:
    """Three prompts, and batches of two: kept groups of the first round, then of all prompts in another order."""
    dynamic, kept = evidence.dynamic, torch.tensor([False, True, False])
    weights = (2 * RATES * (1 - RATES)).tolist()
    expected = [0.0] * 3
    for first, later in itertools.product(itertools.permutations(range(3)), repeat=2):
        for keeps in itertools.product((False, True), repeat=5):
            order = first[:2] + later
            chances = (weights[x] if keep else 1 - weights[x] for x, keep in zip(order, keeps, strict=True))
            chance = math.prod(chances) / 36
            for place, prompt in enumerate(order):
                if place < 2 or sum(keeps[:place]) < 2:
                    expected[prompt] += chance
    found = dynamic.in_passes(RATES, 2, 2, kept, 1)
    assert within((found - torch.tensor(expected, dtype=torch.float64)).abs(), EXACT)
    # two copies of one prompt are two prompts
    doubled = dynamic.in_passes(RATES[[0, 0, 1, 1, 2, 2]], 2, 2, kept, 1).view(3, 2).sum(1)
    assert within((dynamic.in_passes(RATES, 2, 2, kept, 2) - doubled).abs(), EXACT)


@pytest.mark.slow
def test_the_page_shows_what_the_scripts_print(evidence: Any) -> None:
    pages = {page: page.read_text() for page in (evidence.shown.PAGE, evidence.dynamic.PAGE)}
    found = (re.findall(r"<!-- ([\w, ]+) -->\n(.*?)\n<!-- /\1 -->", page, flags=re.DOTALL) for page in pages.values())
    shown = dict(itertools.chain(*found))
    for name in SCRIPTS:
        module = getattr(evidence, name)
        for key, table in module.tables().items():
            assert shown.pop(key, table) == table, f"run `python docs/figures/evidence/{name}.py --write`"
        assert f"figures/evidence/{name}.png" in pages[getattr(module, "PAGE", evidence.shown.PAGE)]
    assert not shown
