"""What would train without ours, though ours is asked for: found wherever a script does it, and refused or named."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import trl_steady
from tests import scripts as own_scripts
from tests import tiny
from tests.scripts import IMPORTS, Scripts

scripts = own_scripts.scripts

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
