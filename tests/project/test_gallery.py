"""The files of recipes/: they parse, say where they come from, have their papers' settings, and run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DistributedType
from trl.scripts import grpo as launched

import trl_steady
from tests.project import recipe
from tests.project.recipe import FOLDER, WITHOUT_SCRIPT, YAMLS, parse
from trl_steady.cli import main as cli

ACCELERATE = {
    "single_gpu": (DistributedType.NO, 1),
    "ddp": (DistributedType.MULTI_GPU, 8),
    "ddp_cpu": (DistributedType.MULTI_GPU, 2),  # the file says why
    "fsdp2": (DistributedType.FSDP, 8),
    "zero2": (DistributedType.DEEPSPEED, 8),
    "zero3": (DistributedType.DEEPSPEED, 8),
}
# of the recipes that test_recipe*.py do not run
SMOKE = {
    "moe/qwen3-30b-a3b-fsdp2": {},
    "sampling_mask/smollm2-135m-one-rollout": {},
    "gspo/qwen3-4b-deepmath-80gb": {},
    "async/qwen3-4b-deepmath-2x80gb": {"async_generate": False},  # without a server
    "iterative_grpo/qwen3-4b-deepmath-80gb": {"ref_model_sync_steps": 1, "steps_per_generation": 1},
    # without an engine there are no log-probs of the sampler's
    "v32/qwen3-4b-deepmath-80gb": {"kl_ratio_denominator": "old"},
}


@pytest.mark.parametrize("name", YAMLS)
def test_a_recipe_parses_without_a_warning(recipes: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    found = parse(recipes, name)
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []
    assert not any(getattr(each, "lora_dropout", 0) for each in found)  # TRL's default is 0.05


def test_accelerate_reads_the_configurations_as_they_are_meant() -> None:
    assert {path.stem for path in FOLDER.glob("accelerate/*.yaml")} == set(ACCELERATE)
    for name, expected in ACCELERATE.items():
        found = load_config_from_file(str(FOLDER / f"accelerate/{name}.yaml"))
        assert (found.distributed_type, found.num_processes) == expected
        assert found.use_cpu == (name == "ddp_cpu") and found.mixed_precision == ("no" if found.use_cpu else "bf16")
        stage = found.deepspeed_config.get("zero_stage"), found.fsdp_config.get("fsdp_version")
        assert stage == {"zero2": (2, None), "zero3": (3, None), "fsdp2": (None, 2)}.get(name, (None, None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sampling leaves tokens out:UserWarning")
@pytest.mark.parametrize("name", SMOKE)
def test_a_recipe_takes_two_steps_on_a_tiny_model(
    smollm2: Any, models: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {**recipe.FROM_HUB, "steps_per_generation": 2, "max_steps": 2, "save_strategy": "no"}
    few |= {"learning_rate": 0.01, **SMOKE[name]}
    del few["model_init_kwargs"]
    start = recipe.chatty(models["moe" if name.startswith("moe/") else "dense"], tmp_path / "model")
    policy = tmp_path / "out"
    if name in WITHOUT_SCRIPT:
        trained: list[Any] = []

        class Kept(trl_steady.GRPOTrainer):
            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                trained.append(self)

        data = tmp_path / "data"
        data.mkdir()
        rows = [smollm2.gsm8k.example(row) for row in recipe.GSM8K]
        (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        monkeypatch.setattr(trl, "GRPOTrainer", Kept)
        monkeypatch.setattr(trl.rewards, "accuracy_reward", recipe.by_length)
        few |= {"model_name_or_path": start, "dataset_name": data, "dtype": "float32", "output_dir": policy}
        launched.main(*parse(smollm2, name, **few))
        assert len(trained[0].reference_refreshes) == ("ref_model_sync_steps" in SMOKE[name])
        history = trained[0].state.log_history
    else:
        if name.startswith("moe/"):
            problems = [smollm2.gsm8k.example(row) for row in recipe.GSM8K]
            monkeypatch.setattr(smollm2.gsm8k, "questions", lambda _: smollm2.gsm8k.Dataset.from_list(problems))
            monkeypatch.setattr(smollm2.gsm8k, "accuracy_reward", recipe.by_length)
            few |= {"model_name": start, "eval_strategy": "no", "eval_on_start": False}
        history = recipe.run(smollm2, name, policy, **few)["history"]
        policy = next(policy / kind for kind in ("adapter", "model") if (policy / kind).is_dir())
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert any(row.get("frac_reward_zero_std", 1) < 1 for row in history)
    if (policy / "adapter_config.json").is_file():
        assert recipe.moved(policy, start)
    else:
        before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (start, policy))
        assert any(not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))


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
