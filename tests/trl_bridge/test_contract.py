"""Compare the installed TRL with what names.toml and the bridge assume: when TRL moves, these tests name what moved.

`tests/trl_bridge/test_names.py` has the names themselves. Here is how TRL's functions use them.
"""

import ast
import inspect
import re
import textwrap
from dataclasses import fields
from typing import Any

import pytest
import trl

import trl_steady
from tests.tools.losses import NATIVE_LOSS_TYPES
from trl_steady.config.shared import SharedOptions
from trl_steady.trl_bridge import names
from trl_steady.trl_bridge.log_probs import OTHER_INPUTS
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

TRAINERS = pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])


def source_of(function: Any) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def calls_in(function: Any) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source_of(function))) if isinstance(node, ast.Call)]


@TRAINERS
def test_trls_loss_reads_the_inputs_that_we_know(trainer: Any) -> None:
    """A further one might need to be rewritten too. Each mention of `inputs` names its key."""
    source = source_of(trainer._compute_loss)
    found = re.findall(r'\binputs\[\s*"(\w+)"\]|\binputs\.get\(\s*"(\w+)"|"(\w+)" (?:not )?in inputs\b', source)
    assert len(found) == len(re.findall(r"\binputs\b", source)) - 1  # the parameter
    listed = [each.names for each in names.needed() if (each.owner, each.name) == (trainer.__name__, "_compute_loss")]
    known = {*OTHER_INPUTS, "num_items_in_batch"}.union(*listed)
    assert {key for keys in found for key in keys if key} <= known


@TRAINERS
def test_our_overrides_have_the_parameters_of_what_they_override(trainer: Any) -> None:
    """All of them, or the first ones before `*arguments`."""
    overrides = [name for name, each in vars(FeatureTrainerMixin).items() if inspect.isfunction(each)]
    compared = [name for name in overrides if hasattr(trainer, name)]
    assert len(compared) > 15
    for name in compared:
        ours = inspect.signature(getattr(FeatureTrainerMixin, name)).parameters.values()
        theirs = list(inspect.signature(inspect.unwrap(getattr(trainer, name))).parameters)
        named = [each.name for each in ours if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        hands_on = len(named) < len(ours)
        assert named == (theirs[: len(named)] if hands_on else theirs), name


def test_the_loss_types_of_trl_are_those_we_know() -> None:
    """Every constant that TRL compares `self.loss_type` with."""
    known: set[str] = set()
    for node in ast.walk(ast.parse(source_of(trl.GRPOTrainer._compute_loss))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            known |= {str(c.value) for c in ast.walk(node.comparators[0]) if isinstance(c, ast.Constant)}
    assert known == set(NATIVE_LOSS_TYPES)


@TRAINERS
def test_trls_rollout_asks_and_logs_by_the_names_that_rounds_answer_for(trainer: Any) -> None:
    """A round of dynamic sampling answers the scores, and the last call what was generated and rewarded."""
    function = trainer._generate_and_score_completions
    source, calls = source_of(function), [ast.unparse(call) for call in calls_in(function)]
    for call in (
        "self._generate(prompts)",
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
    ):
        assert calls.count(call) == 1, call
    deviations = [call for call in calls if call.startswith("nanstd(")]  # the first are of the rewards in groups
    assert deviations and all("reward" in call or "grouped" in call or "advantages" in call for call in deviations)
    scores = [call for call in calls if call.startswith("self._get_per_token_logps_and_entropies(")]
    assert len(scores) == 3 and all(
        "prompt_completion_ids, attention_mask, logits_to_keep, " in call for call in scores
    )
    (answers,) = (node for node in ast.walk(ast.parse(source_of(trainer._generate))) if isinstance(node, ast.Return))
    names = ast.unparse(answers).removeprefix("return ").strip("()").split(", ")
    assert names[:2] == ["prompt_ids", "completion_ids"]
    assert {*names[2:]} <= {"completions", "tool_mask", "logprobs", "extra_fields", "images", "tool_images"}
    # metrics that need scores are known by their names; the others are of prompts, answers and rewards
    logged = set(re.findall(r'self\._metrics\[mode\]\[f?"([^"]+)"\]', source))
    of_rewards = {"reward", "reward_std", "frac_reward_zero_std"}
    of_rewards |= {f"rewards/{{reward_func_name}}/{statistic}" for statistic in ("mean", "std")}
    assert {name for name in logged - of_rewards if name != "kl" and not name.startswith("sampling/")} == set()
    assert set(re.findall(r'self\._logs\["(\w+)"\]', source)) <= {
        *("images", "prompt", "completion", "rewards", "advantages", "extra")
    }


def test_trl_gives_a_model_and_takes_from_it_what_we_know_how_to_do_without_padding() -> None:
    """The scoring method uses the model in one call. RLOO's method has the same code."""
    source = source_of(trl.GRPOTrainer._get_per_token_logps_and_entropies)
    assert source == source_of(trl.RLOOTrainer._get_per_token_logps_and_entropies)
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    assert [name.id for name in names].count("model") == 1
    (literal,) = re.findall(r"model_inputs = \{(.*)\}", source)
    given = set(re.findall(r'model_inputs\["(\w+)"\] =', source)) | set(re.findall(r'"(\w+)":', literal))
    for call in calls_in(trl.GRPOTrainer._get_per_token_logps_and_entropies):
        if ast.unparse(call.func) == "model":
            given |= {keyword.arg for keyword in call.keywords if keyword.arg}
    cut_or_packed = {"attention_mask", "input_ids", "labels", "mm_token_type_ids", "token_type_ids"}
    not_packed = {*("image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask")}
    not_packed |= {"pixel_values", "spatial_shapes"}
    passed_on = {"fused_lm_head", "output_router_logits"}
    assert given == cut_or_packed | not_packed | passed_on
    assert set(re.findall(r"outputs\.(\w+)", source)) == {"entropy", "log_probs", "aux_loss"}


def test_our_trainers_have_trls_constructors_and_our_configs_trls_options() -> None:
    for name in ("GRPO", "RLOO"):
        ours, theirs = (getattr(package, f"{name}Trainer") for package in (trl_steady, trl))
        assert inspect.signature(ours) == inspect.signature(theirs) and issubclass(ours, theirs)
        assert issubclass(getattr(trl_steady, f"{name}Config"), getattr(trl, f"{name}Config"))
    ours, theirs = ({option.name for option in fields(config)} for config in (trl_steady.RLOOConfig, trl.RLOOConfig))
    assert ours - theirs == {option.name for option in fields(SharedOptions)}
