"""Scripts that know TRL's trainer only, run as `trl-steady run` runs them."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch

from trl_steady.cli import main as cli

TRAIN = """
from pathlib import Path
from tests.tools import tiny
args = tiny.arguments(GRPOConfig, Path(OUTPUT), **OPTIONS)
trainer = Trainer(
    MODEL, reward_funcs=tiny.reward, args=args, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer()
)
trainer.train()
trainer.save_model(OUTPUT)
"""
IMPORTS = {
    "from trl": "from trl import GRPOConfig, GRPOTrainer",
    "trl itself": "import trl\nGRPOConfig, GRPOTrainer = trl.GRPOConfig, trl.GRPOTrainer",
    "from trl.trainer": "from trl.trainer import GRPOConfig, GRPOTrainer",
    "from the modules": "from trl.trainer.grpo_config import GRPOConfig\n"
    "from trl.trainer.grpo_trainer import GRPOTrainer",
    "from one module": "from trl.trainer.grpo_trainer import GRPOConfig, GRPOTrainer",
    "everything": "from trl import *",
}


class Scripts:
    """Scripts in a folder, run as the command line does."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def run(
        self,
        *parts: str,
        trainer: str = "GRPOTrainer",
        settings: Sequence[str] = (),
        **options: Any,
    ) -> int:
        """Write the parts into a script, and run it with settings, which stand before it on the command line."""
        path = self.folder / "script.py"
        train = TRAIN.replace("Trainer(", f"{trainer}(", 1)
        for name, value in {"OUTPUT": str(self.folder), "MODEL": str(self.model), "OPTIONS": options}.items():
            train = train.replace(name, repr(value))
        path.write_text("\n".join([*map(textwrap.dedent, parts), train if trainer else ""]))
        return cli.main(["run", *settings, str(path)])


@pytest.fixture
def scripts(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return Scripts(tmp_path, models["dense"])


class Launched:
    """Stands in for `accelerate launch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args: Any = None
        monkeypatch.setattr(launch, "launch_command", lambda args: setattr(self, "args", args))
