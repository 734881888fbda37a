"""Our config in a trainer that is not ours, and scripts that train with other trainers of TRL."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl

import trl_steady
from tests.tools import scripts as own_scripts
from tests.tools import tiny
from tests.tools.scripts import Scripts

scripts = own_scripts.scripts


class Derived(trl.GRPOTrainer):
    pass


def gmpo() -> type:
    return importlib.import_module("trl.experimental.gmpo").GMPOTrainer


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (lambda: trl.GRPOTrainer, "trl.trainer.grpo_trainer.GRPOTrainer"),
        (lambda: Derived, "tests.trainers.test_other_trainers.Derived"),
        (gmpo, "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer"),
    ],
    ids=["TRL's", "derived", "TRL's GMPO"],
)
def test_our_config_in_trls_trainer_is_refused(kind: Any, name: str, models: dict[str, Path], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, keep_sampling_mask=True, top_k=5)
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    with pytest.raises(
        ValueError, match=f"^{name} got a trl_steady.GRPOConfig .*from trl_steady import GRPOConfig, G"
    ):
        kind()(str(models["dense"]), reward_funcs=tiny.reward, args=args, **data)


def test_our_config_in_any_other_trainer_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    with pytest.raises(ValueError, match=r"^transformers.trainer.Trainer got a trl_steady.GRPOConfig"):
        transformers.Trainer(model, args)


def test_a_script_may_ask_for_the_log_level(tmp_path: Path) -> None:
    class Mine:
        def level(self, args: Any) -> int:
            return args.get_process_log_level()

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, log_level="error")
    assert args.get_process_log_level() == Mine().level(args) == transformers.logging.ERROR


SFT = """
import trl
from datasets import Dataset
from tests.tools import tiny
args = trl.SFTConfig({folder!r}, use_cpu=True, bf16=False, report_to="none", max_steps=1)
data = {{"train_dataset": Dataset.from_dict({{"text": ["ab"]}}), "processing_class": tiny.tokenizer()}}
{kind}
Trainer({model!r}, args=args, **data)
"""
ONLY = "trl-steady has only GRPOTrainer, RLOOTrainer and PPOTrainer."


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Trainer = trl.SFTTrainer", "trl.SFTTrainer"),
        ("class Trainer(trl.SFTTrainer): pass", "__main__.Trainer (a trl.SFTTrainer)"),
    ],
    ids=["TRL's", "derived"],
)
def test_a_script_that_trains_with_another_trainer_hears_so_in_one_line(
    kind: str, name: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SFT.format(folder=str(scripts.folder), model=str(scripts.model), kind=kind)
    assert scripts.run(script, trainer="") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "trl-steady run:" in line]
    whole = f"script.py trained with {name}, which is TRL's own; {ONLY}"
    assert len(said) == 1 and said[0].endswith(whole)


def test_several_other_trainers_are_named_together() -> None:
    from trl_steady.launcher.cli import _without_ours

    said = f"trained with trl.SFTTrainer and trl.DPOTrainer, which are TRL's own; {ONLY}"
    assert _without_ours(["trl.SFTTrainer", "trl.DPOTrainer"]) == said
    assert "transformers.Trainer, which is not trl-steady's;" in _without_ours(["transformers.Trainer"])


def test_trls_asynchronous_trainer_is_refused_in_one_line(scripts: Scripts) -> None:
    """Its own constructor wants a vLLM server, so that a class of its name stands in for it."""
    script = f"""
    import transformers, trl
    class AsyncGRPOTrainer(transformers.Trainer):
        __module__ = "trl.experimental.async_grpo.async_grpo_trainer"
    args = transformers.TrainingArguments({str(scripts.folder)!r}, use_cpu=True, report_to="none")
    AsyncGRPOTrainer(transformers.AutoModelForCausalLM.from_pretrained({str(scripts.model)!r}), args)
    """
    with pytest.raises(ValueError) as refused:
        scripts.run(script, trainer="")
    name = "trl.experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer"
    assert str(refused.value) == f"{name} is TRL's own; {ONLY} Run the script with python."
