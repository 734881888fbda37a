"""The docs say what the code does: names, options, metrics, links."""

import pkgutil
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import trl_steady
import trl_steady.rewards
from tests.features.reward_model import tools as rewarding
from tests.tools import tiny
from tests.trainers.tools import rollout
from trl_steady.cli import main as cli

ROOT = Path(__file__).parents[2]
PUBLIC = [name for name in trl_steady.__all__ if name != "__version__"]
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}
PAGES = {**DOCS, **{path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("*.md")}}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("recipes/**/*.md")}


def test_every_public_name_and_every_option_of_ours_is_documented() -> None:
    text = "\n".join(DOCS.values())
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    ours = {field.name for field in fields(trl_steady.GRPOConfig) if theirs.get(field.name, ...) != field.default}
    # loss_type and epsilon_high keep TRL's default
    for name in (*PUBLIC, *ours, "loss_type", "epsilon_high", "gspo", "gspo_token"):
        paths = (f"`{name}`", f"trl_steady.config.grpo.{name}", f"trl_steady.trainers.grpo.{name}")
        assert any(path in text for path in paths), name


def test_the_metrics_page_has_what_is_logged_and_nothing_else(models: dict[str, Path], tmp_path: Path) -> None:
    """A run with everything of ours on, beside TRL's."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[trl_steady.StepRewards]:
        return [trl_steady.StepRewards.at_tokens([float(len(ids))], [1]) for ids in completion_ids]

    options = {"loss_type": "grpo", "beta": 0.1, "build": {"rollout_func": rollout}}
    everything = {
        "off_policy_mask_threshold": 0.1,
        "geometric_mask_range": (0.5, 2.0),
        "token_veto_threshold": 0.01,
        "sync_ref_model": True,
        "ref_model_sync_steps": 4,
        "router_replay": "R2",
        "training_report": True,
        "dynamic_sampling": True,
        "build": {"rollout_func": rollout, "reward_funcs": reward},
    }
    sampled = {"top_p": 0.8, "keep_sampling_mask": True, "build": {}}  # which a rollout_func cannot have
    theirs, ours, of_sets, of_critic = (
        {name for row in tiny.history(tiny.train(tiny.trainer(models["moe"], tmp_path, **more))) for name in row}
        for more in (
            {"ours": False, **options},
            {**options, **everything},
            {**options, **sampled},
            {"method": "PPO", "ptx_coef": 1.0, "build": {"ptx_dataset": Dataset.from_dict({"text": ["a b"]})}},
        )
    )
    skipping = tiny.train(tiny.trainer(models["dense"], tmp_path, skip_zero_weight=True))
    ours |= {name for row in tiny.history(skipping) for name in row}
    learning = rewarding.refreshed("lora", models["dense"], tmp_path)
    of_loop = {
        re.sub("^(reward_model/(?:old|new))/.*", r"\1/*", name).replace("rewards/reward_model/", "rewards/reward/")
        for row in tiny.history(tiny.train(learning))
        for name in row
    }
    of_server = {
        "async/versions_behind",
        "async/waited",
        "async/overlap",
    }  # tests/features/async_generation/test_ahead.py reads them
    logged, known = ours | of_sets | of_critic | of_loop | of_server, theirs
    first_cells = [line.split("|")[1] for line in DOCS["docs/metrics.md"].splitlines() if line.startswith("|")]
    documented = set(re.findall(r"`([^`]+)`", " ".join(first_cells)))
    assert logged - known <= documented
    theirs_or_shorthand = {"time/sync", "kl", "clip_ratio/low_mean", "high_mean", "region_mean", "policy_loss"}
    assert documented - theirs_or_shorthand == logged - known


def test_the_reference_has_every_public_name() -> None:
    """Or a page of its own method has."""
    has = {name for text in DOCS.values() for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)}
    for module in (ROOT / "src/trl_steady/functional").glob("[a-z]*.py"):
        assert f"trl_steady.functional.{module.stem}" in has
    for package, names in ((trl_steady, PUBLIC), (trl_steady.rewards, trl_steady.rewards.__all__)):
        for name in names:
            public = getattr(package, name)
            assert public in {pkgutil.resolve_name(path) for path in has}, name


def test_the_launchers_page_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    commands = set(re.findall(r"^  (\w+) ", capsys.readouterr().out, flags=re.MULTILINE))
    assert commands == {"run", "grpo", "rloo", "ppo", "report", "methods", "env"}
    for command in commands:
        assert f"| `trl-steady {command}" in DOCS["docs/launcher.md"]


def test_links_between_files_resolve() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
