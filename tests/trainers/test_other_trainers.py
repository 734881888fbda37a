"""Our config in a trainer that is not ours, and scripts that train with other trainers of TRL."""

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


@pytest.mark.parametrize("kind", [Derived, transformers.Trainer])
def test_our_config_in_a_trainer_that_is_not_ours_is_refused(
    kind: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(models["dense"])
    data = {"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}
    trl_steady.GRPOTrainer(model, tiny.reward, args, **data)  # the config of ours may come to another one after it
    rewards = {"reward_funcs": tiny.reward} if kind is Derived else {}
    with pytest.raises(ValueError, match=r"got a trl_steady\.GRPOConfig .*from trl_steady import GRPOConfig, GRPOTr"):
        kind(model, args=args, **data, **rewards)


def test_a_script_may_ask_for_the_log_level(tmp_path: Path) -> None:
    class Mine:
        def level(self, args: Any) -> int:
            return args.get_process_log_level()

    args = tiny.arguments(trl_steady.GRPOConfig, tmp_path, log_level="error")
    assert args.get_process_log_level() == Mine().level(args) == transformers.logging.ERROR


def test_a_script_with_other_trainers_of_trl_hears_so(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    script = f"""
    import trl
    from datasets import Dataset
    from tests.tools import tiny
    args = trl.SFTConfig({str(scripts.folder)!r}, use_cpu=True, bf16=False, report_to="none", max_steps=1)
    data = {{"train_dataset": Dataset.from_dict({{"text": ["ab"]}}), "processing_class": tiny.tokenizer()}}
    trl.SFTTrainer({str(scripts.model)!r}, args=args, **data)
    """
    assert scripts.run(script, trainer="") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "trl-steady run:" in line]
    assert "without building a GRPOTrainer or RLOOTrainer" in line and "built trl.trainer.sft_trainer.SFTTr" in line
