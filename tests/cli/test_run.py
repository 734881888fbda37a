"""Scripts that know TRL's trainer only, with ours in its place."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from trl.trainer import grpo_config, grpo_trainer

import trl_steady
from tests.cli import tools as own_scripts
from tests.cli.tools import IMPORTS, Scripts
from tests.tools import tiny
from trl_steady.cli import main as cli
from trl_steady.cli.run import swapped

scripts = own_scripts.scripts


def test_however_it_is_imported_it_is_ours(scripts: Scripts) -> None:
    for imports in IMPORTS.values():
        with swapped():
            names: dict[str, Any] = {}
            exec(imports, names)
        assert names["GRPOTrainer"] is trl_steady.GRPOTrainer and names["GRPOConfig"] is trl_steady.GRPOConfig


def test_a_script_trains_with_ours(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run(IMPORTS["from one module"], max_steps=2, loss_type="gspo") == 0
    out, err = capsys.readouterr()
    assert out.count("trl_steady.trainers.grpo.GRPOTrainer, loss_type='gspo'\n  on: GSPO: loss_type='gspo'\n") == 1
    assert "ratio/sequence_mean" in out and "trl-steady run" not in err


def test_afterwards_trl_is_itself_again(scripts: Scripts) -> None:
    gmpo_trainer = importlib.import_module("trl.experimental.gmpo.gmpo_trainer")  # has imported TRL's by name
    constructor = transformers.Trainer.__init__
    before = trl.GRPOTrainer, trl.GRPOConfig
    assert before[0].__module__ == "trl.trainer.grpo_trainer"
    with pytest.raises(KeyError), swapped():
        of_trl = [vars(module).values() for name, module in sys.modules.items() if name.split(".")[0] == "trl"]
        assert not any(value is theirs for values in of_trl for value in values for theirs in before)
        assert trl.GRPOTrainer is gmpo_trainer.GRPOTrainer is trl_steady.GRPOTrainer is not before[0]
        raise KeyError
    assert constructor is transformers.Trainer.__init__
    assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is trl.trainer.GRPOTrainer is gmpo_trainer.GRPOTrainer
    assert trl.GRPOConfig is grpo_trainer.GRPOConfig is grpo_config.GRPOConfig
    assert before == (trl.GRPOTrainer, trl.GRPOConfig)


def test_what_is_left_to_trl_is_trls_also_when_swapped(models: dict[str, Path], tmp_path: Path) -> None:
    """Masks by token are TRL's own decision, which is no longer to be found under TRL's name."""

    def in_steps(completion_ids: list[list[int]], **_: Any) -> list[trl_steady.StepRewards]:
        ends = [sorted({max(1, len(ids) // 2), len(ids)}) for ids in completion_ids]
        values = [[sum(ids) % 7.0, -(ids[-1] % 5.0)] for ids in completion_ids]
        return [trl_steady.StepRewards.at_tokens(v[: len(e)], e) for v, e in zip(values, ends, strict=True)]

    def trained(level: str) -> dict[str, torch.Tensor]:
        options = {"loss_type": "gspo_token", "off_policy_mask_threshold": 0.001, "off_policy_mask_level": level}
        build = {"reward_funcs": in_steps}
        return tiny.parameters(tiny.train(tiny.trainer(models["dense"], tmp_path, build=build, **options)))

    by_token, by_sequence = trained("token"), trained("sequence")
    with swapped():
        swapped_by_token = trained("token")
    assert all(torch.equal(value, swapped_by_token[name]) for name, value in by_token.items())
    assert any(not torch.equal(value, by_sequence[name]) for name, value in by_token.items())


def test_a_script_that_trains_nothing_of_ours_hears_of_it(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.run("print('nothing')", trainer="") == 0
    said = "script.py ended without building a trainer of trl-steady in this process"
    assert said in capsys.readouterr().err
    assert scripts.run("import sys\nsys.exit(0)", trainer="") == 0
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_sees_what_python_would_show_it(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a link, from another folder."""
    folder = scripts.folder / "scripts"
    folder.mkdir()
    shown = "[__name__, __file__, sys.argv[1:], sys.path[0], sys.path[1:], beside_the_script.HERE]"
    (folder / "look.py").write_text(f"import json, sys, beside_the_script\nprint(json.dumps({shown}))")
    (folder / "beside_the_script.py").write_text("HERE = 'found'")
    (scripts.folder / "linked.py").symlink_to(folder / "look.py")
    monkeypatch.chdir(scripts.folder)
    found = [
        json.loads(subprocess.run([*command, "linked.py", "--lr", "1"], capture_output=True, check=True).stdout)
        for command in ([sys.executable], [Path(sys.executable).with_name("trl-steady"), "run"])
    ]
    assert found[0] == found[1] and found[0][-1] == "found"


def test_a_scripts_exit_status_is_its_own(scripts: Scripts) -> None:
    with pytest.raises(SystemExit, match="7"):
        scripts.run("raise SystemExit(7)", trainer="")


def test_a_modules_main_is_itself_while_it_runs(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what it defines can be pickled."""
    (scripts.folder / "a_module.py").write_text("import pickle\nclass A:\n    pass\npickle.loads(pickle.dumps(A()))")
    monkeypatch.chdir(scripts.folder)
    assert cli.main(["run", "-m", "a_module"]) == 0


def test_an_option_that_rloo_does_not_have_is_refused(scripts: Scripts) -> None:
    script = f"import trl\ntrl.RLOOConfig({str(scripts.folder)!r}, use_cpu=True, bf16=False)"
    with pytest.raises(ValueError, match=r"--set loss_type: RLOOConfig has no option"):
        scripts.run(script, settings=["--set", "loss_type=gspo"], trainer="")
