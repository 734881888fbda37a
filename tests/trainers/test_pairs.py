"""Pairs of a trainer and a config, ours and TRL's: a pair works, or an error names both."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl

import trl_steady
from tests.tools import tiny

METHODS = ("GRPO", "RLOO", "PPO")
OURS = [(trl_steady, method) for method in METHODS]
ALL = [*OURS, (trl, "GRPO"), (trl, "RLOO")]
# TRL's trainers refuse each other's configs themselves
PAIRS = [(kind, config) for kind, config in itertools.product(ALL, ALL) if trl_steady in (kind[0], config[0])]


def built(models: dict[str, Path], kind: Any, args: Any, **others: Any) -> Any:
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer(), **others}
    return kind(str(models["dense"]), reward_funcs=tiny.reward, args=args, **data)


@pytest.mark.parametrize(("trainer", "config"), PAIRS, ids=lambda pair: f"{pair[0].__name__}.{pair[1]}")
def test_a_trainer_takes_its_own_config_only(
    trainer: tuple[Any, str], config: tuple[Any, str], models: dict[str, Path], tmp_path: Path
) -> None:
    kind, args_kind = getattr(trainer[0], f"{trainer[1]}Trainer"), getattr(config[0], f"{config[1]}Config")
    args = tiny.arguments(args_kind, tmp_path)
    if trainer == config:
        assert built(models, kind, args).args is args
    elif trainer[0] is trl and trainer[1] != ("RLOO" if config[1] == "RLOO" else "GRPO"):
        with pytest.raises(AttributeError, match=f"'{args_kind.__name__}' object has no attribute"):  # TRL's own
            built(models, kind, args)
    else:
        method = trainer[1] if trainer[0] is trl_steady else config[1]
        both = f"trl_steady.*{args_kind.__name__}.*from trl_steady import {method}Config, {method}Trainer"
        with pytest.raises(ValueError, match=both):
            built(models, kind, args)


def test_our_config_in_another_trainer_is_refused_also_after_it_was_in_ours(
    models: dict[str, Path], tmp_path: Path
) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path)
    model = built(models, trl_steady.GRPOTrainer, args).model
    with pytest.raises(ValueError, match=r"got a trl_steady\.GRPOConfig .*from trl_steady import GRPOConfig, GRPOTr"):
        transformers.Trainer(model, args=args, train_dataset=tiny.dataset())


def test_the_card_of_ppo_names_ppo(models: dict[str, Path], tmp_path: Path) -> None:
    tiny.trainer(models["dense"], tmp_path, method="PPO", num_generations=1).create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "trained with PPO" in card and "papers/1707.06347" in card and "GRPO" not in card
