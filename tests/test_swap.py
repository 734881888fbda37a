"""Scripts that know TRL's trainer only, with ours in its place."""

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from trl.trainer import grpo_config, grpo_trainer

import trl_steady
from tests import tiny
from trl_steady import cli
from trl_steady.swap import swapped

TRAIN = """
from pathlib import Path
from tests import tiny
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

    def run(self, *parts: str, trainer: str = "GRPOTrainer", arguments: tuple[str, ...] = (), **options: Any) -> int:
        path = self.folder / "script.py"
        train = TRAIN.replace("Trainer(", f"{trainer}(", 1)
        for name, value in {"OUTPUT": str(self.folder), "MODEL": str(self.model), "OPTIONS": options}.items():
            train = train.replace(name, repr(value))
        path.write_text("\n".join([*map(textwrap.dedent, parts), train if trainer else ""]))
        return cli.main(["run", str(path), *arguments])

    def policy(self) -> dict[str, torch.Tensor]:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder).state_dict()


@pytest.fixture
def scripts(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return Scripts(tmp_path, models["dense"])


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=list(IMPORTS))
def test_however_it_is_imported_it_is_ours(imports: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    check = """
    import trl_steady
    assert (GRPOTrainer, GRPOConfig) == (trl_steady.GRPOTrainer, trl_steady.GRPOConfig)
    """
    assert scripts.run(imports, check, max_steps=2, loss_type="gspo") == 0
    out, err = capsys.readouterr()
    assert out.count("trl_steady.trainer.GRPOTrainer, loss_type='gspo'\n  on: GSPO: loss_type") == 1
    assert "ratio/sequence_mean" in out and "trl-steady run" not in err


def test_afterwards_trl_is_itself_again(scripts: Scripts) -> None:
    before = trl.GRPOTrainer, trl.GRPOConfig, transformers.Trainer.__init__
    assert before[0].__module__ == "trl.trainer.grpo_trainer"
    with pytest.raises(KeyError), swapped():
        assert trl.GRPOTrainer is trl_steady.GRPOTrainer is not before[0]
        raise KeyError
    assert before == (trl.GRPOTrainer, trl.GRPOConfig, transformers.Trainer.__init__)
    assert grpo_trainer.GRPOTrainer is trl.trainer.GRPOTrainer is before[0]
    assert grpo_trainer.GRPOConfig is grpo_config.GRPOConfig is before[1]


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_swapped_it_trains_as_imported_from_us(loss_type: str, scripts: Scripts) -> None:
    """TRL's clip range for a loss of TRL's too, though its config is ours meanwhile."""
    assert scripts.run(IMPORTS["from trl"], loss_type=loss_type) == 0
    direct = tiny.train(tiny.trainer(scripts.model, scripts.folder, loss_type=loss_type))
    for name, value in direct.model.state_dict().items():
        assert torch.equal(value, scripts.policy()[name]), name


def test_with_nothing_of_ours_on_it_trains_as_trl_does(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run(IMPORTS["from trl"], beta=0.0, trim_padding=False) == 0
    assert "  on: nothing, it trains as TRL's does\n" in capsys.readouterr().out
    theirs = tiny.train(tiny.trainer(scripts.model, scripts.folder, ours=False, beta=0.0))
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(value, scripts.policy()[name]), name


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


def test_a_subclass_has_ours_below_it(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    subclass = """
    class Counting(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)
    """
    assert scripts.run(IMPORTS["from trl"], subclass, trainer="Counting", max_steps=2, loss_type="gspo") == 0
    out = capsys.readouterr().out
    assert "__main__.Counting on trl_steady.GRPOTrainer, loss_type='gspo'" in out
    assert "ratio/sequence_mean" in out and "  off:" not in out


OWN_LOSS = """
class Own(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        return model(input_ids=ids, attention_mask=mask).logits.mean()
"""


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"loss_type": "gspo"}, "GSPO would"),
        ({"off_policy_mask_threshold": 0.5}, "off-policy sequence mask would"),
        ({"beta": 0.1, "kl_estimator": "k2"}, "KL times each token's own ratio, other estimators than k3 would"),
    ],
)
def test_a_loss_that_replaces_ours_is_refused_where_an_option_asks_for_ours(
    options: dict[str, Any], idle: str, scripts: Scripts
) -> None:
    with pytest.raises(ValueError, match=rf"__main__.Own replaces _compute_loss, .*{idle} act. Call super\(\)"):
        scripts.run(IMPORTS["from trl"], OWN_LOSS, trainer="Own", **options)


def test_a_loss_of_its_own_is_named_where_none_asks_for_ours(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.run(IMPORTS["from trl"], OWN_LOSS, trainer="Own", max_steps=1) == 0
    assert "  off: what trl-steady does in _compute_loss, which __main__.Own replaces\n" in capsys.readouterr().out


FROM_BEFORE = """
(Kept,) = [c for c in GRPOTrainer.__mro__ if (c.__module__, c.__name__) == ("trl.trainer.grpo_trainer", "GRPOTrainer")]
class Mine(Kept):
    pass
"""
COPY = """
import transformers
class GRPOTrainer(transformers.Trainer):
    def __init__(self, model, reward_funcs, args, **_):
        super().__init__(transformers.AutoModelForCausalLM.from_pretrained(model), args)
"""
OTHER_NAME = COPY.replace("class GRPOTrainer", "class Copied")


@pytest.mark.parametrize(
    ("parts", "trainer", "why"),
    [
        ([IMPORTS["from trl"], FROM_BEFORE], "Mine", "__main__.Mine .* TRL's own, from before"),
        ([IMPORTS["from trl"], FROM_BEFORE], "Kept", "trl.trainer.grpo_trainer.GRPOTrainer .* TRL's own, from before"),
        (["from trl import GRPOConfig", COPY], "GRPOTrainer", "__main__.GRPOTrainer .* it is not derived from"),
        (["from trl import GRPOConfig", OTHER_NAME], "Copied", "__main__.Copied .* it is not derived from"),
        (["from transformers import TrainingArguments as GRPOConfig", COPY], "GRPOTrainer", "is not derived from"),
    ],
    ids=["subclass of TRL's", "TRL's", "copy", "copy with our config", "copy with no config of GRPO"],
)
def test_a_trainer_that_is_not_ours_is_refused_with_the_way_out(
    parts: list[str], trainer: str, why: str, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "TrainingArguments" in parts[0]:
        known = {"output_dir": str(scripts.folder), "use_cpu": True, "report_to": "none"}
        monkeypatch.setattr(tiny, "arguments", lambda config, *_, **__: config(**known))
    with pytest.raises(ValueError, match=rf"{why}.* Derive it from trl_steady.GRPOTrainer, with `from trl_steady"):
        scripts.run(*parts, trainer=trainer)


def test_a_module_imported_earlier_is_refused(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    (scripts.folder / "early_trainers.py").write_text("import trl\nclass Early(trl.GRPOTrainer):\n    pass\n")
    monkeypatch.syspath_prepend(str(scripts.folder))
    importlib.import_module("early_trainers")
    try:
        with pytest.raises(ValueError, match=r"early_trainers.Early .* TRL's own, from before"):
            scripts.run("from early_trainers import Early\nfrom trl import GRPOConfig", trainer="Early")
    finally:
        del sys.modules["early_trainers"]


def test_a_config_from_before_is_refused(scripts: Scripts) -> None:
    before = "GRPOConfig = GRPOConfig.__mro__[1]"
    with pytest.raises(ValueError, match=r"args is a trl.trainer.grpo_config.GRPOConfig, which has none of"):
        scripts.run(IMPORTS["from trl"], before)


def test_other_trainers_of_a_script_are_left_alone(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    warm_up = f"""
    import trl
    from tests import tiny
    args = trl.SFTConfig({str(scripts.folder)!r}, use_cpu=True, bf16=False, report_to="none", max_steps=1)
    rows = tiny.dataset().map(lambda row: {{"completion": "9"}})
    trl.SFTTrainer({str(scripts.model)!r}, args=args, train_dataset=rows, processing_class=tiny.tokenizer()).train()
    """
    assert scripts.run(warm_up, IMPORTS["from trl"], max_steps=1) == 0
    out, err = capsys.readouterr()
    assert out.count(f"trl-steady {trl_steady.__version__}") == 1 and "trl-steady run" not in err


def test_a_script_that_trains_nothing_of_ours_hears_of_it(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scripts.run("print('nothing')", trainer="") == 0
    said = "script.py has ended without a GRPOTrainer of trl-steady's"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one process says it
    assert scripts.run("print('nothing')", trainer="") == 0
    assert said not in capsys.readouterr().err


def test_a_script_sees_what_python_would_show_it(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    (scripts.folder / "beside_the_script.py").write_text("HERE = 'found'")
    look = """
    import sys, beside_the_script
    print(__name__, sys.argv[1:], sys.argv[0] == __file__, beside_the_script.HERE)
    """
    assert scripts.run(look, trainer="", arguments=("--lr", "1")) == 0
    assert "__main__ ['--lr', '1'] True found\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="7"):
        scripts.run("raise SystemExit(7)", trainer="")
    del sys.modules["beside_the_script"]


def test_a_module_is_run_as_python_runs_it(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = scripts.folder / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nfrom . import __name__ as own\nprint(own, __name__, sys.argv[1:])")
    monkeypatch.chdir(scripts.folder)
    assert cli.main(["run", "-m", "a_package.train", "x"]) == 0
    assert "a_package __main__ ['x']\n" in capsys.readouterr().out
    del sys.modules["a_package"]
