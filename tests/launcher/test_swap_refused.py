"""What would train without ours, though ours is asked for: found wherever a script does it, and refused or named."""

import importlib
import sys

import pytest

import trl_steady
from tests.tools import scripts as own_scripts
from tests.tools import tiny
from tests.tools.scripts import IMPORTS, Scripts

scripts = own_scripts.scripts

OWN_LOSS = """
class Own(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        return model(input_ids=ids, attention_mask=mask).logits.mean()
"""
PATCHED = """
def own(self, model, inputs):
    return model(input_ids=inputs["completion_ids"], attention_mask=inputs["completion_mask"]).logits.mean()

GRPOTrainer._compute_loss, Own = own, GRPOTrainer
"""
WATCHED = """
def watched(self, model, inputs):
    return ours(self, model, inputs)

ours = GRPOTrainer._compute_loss
GRPOTrainer._compute_loss, Own = watched, GRPOTrainer
"""
OWN_STEP = """
class Own(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        parts = [self._compute_loss(model, inputs) for _ in range(1)]
        return parts[0]
"""


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our class after a script that puts something of its own into it."""
    # where it has the method itself, monkeypatch puts that back; where it inherits it, deletes what is there
    monkeypatch.setattr(trl_steady.GRPOTrainer, "_compute_loss", trl_steady.GRPOTrainer._compute_loss)
    monkeypatch.delattr(trl_steady.GRPOTrainer, "_compute_loss")


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize(
    ("part", "said"),
    [
        (OWN_LOSS, "__main__.Own overrides _compute_loss without calling super"),
        (PATCHED, "__main__.own replaces trl_steady.trainers.grpo.GRPOTrainer._compute_loss without calling it"),
    ],
    ids=["subclass", "put into the class"],
)
def test_a_loss_without_ours_is_refused_under_the_launcher_too(part: str, said: str, scripts: Scripts) -> None:
    """tests/host/test_reached.py has the other ways."""
    with pytest.raises(ValueError, match=f"^{said}.*: GSPO: loss_type='gspo'"):
        scripts.run(IMPORTS["from trl"], part, trainer="Own", loss_type="gspo")


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("own", [WATCHED, OWN_STEP], ids=["ours kept aside", "by compute_loss"])
def test_what_calls_ours_is_no_replacement(own: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run(IMPORTS["from trl"], own, trainer="Own", loss_type="gspo", max_steps=2) == 0
    out = capsys.readouterr().out
    assert "  on: GSPO: loss_type='gspo'\n" in out and "ratio/sequence_mean" in out


def test_trls_own_subclass_trains_on_ours_as_it_does_on_trls(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("trl.experimental.gmpo")]:
        monkeypatch.delitem(sys.modules, name)  # not from before
    imports = "from trl.experimental.gmpo import GMPOConfig as GRPOConfig, GMPOTrainer"
    assert scripts.run(imports, trainer="GMPOTrainer", beta=0.04, max_steps=1) == 0
    assert "trl.experimental.gmpo.gmpo_trainer.GMPOTrainer on trl_steady.GRPOTrainer" in capsys.readouterr().out


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
MY_COPY = COPY.replace("class GRPOTrainer", "class MyGRPOTrainer")


@pytest.mark.parametrize(
    ("parts", "trainer", "why"),
    [
        ([IMPORTS["from trl"], FROM_BEFORE], "Mine", "__main__.Mine .* TRL's own, imported before"),
        (
            [IMPORTS["from trl"], FROM_BEFORE],
            "Kept",
            "trl.trainer.grpo_trainer.GRPOTrainer .* TRL's own, imported before",
        ),
        (["from trl import GRPOConfig", COPY], "GRPOTrainer", "__main__.GRPOTrainer .* it is not derived from"),
        (["from trl import GRPOConfig", OTHER_NAME], "Copied", "__main__.Copied .* it is not derived from"),
        (["from transformers import TrainingArguments as GRPOConfig", MY_COPY], "MyGRPOTrainer", "is not derived"),
    ],
    ids=["subclass of TRL's", "TRL's", "copy", "copy with our config", "copy with no config of GRPO"],
)
def test_a_trainer_that_is_not_ours_is_refused_with_the_way_out(
    parts: list[str], trainer: str, why: str, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "TrainingArguments" in parts[0]:
        known = {"output_dir": str(scripts.folder), "use_cpu": True, "report_to": "none"}
        monkeypatch.setattr(tiny, "arguments", lambda config, *_, **__: config(**known))
    with pytest.raises(ValueError, match=rf"{why}.* derive it from trl_steady.GRPOTrainer, with `from trl_steady"):
        scripts.run(*parts, trainer=trainer)


def test_a_module_imported_earlier_is_refused(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    (scripts.folder / "early_trainers.py").write_text("import trl\nclass Early(trl.GRPOTrainer):\n    pass\n")
    monkeypatch.syspath_prepend(str(scripts.folder))
    importlib.import_module("early_trainers")
    try:
        with pytest.raises(ValueError, match=r"early_trainers.Early .* TRL's own, imported before"):
            scripts.run("from early_trainers import Early\nfrom trl import GRPOConfig", trainer="Early")
    finally:
        del sys.modules["early_trainers"]


def test_processes_that_would_train_apart_are_refused(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(ValueError, match=r"^2 processes were started, but each would train alone.* Set use_cpu=True"):
        scripts.run(IMPORTS["from trl"])


def test_a_config_from_before_is_refused(scripts: Scripts) -> None:
    before = "GRPOConfig = GRPOConfig.__mro__[2]"
    with pytest.raises(
        ValueError,
        match=r"GRPOTrainer takes a trl_steady.GRPOConfig, and args is a trl.trainer.grpo_config.GRPOConfig",
    ):
        scripts.run(IMPORTS["from trl"], before)
