"""The files of recipes/ parse, and a dry run builds one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DistributedType

from tests.project.recipe import FOLDER, YAMLS, parse
from trl_steady.cli import main as cli


@pytest.mark.fast_rows(4)
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


@pytest.mark.fast_rows(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gspo/smollm2-135m-comparison", []),
        ("deepseekmath_loop/smollm2-135m", []),
        ("process_rewards/smollm2-135m-process", ["--start"]),
        ("moe/qwen3-moe-digits", ["--start"]),
        ("deepseekmath/grpo-outcome", ["--start"]),
    ],
)
def test_a_script_takes_the_option_and_does_nothing_else(
    smollm2: Any,
    digits: Any,
    name: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No evaluation, no warm start, no training of a reward model."""
    path = YAMLS[name]
    more = [part for option in more for part in (option, str(tmp_path / "start"))]
    command = [str(path.with_name("train.py")), "--config", str(path), "--dry-run", "--use_cpu", "true", *more]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*command, "--output_dir", str(tmp_path / "out"), "--held_out", "4"])
    with pytest.raises(SystemExit) as ended:
        smollm2.run.start(None)  # which runs the script
    said = capsys.readouterr().out
    assert not ended.value.code and "  run: " in said
    assert not any(word in said for word in ("held out", "Training", "worked problems", "  loss "))
    assert ("dry run: the warm start is left out" in said) == bool(more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["experiment", "figures"])
def test_a_script_of_many_runs_says_how_to_try_one(
    recipes: Any, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "plan.yaml", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        getattr(recipes, script).main()
    assert ended.value.code == 2 and "many runs have no dry run. Try one of them: " in capsys.readouterr().err


FOR_GPUS = [name for name, path in YAMLS.items() if "NOT YET RUN" in path.read_text().split("\n")[0]]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_for_gpus_can_lose_its_machine(name: str) -> None:
    options = yaml.safe_load(YAMLS[name].read_text())
    assert options["enable_jit_checkpoint"] and options["max_steps"] >= 8 * options["save_steps"]
    assert options["save_total_limit"] <= 2
    assert "--dry-run" in YAMLS[name].with_name("README.md").read_text()


def test_a_recipe_ends_with_a_run_that_lost_its_machine(recipes: Any) -> None:
    trained: list[object] = []
    preemption = SimpleNamespace(is_stopping=False)
    args = SimpleNamespace(resume_from_checkpoint=None)
    trainer = SimpleNamespace(
        preemption=preemption, args=args, train=lambda resume_from_checkpoint: trained.append(resume_from_checkpoint)
    )
    recipes.run.train(trainer, [])
    preemption.is_stopping = True
    with pytest.raises(SystemExit) as ended:
        recipes.run.train(trainer, [])
    assert not ended.value.code and trained == [None, None]


@pytest.mark.parametrize(("newest", "expected"), [("out/checkpoint-8", True), (None, False)])
def test_true_resumes_from_a_complete_checkpoint_or_begins(recipes: Any, newest: str | None, expected: bool) -> None:
    """The newest folder may be half of a copy, as after a bucket's upload was cut off."""
    trained: list[object] = []
    trainer = SimpleNamespace(
        preemption=SimpleNamespace(is_stopping=False),
        args=SimpleNamespace(resume_from_checkpoint="true"),
        checkpoints=SimpleNamespace(newest=lambda: newest),
        train=lambda resume_from_checkpoint: trained.append(resume_from_checkpoint),
    )
    recipes.run.train(trainer, [])
    assert trained == [expected]
