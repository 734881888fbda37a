"""The optimal token baseline: the energies of the policy's passes, and what it trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.oracles.trust_regions import token_baseline
from tests.tools import tiny
from tests.trainers.tools import by_steps
from trl_steady import GRPOConfig

ON: dict[str, Any] = {"advantage_baseline": "token", "scale_rewards": "none", "max_steps": 1}


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(
    ("name", "options"),
    {
        "a pass of the old policy": {},
        "no such pass": {"steps_per_generation": 1, "per_device_train_batch_size": 16},
        "padding": {"trim_padding": False},
        "batches": {"token_budget": 40, "temperature": 0.7},
        "LoRA": {"lora": True},
        "kept tokens": {"keep_sampling_mask": True, "top_p": 0.8},
        "MaxRL": {"scale_rewards": "mean"},
    }.items(),
)
def test_advantages_are_those_of_the_formula(
    models: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **{**ON, **options})
    trainer.model.train()
    samples = trainer._generate_and_score_completions([{"prompt": f"{'ab' * (i // 4)}{i // 4}+1="} for i in range(16)])
    lengths = samples["completion_mask"].sum(1)
    assert len(lengths.unique()) > 1
    ids = [row[:length].tolist() for row, length in zip(samples["completion_ids"], lengths, strict=True)]
    rewards, model = tiny.reward(ids), trainer.model.eval()
    # the whole distribution of the policy, outside TRL's head; the group's mean for the last of a group
    mask = samples["completion_mask"].bool()
    tokens = torch.cat([samples["prompt_ids"], samples["completion_ids"]], 1)
    attention = torch.cat([samples["prompt_mask"], samples["completion_mask"]], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=False).logits
    logps = (logits[:, -mask.size(1) - 1 : -1] / trainer.args.temperature).double().log_softmax(-1)
    of_tokens = logps.gather(-1, samples["completion_ids"].unsqueeze(-1)).squeeze(-1)
    own = torch.zeros(mask.shape)
    for i, values in enumerate(token_baseline(rewards, of_tokens, (2 * logps).exp().sum(-1), mask, 4)):
        group = slice(i // 4 * 4, i // 4 * 4 + 4)
        mean = sum(rewards[group]) / 4
        for t, value in enumerate(values):
            own[i, t] = value if mask[group, t].sum() > 1 else rewards[i] - mean
    if name == "MaxRL":
        own /= torch.tensor(rewards).view(4, 4).mean(1).repeat_interleave(4).unsqueeze(1)
    torch.testing.assert_close(samples["advantages"], own, atol=1e-4, rtol=1e-4)
    assert ("old_per_token_logps" in samples) == (name != "no such pass")


def test_old_log_probs_stay_as_they_are(models: dict[str, Path], tmp_path: Path) -> None:
    """With the same bits, and a loss of TRL's trains on the advantages."""
    on, off = (
        tiny.trainer(models["dense"], tmp_path / value, advantage_baseline=value) for value in ("token", "group")
    )
    rows = [{"prompt": f"{i // 4}+1="} for i in range(16)]
    samples = []
    for trainer in (on, off):
        trainer.model.train()
        transformers.set_seed(1)
        samples.append(trainer._generate_and_score_completions(rows))
    assert torch.equal(*(each["old_per_token_logps"] for each in samples))
    assert samples[0]["advantages"].shape == samples[0]["completion_ids"].shape
    tiny.train(on)
    assert any((tiny.parameters(on)[name] != value).any() for name, value in tiny.parameters(off).items())


def test_an_answer_without_a_reward_has_no_part(models: dict[str, Path], tmp_path: Path) -> None:
    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if i % 4 == 3 else float(i % 4) for i in range(len(completion_ids))]

    trainer = tiny.trainer(models["dense"], tmp_path, **ON, build={"reward_funcs": some})
    trainer.model.train()
    samples = trainer._generate_and_score_completions([{"prompt": f"{i // 4}+1="} for i in range(16)])
    assert not samples["advantages"][3::4].any()
    first = samples["advantages"][:, 0].view(4, 4)
    torch.testing.assert_close(first[:, 1] - first[:, 0], torch.ones(4))
    assert ((first[:, 0] < 0) & (first[:, 2] > 0)).all()


def test_steps_have_a_baseline_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = tiny.trainer(models["dense"], tmp_path, **ON, build={"reward_funcs": by_steps})
    with pytest.raises(ValueError, match=r"advantage_baseline=.*StepRewards"):
        trainer.train()


def test_a_ratio_of_sequences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss_type='gspo', whose ratio is of sequences"):
        tiny.arguments(GRPOConfig, tmp_path, loss_type="gspo", advantage_baseline="token")
