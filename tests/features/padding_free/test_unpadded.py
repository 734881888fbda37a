"""Training without padding is TRL's: the same loss, gradients and metrics, whatever the loss and the model."""

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.features.padding_free.rollouts import UNEQUAL, Widths, answers
from tests.tools import tiny
from tests.tools.headroom import within
from tests.tools.losses import SEQUENCE_RATIO_LOSS_TYPES
from trl_steady.features.padding_free.feature import PaddingFree
from trl_steady.features.padding_free.packing import Length

ROLLOUT: dict[str, Any] = {"build": {"rollout_func": UNEQUAL}}


def pair(models: dict[str, Path], tmp_path: Path, *, model: str = "dense", **options: Any) -> tuple[Any, Any]:
    """Without our options and with them, both trained; TRL's own trainer where it knows the loss."""
    ours = {name: options.pop(name) for name in ("token_budget", "share_prompts") if name in options}
    settings: dict[str, Any] = {
        "beta": 0.1,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",  # Adam would blow rounding up to the size of an update where a gradient is zero on paper
        "learning_rate": 3e-3,
        "epsilon": 5e-3,
        "epsilon_high": 8e-3,
        "max_grad_norm": 1.0,
        **options,
        "build": {"rollout_func": UNEQUAL, **options.get("build", {})},
    }
    if settings.get("loss_type") in SEQUENCE_RATIO_LOSS_TYPES:
        padded = tiny.trainer(models[model], tmp_path, trim_padding=False, **settings)
    else:
        padded = tiny.trainer(models[model], tmp_path, ours=False, **settings)
    tiny.train(padded)
    return padded, tiny.train(tiny.trainer(models[model], tmp_path, **settings, **ours))


def assert_same_training(padded: Any, ours: Any, *, metrics: bool = True) -> None:
    before = tiny.parameters(padded)
    for name, value in tiny.parameters(ours).items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    if not metrics:
        return
    rows = list(zip(tiny.history(ours), tiny.history(padded), strict=True))
    assert len(rows) == 7
    for row, theirs in rows:
        for name, value in theirs.items():
            if value is None or math.isnan(value):  # None is TRL's for no completion
                assert row[name] is None or math.isnan(row[name]), name
            else:  # a quantile may fall into the bin beside, 5 % off
                granted = 0.05 * abs(value) if "_q" in name else 0
                # rounding errors of float32 grow a hundredfold over the updates
                assert within(abs(row[name] - value), 4e-4 * abs(value) + 8e-6, granted=granted), name


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("loss_type", "share_prompts"), [("grpo", False), ("dapo", True), ("gspo_token", True)])
def test_losses_gradients_and_metrics_are_those_of_padded_passes(
    models: dict[str, Path], tmp_path: Path, loss_type: str, share_prompts: bool
) -> None:
    assert_same_training(*pair(models, tmp_path, loss_type=loss_type, share_prompts=share_prompts))


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 3.9, "cast_lm_head_to_fp32": True},
        {"top_entropy_quantile": 0.37, "delta": 1.01, "mask_truncated_completions": True},
        {
            "model_init_kwargs": {"attn_implementation": "eager"},
            **{"gradient_checkpointing": True, "share_prompts": True},
        },
        {"lora": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"model": "moe", "router_aux_loss_coef": 0.1},
        {"model": "gpt2"},
        {"model": "falcon_h1"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:trim_padding=True only cuts")
def test_unpadded_equals_padded_for_other_models_and_options(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    assert_same_training(*pair(models, tmp_path, loss_type="bnpo", **options))


def test_a_batch_without_padding_is_trained_on_bit_for_bit_as_by_trl(models: dict[str, Path], tmp_path: Path) -> None:
    equal = {"rollout_func": answers(lambda i, prompt: 6), "train_dataset": tiny.dataset().select([0, 0, 0, 0])}
    shapes: list[tuple[int, ...]] = []

    class Seen(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            Widths(model, shapes)

    equal["callbacks"] = [Seen()]
    padded, ours = pair(models, tmp_path, loss_type="grpo", optim="adamw_torch", build=equal)

    assert shapes and len(set(shapes)) == 1 and shapes[0][0] == 4  # those of TRL's trainer, and then of ours
    assert tiny.history(ours) == tiny.history(padded)
    after = tiny.parameters(padded)
    assert all(torch.equal(value, after[name]) for name, value in tiny.parameters(ours).items())


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("loss_type", "token_budget", "accumulated"),
    # parts of TRL's micro-batches, several, and one. The 16 are those of two rollouts, twice.
    [("grpo", 30, 16), ("dapo", 12, 2), ("gspo", 10_000, 4)],
)
def test_the_loss_of_micro_batches_by_tokens_is_that_of_the_whole_step(
    models: dict[str, Path], tmp_path: Path, loss_type: str, token_budget: int, accumulated: int
) -> None:
    settings = {"off_policy_mask_threshold": 0.01, "use_bias_correction_kl": True, "token_budget": token_budget}
    padded, ours = pair(
        models, tmp_path, loss_type=loss_type, gradient_accumulation_steps=accumulated, max_steps=3, **settings
    )

    assert_same_training(padded, ours, metrics=False)
    for row, theirs in zip(tiny.history(ours), tiny.history(padded), strict=True):
        for name in {"loss", "grad_norm", "train_loss"} & theirs.keys():
            # the gradients that a step adds up have norms of up to 10, and cancel
            assert row[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-4 if name == "grad_norm" else 8e-6), name


def test_a_micro_batch_by_tokens_is_as_large_as_its_budget_allows(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"token_budget": 30, "gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 1}
    trainer: Any = tiny.trainer(models["dense"], tmp_path, beta=0.1, **options, **ROLLOUT)
    policy, reference = Widths(trainer.model), Widths(trainer.ref_model)
    tiny.train(trainer)

    batches = trainer._buffered_inputs
    lengths = torch.cat([b["prompt_mask"].sum(-1) + b["completion_mask"].sum(-1) for b in batches])
    lengths = sorted(lengths.tolist(), reverse=True)
    half = len(policy.shapes) // 2  # the pass of the old policy
    for widths in (policy.shapes[:half], policy.shapes[half:], reference.shapes):
        assert all(shape[0] == 1 and shape[1] <= 30 for shape in widths)
        assert sum(shape[1] for shape in widths) == sum(lengths)
        assert len(widths) < 16 and max(lengths) + min(lengths) <= 30 < sum(lengths[:4])  # not one by one, nor TRL's


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize("budget", [2, 30])
def test_a_budget_below_every_sequence_warns_once_with_one_to_set(
    models: dict[str, Path], tmp_path: Path, budget: int
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer: Any = tiny.train(tiny.trainer(models["dense"], tmp_path, token_budget=budget, max_steps=3))
    found = [each for each in caught if "token_budget" in str(each.message)]
    assert len(found) == (budget == 2)
    for each in found:
        said = re.search(r"is below the (\d+) tokens .* own\. Set token_budget=(\d+), for example", str(each.message))
        assert said and each.filename == tiny.__file__ and trainer.feature(PaddingFree).notes == [str(each.message)]
        assert int(said[1]) > 2 and int(said[2]) % 4 == 0 and int(said[2]) // 4 >= int(said[1])


def test_sequences_that_are_skipped_count_for_the_warning_of_a_budget(models: dict[str, Path], tmp_path: Path) -> None:
    def long_ones_differ(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            float(sum(ids) % 11) * prompt.startswith("abab")
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    options = {"token_budget": 12, "skip_zero_weight": True, "gradient_accumulation_steps": 4, "max_steps": 4}
    build = {"reward_funcs": long_ones_differ}
    trainer: Any = tiny.train(tiny.trainer(models["dense"], tmp_path, build=build, **options))
    assert not [note for note in trainer.feature(PaddingFree).notes if "token_budget" in note]
    assert any(row.get("grad_norm") for row in trainer.state.log_history)


def test_shared_prompts_are_computed_once(models: dict[str, Path], tmp_path: Path) -> None:
    """Also where the budget keeps groups apart, as long as each has room for one."""

    def run(budget: int) -> tuple[list[tuple[int, ...]], list[int]]:
        options = {"share_prompts": True, "token_budget": budget, "gradient_accumulation_steps": 4, "max_steps": 1}
        trainer: Any = tiny.trainer(models["dense"], tmp_path, **options, **ROLLOUT)
        policy = Widths(trainer.model)
        tiny.train(trainer)
        groups: dict[tuple[int, ...], int] = {}
        for batch in trainer._buffered_inputs:
            for ids, mask, n in zip(
                batch["prompt_ids"], batch["prompt_mask"].bool(), batch["completion_mask"].sum(-1), strict=True
            ):
                prompt = tuple(ids[mask].tolist())
                groups[prompt] = groups.get(prompt, len(prompt) - 1) + 1 + int(n)  # the last token is not shared
        return policy.shapes, list(groups.values())

    together, groups = run(10_000)
    assert len(groups) == 4 and together == [(1, sum(groups))]
    apart, again = run(max(groups))
    assert again == groups and len(apart) > 1 and sum(width for _, width in apart) == sum(groups)


def test_batches_of_a_budget_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    """The group with the longest sequence comes first. Padding that is computed counts."""
    options = {"share_prompts": True, "token_budget": 1, "gradient_accumulation_steps": 4}  # one by one
    trainer: Any = tiny.trainer(models["dense"], tmp_path, **options, **ROLLOUT)
    part = trainer.feature(PaddingFree)
    of = part.support(trainer.model)
    lengths = [Length(3, 2, 0), Length(3, 1, 1), Length(2, 7, 2), Length(3, 9, 1)]
    assert part._batches(of, lengths, 13, 4, 4) == [[3], [1], [2], [0]]
    trainer.args.token_budget = 21
    limited = replace(of, width_limit=9)
    assert part._batches(limited, [Length(1, 2)] * 4, 10, 4, 4) == [[0, 1], [2, 3]]
    assert part._batches(limited, [Length(1, 2)] * 4, 9, 4, 4) == [[0, 1, 2, 3]]
    cut = replace(of, why_not_packed="of the test", is_shift_invariant=False)  # at the right only: 4 columns of prompt
    assert part._batches(cut, [Length(1, 2), Length(2, 3), Length(1, 1)], 9, 4, 4) == [[1, 0, 2]]
    assert part._batches(cut, [Length(1, 2), Length(2, 4), Length(1, 1)], 9, 4, 4) == [[1, 0], [2]]


def test_a_step_after_an_error_has_its_own_sequences_only(models: dict[str, Path], tmp_path: Path) -> None:
    """An optimizer step of two rollouts, the second of which fails while the first waits for it."""
    tokens: list[int] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(prompt) + len(ids) for prompt, ids in zip(prompts, completion_ids, strict=True)))
        if len(tokens) == 2:
            raise InterruptedError
        return tiny.reward(completion_ids)

    options = {"token_budget": 30, "gradient_accumulation_steps": 8, "max_steps": 1}
    trainer: Any = tiny.trainer(
        models["dense"], tmp_path, build={"rollout_func": UNEQUAL, "reward_funcs": reward}, **options
    )
    with pytest.raises(InterruptedError):
        trainer.train()
    policy = Widths(trainer.model)
    trainer._step = 0  # TRL would go on in the middle of the rollout
    trainer.train()
    assert len(tokens) == 4 and sum(width for _, width in policy.shapes) == tokens[2] + tokens[3]
