"""A TRL that is not tested: what has moved is refused when it is asked for, and all else works."""

import inspect
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import trl
from trl.trainer import utils as trl_utils

import trl_steady
from tests.tools import tiny
from tests.trl_bridge.tools import Change, seen_by_user
from trl_steady import trl_bridge
from trl_steady.trl_bridge import names, refuse_unsupported

GRPO, BOTH = "trainer/grpo_trainer.py", "trainer/[gr]*o_trainer.py"


def renamed(name: str, files: str = BOTH) -> Change:
    return files, rf"\b{name}\b", f"{name}_later"


class Release(NamedTuple):
    """A change of TRL, options that need what has changed, and what is said of it."""

    changes: list[Change]
    options: dict[str, Any] | None
    refused: str | None = None
    """The start of the error of the options; None if they work."""
    default: str | None = None
    """The same of an import and of a run with default options."""
    command: tuple[str, ...] = ()


KEPT = {"keep_sampling_mask": True, "top_k": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "release",
    [
        pytest.param(Release([], {"loss_type": "gspo"}), id="nothing"),
        pytest.param(
            Release([renamed("_calculate_rewards")], None, default="GRPOTrainer"), id="_calculate_rewards, renamed"
        ),
        pytest.param(
            Release(
                [(BOTH, r"(\b_calculate_rewards\(.*completion_ids_list)\)", r"\1, lengths=None)")],
                {"dynamic_sampling": True},
            ),
            id="_calculate_rewards, a new argument",
        ),
        pytest.param(
            Release(
                [
                    (BOTH, r"(def _compute_loss\(self, model, inputs)\)", r"\1, scale=1.0)"),
                    (BOTH, r"(self\._compute_loss\(model, inputs)\)", r"\1, 1.0)"),
                ],
                {"loss_type": "gspo"},
            ),
            id="_compute_loss, a new argument",
        ),
        pytest.param(
            Release(
                [renamed("_step")], {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1}, "sync_ref_model"
            ),
            id="_step, renamed",
        ),
        pytest.param(
            Release(
                [
                    (GRPO, r"(def _generate_single_turn\(self, )", r"\1mode, "),
                    (GRPO, r"(self\._generate_single_turn\()", r'\1"train", '),
                ],
                KEPT,
                "keep_sampling_mask",
            ),
            id="_generate_single_turn, another first argument",
        ),
        pytest.param(
            Release(
                [(GRPO, '"old_per_token_logps"', '"rollout_logps"')],
                {"loss_type": "gspo"},
                "loss_type=dppo/gmpo/gspo/gspo_token/m2po",
            ),
            id="an input of the loss, renamed",
        ),
        pytest.param(
            Release(
                [
                    ("generation/vllm_generation.py", "->", "vllm_engine.py"),
                    ("**/*.py", r"\.vllm_generation import", ".vllm_engine import"),
                ],
                {"loss_type": "gspo"},
            ),
            id="the engine's module, moved",
        ),
        pytest.param(
            Release(
                [renamed("launch_training_script", "cli/**/*.py")],
                None,
                command=("grpo", "--help"),
                refused="trl-steady grpo",
            ),
            id="the command's launcher, renamed",
        ),
    ],
)
def test_a_later_trl_is_refused_where_it_has_moved(tmp_path: Path, release: Release) -> None:
    changes, options, refused, default, command = release
    result, output = seen_by_user(tmp_path, changes, "GRPOTrainer", options, [*command])
    message = "{} does not work with trl 1.17.0, which is not tested: trl."
    for name, error in {"import": default, "default": default, "feature": refused, "command": refused}.items():
        if name in result and error is not None:
            assert result[name].startswith("ImportError: " + message.format(error)), (name, result[name])
            assert 'pip install "trl==' in result[name]
        elif name in result:
            assert result[name] in (None, 2), (name, result[name])  # two steps
    trainings = sum(result.get(name) == 2 for name in ("default", "feature"))
    assert output.count("trl 1.17.0 is not tested, only ") == trainings
    assert ("These do not work" in output) == (trainings > 0 and bool(refused or default))


def test_with_a_tested_trl_nothing_is_compared_and_nothing_has_moved() -> None:
    assert trl.__version__ in trl_bridge.TESTED and not trl_bridge.UNTESTED and not trl_bridge._UNSUPPORTED
    assert names.missing_from_trl() == {}


def without(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.delattr(owner, name)
    monkeypatch.setattr(trl_bridge, "_UNSUPPORTED", names.missing_from_trl())


def test_a_feature_whose_name_has_moved_is_refused_and_others_are_not(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, trl_utils, "maybe_gather_lm_head_ctx")
    assert trl_bridge._UNSUPPORTED.keys() == {"keep_sampling_mask", "PPOTrainer", "RewardAdapter"}
    tiny.trainer(models["dense"], tmp_path, loss_type="gspo")
    with pytest.raises(ImportError, match=r"^keep_sampling_mask does not .* trl\.trainer\.utils\.maybe_gather_lm_"):
        tiny.trainer(models["dense"], tmp_path, **KEPT)
    with pytest.raises(ImportError, match="RewardAdapter does not work"):
        tiny.trainer(models["dense"], tmp_path, build={"reward_funcs": [trl_steady.RewardAdapter()]})
    with pytest.raises(ImportError, match="PPOTrainer does not work"):
        exec("from trl_steady import PPOTrainer")


def test_what_one_trainer_lacks_does_not_concern_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, trl.RLOOTrainer, "_calculate_rewards")
    assert trl_bridge._UNSUPPORTED.keys() == {"RLOOTrainer"}
    exec("from trl_steady import GRPOTrainer, PPOTrainer")
    with pytest.raises(ImportError, match=r"^RLOOTrainer does not work .*\._calculate_rewards: no such"):
        exec("from trl_steady import RLOOTrainer")


@pytest.mark.parametrize(
    ("signature", "is_moved"),
    [
        ("(prompts, lengths=None)", False),
        ("(prompts, **others)", True),
        ("(prompts, lengths)", True),
        ("(messages)", True),
        ("()", True),
    ],
)
def test_a_parameter_with_a_default_is_no_difference(
    signature: str, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(function: Any, source: str) -> Any:
        """Return a function with another signature, whose code names the same."""
        scope: dict[str, Any] = {}
        exec(f"def replaced{source}: pass", scope)
        scope["replaced"].__code__ = scope["replaced"].__code__.replace(co_names=function.__code__.co_names)
        return scope["replaced"]

    changed = later(trl.RLOOTrainer._generate, signature.replace("(", "(self, ", 1))
    monkeypatch.setattr(trl.RLOOTrainer, "_generate", changed)
    assert ("RLOOTrainer+dynamic_sampling" in names.missing_from_trl()) == is_moved


@pytest.mark.parametrize(
    ("function", "name", "setting"),
    [
        ("__init__", "reward_func_names", "GRPOTrainer"),
        ("__init__", "vllm_generation", "GRPOTrainer+use_vllm"),
        ("__init__", "environment_factories", "GRPOTrainer+environment_factory"),
        ("_compute_loss", "get_high_entropy_mask", "GRPOTrainer+loss_type=dppo/gmpo/m2po"),
    ],
)
def test_an_attribute_that_features_read_is_missed(
    function: str, name: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would lack it, or have our own default in its place."""
    theirs = inspect.unwrap(getattr(trl.GRPOTrainer, function))
    found = tuple(each.replace(name, f"{name}_later") for each in theirs.__code__.co_names)
    monkeypatch.setattr(theirs, "__code__", theirs.__code__.replace(co_names=found))
    assert setting in names.missing_from_trl()


@pytest.mark.parametrize(
    ("settings", "asked", "is_refused"),
    [
        ("keep_sampling_mask+use_vllm", {"keep_sampling_mask": True, "use_vllm": True}, True),
        ("keep_sampling_mask+use_vllm", {"keep_sampling_mask": True, "use_vllm": False}, False),
        ("kl_estimator=k1/k2", {"kl_estimator": "k2"}, True),
        ("kl_estimator=k1/k2", {"kl_estimator": "k3"}, False),
        ("beta", {"beta": 0.0}, False),
        ("geometric_mask_range", {"geometric_mask_range": (0.5, 2.0)}, True),
        ("save_strategy+save_only_model=False", {"save_strategy": "no", "save_only_model": False}, False),
        ("trl-steady", {}, True),
    ],
)
def test_settings_are_refused_if_all_of_them_are_on(
    settings: str, asked: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_bridge, "_UNSUPPORTED", {settings: "trl.f: no such function"})
    if is_refused:
        with pytest.raises(ImportError, match=r"does not work with trl .* trl\.f: no such function\. Run: pip"):
            refuse_unsupported(**asked)
    else:
        refuse_unsupported(**asked)


def test_every_setting_is_an_option_a_class_or_a_command() -> None:
    """A misspelt one would refuse nothing."""
    classes = {"PPOTrainer", "RewardAdapter", "RewardModelRefreshCallback", "ReferenceRefreshCallback"}
    classes |= {"rollout_func", "environment_factory", "tools"}  # arguments of the constructor
    commands = {"trl-steady", "trl-steady grpo", "trl-steady ppo", "trl-steady rloo"}
    options = {name for kind in ("GRPO", "PPO", "RLOO") for name in vars(getattr(trl_steady, f"{kind}Config"))}
    options |= set(trl_steady.PPOConfig.__dataclass_fields__)
    for each in names.needed():
        found = {part.partition("=")[0] for setting in each.settings for part in setting.split("+")}
        assert found <= classes | commands | options


def test_an_error_inside_an_import_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from trl_steady import ...` takes an AttributeError for a missing name."""
    monkeypatch.setattr(trl_steady, "_MODULES", MappingProxyType({"Broken": "trainers.grpo"}))
    with pytest.raises(ImportError, match=r"Broken cannot be imported: .*\.grpo' has no attribute"):
        exec("from trl_steady import Broken")
