"""Options that `trl-steady run --set` puts into every config of a script."""

from typing import Any

import pytest

import trl_steady
from tests.cli import tools as own_scripts
from tests.cli.tools import IMPORTS, Scripts
from trl_steady.cli import settings as options
from trl_steady.cli.run import swapped

scripts = own_scripts.scripts


def test_an_option_is_set_before_the_checks(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the paper's clip range follows, also in a copy of a subclass."""
    copied = """
    import dataclasses
    @dataclasses.dataclass
    class Own(GRPOConfig):
        mine: int = 1
        def __post_init__(self):
            super().__post_init__()
    def copied(*arguments, **options):
        return dataclasses.replace(Own(*arguments, **options), mine=2, generation_batch_size=None)
    """
    check = f"""
    from pathlib import Path
    from tests.tools import tiny
    args = tiny.arguments(copied, Path({str(scripts.folder)!r}), temperature=0.9, max_steps=1)
    assert (args.loss_type, args.epsilon, args.top_k, args.temperature, args.mine) == ("gspo", 3e-4, 5, 0.9, 2)
    data = {{"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer()}}
    GRPOTrainer({str(scripts.model)!r}, reward_funcs=tiny.reward, args=args, **data).train()
    """
    settings = ["--set", "loss_type=gspo", "--set=top_k=5"]
    assert scripts.run(IMPORTS["from trl"], copied, check, trainer="", settings=settings) == 0
    assert "'ratio/sequence_mean'" in capsys.readouterr().out


def test_an_option_that_the_script_changes_afterwards_is_refused(scripts: Scripts) -> None:
    late = "Trainer = lambda *a, args, **k: (setattr(args, 'loss_type', 'grpo'), GRPOTrainer(*a, args=args, **k))[1]"
    with pytest.raises(ValueError, match=r"--set loss_type was given, .* has loss_type='grpo'.*Remove that change"):
        scripts.run(IMPORTS["from trl"], late, trainer="Trainer", settings=["--set", "loss_type=gspo"])


def test_a_config_that_the_trainer_builds_has_the_option_too(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    without = f"""
    import os
    os.chdir({str(scripts.folder)!r})
    from tests.tools import tiny
    from trl import GRPOTrainer
    GRPOTrainer({str(scripts.model)!r}, tiny.reward, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer())
    """
    settings = ["--set", "loss_type=gspo", "--set", "use_cpu=true", "--set", "bf16=no"]
    assert scripts.run(without, trainer="", settings=settings) == 0
    assert "loss_type='gspo'" in capsys.readouterr().out


def test_nothing_stays_set_and_defaults_of_trl_are_found_meanwhile() -> None:
    def config() -> trl_steady.GRPOConfig:
        return trl_steady.GRPOConfig("x", use_cpu=True, bf16=False, steps_per_generation=2)

    with swapped({"loss_type": "gspo"}):
        assert config().epsilon == 3e-4
    with swapped():
        assert config().epsilon == 0.2
    assert config().loss_type == "dapo"


def test_values_are_read_as_trls_command_line_reads_them() -> None:
    read: dict[str, Any] = {
        "loss_type=gspo": "gspo",
        "off_policy_mask_threshold=inf": float("inf"),
        "share_prompts=true": True,
        "token_budget=None": None,
        "token_budget=none": None,
        "geometric_mask_range=0.9,1.1": [0.9, 1.1],
        "geometric_mask_range=[0.9, 1.1]": [0.9, 1.1],
        'generation_kwargs={"top_k": 5}': '{"top_k": 5}',  # transformers reads JSON in the config
        "report_to=none": "none",
        "run_name=a=b": "a=b",
    }
    for setting, value in read.items():
        assert options.parse_settings([setting]) == {setting.split("=")[0]: value}


def test_invalid_settings_are_refused() -> None:
    for setting, said in (
        ("los_type=gspo", r"has an option 'los_type'\."),
        ("loss_type", r"--set loss_type: no value\. Write --set NAME=VALUE"),
        ("share_prompts=perhaps", "--set share_prompts=perhaps: Truthy value expected"),
        ("token_budget=1e3", "invalid int value: '1e3'"),
    ):
        with pytest.raises(ValueError, match=said):
            options.parse_settings([setting])
