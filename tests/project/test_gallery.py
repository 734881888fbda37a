"""The files of recipes/ parse, and a dry run builds one."""

import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DistributedType

from tests.project.recipe import FOLDER, YAMLS, parse
from trl_steady.cli import main as cli


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_parses_without_a_warning(recipes: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    found = parse(recipes, name)
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []
    assert not any(getattr(each, "lora_dropout", 0) for each in found)  # TRL's default is 0.05


def test_accelerate_reads_the_configurations_as_they_are_meant() -> None:
    expectations = {
        "single_gpu": (DistributedType.NO, 1),
        "ddp": (DistributedType.MULTI_GPU, 8),
        "ddp_cpu": (DistributedType.MULTI_GPU, 2),  # the file says why
        "fsdp2": (DistributedType.FSDP, 8),
        "zero2": (DistributedType.DEEPSPEED, 8),
        "zero3": (DistributedType.DEEPSPEED, 8),
    }
    assert {path.stem for path in FOLDER.glob("accelerate/*.yaml")} == set(expectations)
    for name, expected in expectations.items():
        found = load_config_from_file(str(FOLDER / f"accelerate/{name}.yaml"))
        assert (found.distributed_type, found.num_processes) == expected
        assert found.use_cpu == (name == "ddp_cpu") and found.mixed_precision == ("no" if found.use_cpu else "bf16")
        stage = found.deepspeed_config.get("zero_stage"), found.fsdp_config.get("fsdp_version")
        assert stage == {"zero2": (2, None), "zero3": (3, None), "fsdp2": (None, 2)}.get(name, (None, None))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dry_run_builds_a_recipe_and_trains_nothing(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = YAMLS["gspo/smollm2-135m-comparison"]
    command = ["run", str(path.with_name("train.py")), "--config", str(path), "--use_cpu", "true", "--dry-run"]
    assert cli.main([*command, "--held_out", "4", "--samples", "1", "--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "  on: GSPO: loss_type='gspo'" in out and "  run: 24 optimizer steps, 6 rollouts, " in out
    assert not (tmp_path / "out").exists()
