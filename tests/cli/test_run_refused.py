"""What would train without ours, though ours is asked for: found wherever a script does it, and refused or named."""

import sys

import pytest

from tests.cli import tools as own_scripts
from tests.cli.tools import IMPORTS, Scripts

scripts = own_scripts.scripts


def test_trls_own_subclass_trains_on_ours_as_it_does_on_trls(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("trl.experimental.gmpo")]:
        monkeypatch.delitem(sys.modules, name)  # not from before
    imports = "from trl.experimental.gmpo import GMPOConfig as GRPOConfig, GMPOTrainer"
    assert scripts.run(imports, trainer="GMPOTrainer", beta=0.04, max_steps=1) == 0
    assert "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer on trl_steady.GRPOTrainer" in capsys.readouterr().out


def test_a_trainer_that_is_not_ours_is_refused_with_the_way_out(scripts: Scripts) -> None:
    mine = """
    theirs = ("trl.trainer.grpo_trainer", "GRPOTrainer")
    (Kept,) = [c for c in GRPOTrainer.__mro__ if (c.__module__, c.__name__) == theirs]
    class Mine(Kept):
        pass
    """
    with pytest.raises(ValueError, match=r"trainer that is not trl-steady's got .* Derive a trainer of your own from"):
        scripts.run(IMPORTS["from trl"], mine, trainer="Mine")


def test_processes_that_would_train_apart_are_refused(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(ValueError, match=r"^2 processes were started, but each would train alone.* Set use_cpu=True"):
        scripts.run(IMPORTS["from trl"])
