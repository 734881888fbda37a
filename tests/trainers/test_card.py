"""The model card names our methods and their papers beside TRL's text."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import trl_steady
from tests.tools import rewarding, tiny
from trl_steady.config.methods import METHODS
from trl_steady.trainers.card import citations

OURS = {
    "loss_type": "gspo",
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 4,
    "ref_model_sync_reset_optimizer": True,
}


def card(models: dict[str, Path], folder: Path, **options: Any) -> ModelCard:
    trainer = tiny.trainer(models["dense"], folder, **options)
    trainer.create_model_card(model_name="mine", dataset_name="theirs", tags="own")
    return ModelCard.load(folder / "README.md")


def test_the_card_has_the_methods_that_were_on_and_their_papers(models: dict[str, Path], tmp_path: Path) -> None:
    trls = card(models, tmp_path / "trl", ours=False)
    ours = card(models, tmp_path / "ours", **OURS, lora=True)
    start, own = ours.text.split("## trl-steady")
    assert start.strip() == trls.text.strip()  # and TRL's text stays as it is
    assert {*ours.data.tags} == {*trls.data.tags, "trl-steady"}
    assert ours.data.model_name == "mine" and ours.data.datasets == "theirs"
    assert f"trl-steady {trl_steady.__version__}" in own
    assert "| GSPO | `loss_type='gspo'` | [2507.18071]" in own
    assert "`sync_ref_model=True`" in own and "`router_replay" not in own
    cited = re.findall(r"^@article\{(\w+),$", own, flags=re.MULTILINE)
    assert cited == ["zheng2025gspo", "shao2024deepseekmath", "deepseek2025v32", "liu2025prorl"]
    bibtex = own.split("```bibtex\n")[1].split("```")[0]
    assert bibtex.count("{") == bibtex.count("}")


def test_with_nothing_of_ours_the_card_says_so(models: dict[str, Path], tmp_path: Path) -> None:
    _, own = card(models, tmp_path, padded=True).text.split("## trl-steady")
    assert "None of its methods" in own and "bibtex" not in own


def test_a_checkpoint_brings_the_card_once(models: dict[str, Path], tmp_path: Path) -> None:
    """TRL writes the card anew at each checkpoint."""
    tiny.train(tiny.trainer(models["dense"], tmp_path, loss_type="gspo", save_strategy="steps", save_steps=3))
    assert (tmp_path / "README.md").read_text().count("## trl-steady") == 1


def test_step_rewards_are_on_when_a_function_returned_them(models: dict[str, Path], tmp_path: Path) -> None:
    """Their default, "return_to_go", does not tell."""

    def stepwise(completion_ids: list[list[int]], **_: Any) -> list[trl_steady.StepRewards]:
        return [trl_steady.StepRewards.at_tokens([float(len(ids))], [1]) for ids in completion_ids]

    trainer = tiny.trainer(models["dense"], tmp_path, loss_type="gspo_token", build={"reward_funcs": stepwise})
    trainer.create_model_card()
    assert "`step_advantage" not in (tmp_path / "README.md").read_text()
    tiny.train(trainer)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "`step_advantage='return_to_go'`" in card and "@article{shao2024deepseekmath" in card


def test_the_card_of_ppo_names_and_cites_ppo(models: dict[str, Path], tmp_path: Path) -> None:
    ppo = card(models, tmp_path, method="PPO", num_generations=1)
    assert (
        "This model was trained with PPO, a method introduced in [Proximal Policy Optimization Algorithms]" in ppo.text
    )
    assert "https://huggingface.co/papers/1707.06347" in ppo.text and "@article{schulman2017ppo" in ppo.text
    assert "GRPO" not in ppo.text and "shao2024deepseekmath" not in ppo.text
    assert {"trl", "ppo", "trl-steady"} <= {*ppo.data.tags} and "grpo" not in ppo.data.tags


def test_what_cannot_act_is_not_on_the_card(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GSPO on-policy, and a kept sampling mask where sampling keeps every token."""
    own = card(models, tmp_path, loss_type="gspo", steps_per_generation=1, keep_sampling_mask=True, beta=0.0).text
    out = capsys.readouterr().out
    assert "cannot act: GSPO" in out and "cannot act: kept sampling mask" in out
    assert "| GSPO" not in own and "kept sampling mask" not in own and "zheng2025gspo" not in own
    assert "| padding-free passes" in own


def test_a_reward_model_is_on_the_card(models: dict[str, Path], tmp_path: Path) -> None:
    trainer = rewarding.refreshed("lora", models["dense"], tmp_path)
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "| reward model on the policy's base | `reward_funcs=RewardAdapter(...)` |" in text
    assert "`RewardModelRefreshCallback" not in text  # before a refresh


def test_every_paper_of_a_method_has_a_citation() -> None:
    for method in METHODS:
        for number in re.findall(r"\d{4}\.\d{5}", method.paper):
            (entry,) = citations([number])
            assert entry.startswith("@article{") and entry.rstrip().endswith("}"), method.name
