"""Scripts that know TRL's trainer only, with ours in its place."""

import importlib
import json
import subprocess
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
    MODEL, reward_funcs=tiny.reward, args=args, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer(), BUILD
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

    def run(self, *parts: str, trainer: str = "GRPOTrainer", build: str = "", **options: Any) -> int:
        path = self.folder / "script.py"
        train = TRAIN.replace("Trainer(", f"{trainer}(", 1).replace("BUILD", build)
        for name, value in {"OUTPUT": str(self.folder), "MODEL": str(self.model), "OPTIONS": options}.items():
            train = train.replace(name, repr(value))
        path.write_text("\n".join([*map(textwrap.dedent, parts), train if trainer else ""]))
        return cli.main(["run", str(path)])

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
    assert out.count("trl_steady.trainer.GRPOTrainer, loss_type='gspo'\n  on: GSPO: loss_type='gspo'\n") == 1
    assert "ratio/sequence_mean" in out and "trl-steady run" not in err


def test_afterwards_trl_is_itself_again(scripts: Scripts) -> None:
    gmpo_trainer = importlib.import_module("trl.experimental.gmpo.gmpo_trainer")  # has imported TRL's by name
    constructors = transformers.Trainer.__init__, trl_steady.GRPOTrainer.__init__
    before = trl.GRPOTrainer, trl.GRPOConfig
    assert before[0].__module__ == "trl.trainer.grpo_trainer"
    with pytest.raises(KeyError), swapped():
        of_trl = [vars(module).values() for name, module in sys.modules.items() if name.split(".")[0] == "trl"]
        assert not any(value is theirs for values in of_trl for value in values for theirs in before)
        assert trl.GRPOTrainer is gmpo_trainer.GRPOTrainer is trl_steady.GRPOTrainer is not before[0]
        raise KeyError
    assert constructors == (transformers.Trainer.__init__, trl_steady.GRPOTrainer.__init__)
    assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is trl.trainer.GRPOTrainer is gmpo_trainer.GRPOTrainer
    assert trl.GRPOConfig is grpo_trainer.GRPOConfig is grpo_config.GRPOConfig
    assert before == (trl.GRPOTrainer, trl.GRPOConfig)


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
BELOW = """
class Own(Own):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)
"""
PATCHED = """
def own(self, model, inputs):
    return model(input_ids=inputs["completion_ids"], attention_mask=inputs["completion_mask"]).logits.mean()

GRPOTrainer._compute_loss, Own = own, GRPOTrainer
"""
WATCHED = """
def watched(self, model, inputs, kept=GRPOTrainer._compute_loss):
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


IN_THE_LOSS: dict[str, dict[str, Any]] = {
    "GSPO: loss_type='gspo'": {"loss_type": "gspo"},
    "GSPO-token: loss_type='gspo_token'": {"loss_type": "gspo_token"},
    "each token's own ratio under a sequence's: use_bias_correction_kl=True, beta=0.1": {
        **{"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 1e-3}
    },
    "the ratio taken to the engine's log-probs: kl_ratio_denominator='sampler'": {
        **{"beta": 0.1, "kl_ratio_denominator": "sampler"}
    },
    "other estimators than k3: kl_estimator='k2'": {"beta": 0.1, "kl_estimator": "k2"},
    "off-policy mask, by sequence or by token: off_policy_mask_threshold=0.5, off_policy_mask_level='sequence'": {
        "off_policy_mask_threshold": 0.5
    },
    "geometric mask, trainer against engine: geometric_mask_range=[0.9, 1.1]": {"geometric_mask_range": [0.9, 1.1]},
    "veto of outlier tokens, trainer against engine: token_veto_threshold=0.1": {"token_veto_threshold": 0.1},
}


@pytest.mark.parametrize(("asked", "options"), IN_THE_LOSS.items(), ids=list(IN_THE_LOSS))
def test_a_loss_that_replaces_ours_is_refused_where_an_option_asks_for_ours(
    asked: str, options: dict[str, Any], scripts: Scripts
) -> None:
    parts = ("from tests.test_training import rollout", IMPORTS["from trl"], OWN_LOSS)
    with pytest.raises(ValueError) as refused:  # an engine, since some of them want one
        scripts.run(*parts, trainer="Own", build="rollout_func=rollout", **options)
    said = str(refused.value)
    assert said.startswith("__main__.Own replaces _compute_loss, where it would have to act, what is asked for: ")
    assert f": {asked}. Call what it replaces, as by super(), or leave " in said


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("parts", [(OWN_LOSS, BELOW), (PATCHED,)], ids=["below another", "put into the class"])
def test_a_loss_is_found_wherever_it_is_replaced(parts: tuple[str, ...], scripts: Scripts) -> None:
    with pytest.raises(ValueError, match="replaces _compute_loss, where it would have to act"):
        scripts.run(IMPORTS["from trl"], *parts, trainer="Own", loss_type="gspo")


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("own", [WATCHED, OWN_STEP], ids=["ours kept aside", "by compute_loss"])
def test_what_calls_ours_is_no_replacement(own: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run(IMPORTS["from trl"], own, trainer="Own", loss_type="gspo", max_steps=2) == 0
    out = capsys.readouterr().out
    assert "  on: GSPO: loss_type='gspo'\n" in out and "ratio/sequence_mean" in out


@pytest.mark.parametrize(
    "options",
    [{"keep_sampling_mask": True, "top_k": 5}, {"router_replay": "R2"}, {"router_replay": "R3"}],
    ids=str,
)
def test_what_acts_around_the_loss_is_refused_a_step_that_replaces_that(
    options: dict[str, Any], models: dict[str, Path], scripts: Scripts
) -> None:
    scripts.model = models["moe"]
    with pytest.raises(ValueError, match=r"__main__.Own replaces compute_loss, where it would have to act"):
        scripts.run(IMPORTS["from trl"], OWN_STEP, trainer="Own", router_aux_loss_coef=0.0, **options)


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}], ids=str)  # of TRL's defaults, with a KL of TRL's
def test_a_loss_of_its_own_is_named_where_nothing_of_ours_is_asked_of_it(
    options: dict[str, Any], scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.run(IMPORTS["from trl"], OWN_LOSS, trainer="Own", max_steps=1, **options) == 0
    said = capsys.readouterr().out.splitlines()
    (first,) = (i for i, line in enumerate(said) if line.startswith("trl-steady 0"))
    assert said[first + 1 : first + 3] == [
        "  on: no padding computed (the default): trim_padding=True",
        "  off: what trl-steady does in _compute_loss, which __main__.Own replaces",
    ]


def test_trls_own_subclass_trains_on_ours_as_it_does_on_trls(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("trl.experimental.gmpo")]:
        monkeypatch.delitem(sys.modules, name)  # not from before
    imports = "from trl.experimental.gmpo import GMPOConfig as GRPOConfig, GMPOTrainer"
    assert scripts.run(imports, trainer="GMPOTrainer", beta=0.04, max_steps=1) == 0
    assert "_compute_loss, which trl.experimental.gmpo.gmpo_trainer.GMPOTrainer replaces" in capsys.readouterr().out


def test_passes_that_cannot_be_ours_are_said_to_be_off(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    scored = """
    import torch
    class Own(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *_, **__):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            logps = logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
            return logps, torch.zeros_like(logps), None
    """
    assert scripts.run(IMPORTS["from trl"], scored, trainer="Own", max_steps=1) == 0
    assert "  off: no padding computed (the default): trim_padding=True\n" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.* cannot act:UserWarning")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_kl": 0.2},
            [
                "on: iterative GRPO: a reference that moves: sync_ref_model=True, beta=0.1\n",
                "on: a reference that moves when the KL is too large: ref_model_sync_kl=0.2\n",
            ],
        ),
        ({"loss_type": "gspo", "steps_per_generation": 1}, ["cannot act: GSPO: loss_type='gspo'"]),
        (
            {"off_policy_mask_threshold": 0.5, "steps_per_generation": 1},
            ["cannot act: off-policy mask, by sequence or by token: off_policy_mask_threshold=0.5, off_policy"],
        ),
        ({"keep_sampling_mask": True}, ["cannot act: kept sampling mask: keep_sampling_mask=True"]),
        (
            {"loss_type": "gspo_token", "step_advantage": "process"},
            ["on: step rewards (StepRewards), process supervision: step_advantage='process'"],
        ),
    ],
    ids=str,
)
def test_a_trainer_says_what_is_asked_for_and_whether_it_can_act(
    options: dict[str, Any], said: list[str], scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 1, "per_device_train_batch_size": 4, **options}
    assert scripts.run(IMPORTS["from trl"], **options) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {line}" in out for line in said)


def test_what_is_set_too_late_is_said(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "elsewhere")
    monkeypatch.setenv("HF_ENDPOINT", "unchanged")
    late = "import os\nos.environ['HF_HOME'] = 'late'\nos.environ['MINE'] = 'not read by them'"
    assert scripts.run(late, IMPORTS["from trl"], max_steps=1) == 0
    out = capsys.readouterr().out
    monkeypatch.delenv("MINE")
    assert out.count("too late") == 1
    assert "  too late: HF_HOME, read before the script has set it. Set it in the shell\n" in out


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
        ([IMPORTS["from trl"], FROM_BEFORE], "Mine", "__main__.Mine .* TRL's own, from before"),
        ([IMPORTS["from trl"], FROM_BEFORE], "Kept", "trl.trainer.grpo_trainer.GRPOTrainer .* TRL's own, from before"),
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
    said = "script.py has ended and built no GRPOTrainer of trl-steady's in this process"
    assert said in capsys.readouterr().err
    for end in ("sys.exit()", "sys.exit(0)"):
        assert scripts.run(f"import sys\n{end}", trainer="") == 0
        assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "2")  # one process says it
    assert scripts.run("print('nothing')", trainer="") == 0
    assert said not in capsys.readouterr().err


LOOK = """
import json, os, sys
import beside_the_script
print(json.dumps([__name__, __file__, sys.argv[1:], sys.path[0], sys.path[1:], beside_the_script.HERE]))
"""


def test_a_script_sees_what_python_would_show_it(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a link, from another folder."""
    folder = scripts.folder / "scripts"
    folder.mkdir()
    (folder / "look.py").write_text(LOOK)
    (folder / "beside_the_script.py").write_text("HERE = 'found'")
    (scripts.folder / "linked.py").symlink_to(folder / "look.py")
    monkeypatch.chdir(scripts.folder)
    shown = [
        json.loads(subprocess.run([*command, "linked.py", "--lr", "1"], capture_output=True, check=True).stdout)
        for command in ([sys.executable], [Path(sys.executable).with_name("trl-steady"), "run"])
    ]
    assert shown[0] == shown[1] and shown[0][-1] == "found"


def test_a_scripts_exit_status_is_its_own(scripts: Scripts) -> None:
    with pytest.raises(SystemExit, match="7"):
        scripts.run("raise SystemExit(7)", trainer="")
    with pytest.raises(SystemExit, match="stopped"):
        scripts.run("raise SystemExit('stopped')", trainer="")


def test_a_module_is_run_as_python_runs_it(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    package = scripts.folder / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(LOOK.replace("import beside_the_script", "from . import beside_the_script"))
    (package / "beside_the_script.py").write_text("HERE = 'found'")
    monkeypatch.chdir(scripts.folder)
    of_python = [sys.executable, "-m", "a_package.train"]
    of_ours = [Path(sys.executable).with_name("trl-steady"), "run", "-m", "a_package.train"]
    shown = [
        json.loads(subprocess.run([*command, "x"], capture_output=True, check=True).stdout)
        for command in (of_python, of_ours)
    ]
    assert shown[0] == shown[1]


def test_a_modules_main_is_itself_while_it_runs(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what it defines can be pickled."""
    (scripts.folder / "a_module.py").write_text("import pickle\nclass A:\n    pass\npickle.loads(pickle.dumps(A()))")
    monkeypatch.chdir(scripts.folder)
    assert cli.main(["run", "-m", "a_module"]) == 0
