"""Compare what TRL reads with the contract: when TRL moves, name what moved."""

import ast
import inspect
import pkgutil
import re
import textwrap
from dataclasses import fields
from typing import Any

import pytest
import transformers
import trl
from trl.cli.commands.training import TrainingCommand
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils as trl_utils

import trl_steady
from tests.tools.losses import NATIVE_LOSS_TYPES
from tests.trl_bridge.contract import CONTRACT, DEFAULTS, RLOO_CONTRACT, SCORING, Contract, named_in
from trl_steady.config.shared import SharedOptions
from trl_steady.trl_bridge import names
from trl_steady.trl_bridge.lm_head import Head
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

BOTH = pytest.mark.parametrize(
    ("trainer", "contract"), [(trl.GRPOTrainer, CONTRACT), (trl.RLOOTrainer, RLOO_CONTRACT)], ids=["GRPO", "RLOO"]
)


def source_of(function: Any) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def calls_in(function: Any) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source_of(function))) if isinstance(node, ast.Call)]


def parameters_of(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


def reads(source: str) -> dict[str, set[str]]:
    """The names a method reads: `self.NAME`, `self.args.NAME`, `inputs["NAME"]` in any form.

    `self`, `self.args` or `inputs` handed on whole, or read by getattr, would hide names: an assertion says so.
    """
    found: dict[str, set[str]] = {"attributes": set(), "arguments": set(), "inputs": set()}
    seen = {"self": 0, "self.args": 0, "inputs": 0}

    def is_name(node: ast.AST, name: str) -> bool:
        return isinstance(node, ast.Name) and node.id == name

    def key(node: ast.expr) -> str:
        assert isinstance(node, ast.Constant), f"inputs is read with a computed key: {ast.unparse(node)}"
        return str(node.value)

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=value, attr=attr) if is_name(value, "self"):
                found["attributes"].add(attr)
                seen["self"] += 1
            case ast.Attribute(value=ast.Attribute(value=value, attr="args"), attr=attr) if is_name(value, "self"):
                found["arguments"].add(attr)
                seen["self.args"] += 1
            case ast.Subscript(value=value, slice=index) if is_name(value, "inputs"):
                found["inputs"].add(key(index))
                seen["inputs"] += 1
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[first, *_]) if is_name(value, "inputs"):
                found["inputs"].add(key(first))
                seen["inputs"] += 1
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[value]) if is_name(value, "inputs"):
                found["inputs"].add(key(left))
                seen["inputs"] += 1
            case _:
                pass
    for whole, count in seen.items():
        mentions = sum(
            isinstance(n, ast.Name | ast.Attribute) and ast.unparse(n) == whole for n in ast.walk(ast.parse(source))
        )
        assert mentions == count, f"{whole} is handed on whole, where names read from it cannot be seen"
    return found


@BOTH
def test_trls_loss_reads_what_the_contract_lists(trainer: Any, contract: Contract) -> None:
    found = reads(source_of(trainer._compute_loss))
    assert found["attributes"] | found["inputs"] == contract.reads and found["arguments"] == contract.arguments


@BOTH
def test_the_methods_we_override_have_the_parameters_we_know(trainer: Any, contract: Contract) -> None:
    assert {name: parameters_of(getattr(trainer, name)) for name in contract.parameters} == contract.parameters
    patched = {name for name in vars(FeatureTrainerMixin) if name in dir(trainer) and callable(getattr(trainer, name))}
    inherited = {name for name in patched if not getattr(trainer, name).__module__.startswith(("trl.", "transf"))}
    # what transformers documents for subclasses, or what hands on all that it gets, needs no contract
    public = {"__init__", "_issue_warnings_after_load", "_maybe_log_save_evaluate", "evaluate", "train"}
    listed = {each.name for each in names.needed() if each.owner == trainer.__name__ and each.parameters}
    assert patched - inherited - public <= contract.parameters.keys() | listed


def test_the_functions_that_names_lists_have_no_further_parameters() -> None:
    """`names.missing_from_trl` allows further parameters with defaults. Here, each is known."""
    for _, owner, name, parameters, _ in names.needed():
        known = {*parameters} | DEFAULTS.get((owner, name), set())
        found = parameters_of(pkgutil.resolve_name(f"trl.{owner}.{name}"))
        assert not parameters or known == {*found}, (owner, name)


def test_the_engine_is_built_from_names_that_we_replace() -> None:
    """TRL looks up `VLLMGeneration` in the trainer's module and `LLM` in the engine's module."""
    for function, name in ((trl.GRPOTrainer.__init__, "VLLMGeneration"), (VLLMGeneration._init_vllm, "LLM")):
        assert any(ast.unparse(call.func) == name for call in calls_in(function)), name
    assert inspect.getmodule(trl.GRPOTrainer).VLLMGeneration is VLLMGeneration  # type: ignore[union-attr]
    assert "self._iter_named_params()" in source_of(VLLMGeneration.sync_weights)


def test_the_fused_head_asks_once_by_the_name_that_we_answer_for() -> None:
    """TRL gives the arguments in the order of `Head`'s fields, and then those that only TRL reads."""
    calls = calls_in(trl_utils.add_fused_lm_head)
    (asked,) = (call for call in calls if ast.unparse(call.func) == "_ChunkedLogProbFunction.apply")
    assert [field.name for field in fields(Head)][8:] == ["others", "keywords"]
    assert [ast.unparse(each) for each in asked.args[4:]] == [
        *("temperature", "_CHUNKED_LOGPROB_CHUNK_SIZE", "final_logit_softcapping", "logit_scale", "outputs")
    ]
    assert any(ast.unparse(call) == "maybe_gather_lm_head_ctx(weight, bias)" for call in calls)


def test_trls_command_parses_and_launches_by_the_names_that_we_answer_for() -> None:
    assert "from ..accelerate_launcher import launch_training_script" in source_of(TrainingCommand.run)
    calls = calls_in(TrainingCommand.run)
    (launch,) = (call for call in calls if ast.unparse(call.func) == "launch_training_script")
    assert [keyword.arg for keyword in launch.keywords] == ["script_name", "launch_args", "training_script_args"]
    assert "module.make_parser(prog=f'trl {self.name}')" in map(ast.unparse, calls)


def test_the_loss_types_of_trl_are_those_we_know() -> None:
    """Every constant that TRL compares `self.loss_type` with."""
    known: set[str] = set()
    for node in ast.walk(ast.parse(source_of(trl.GRPOTrainer._compute_loss))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            known |= {str(c.value) for c in ast.walk(node.comparators[0]) if isinstance(c, ast.Constant)}
    assert known == set(NATIVE_LOSS_TYPES)


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_trls_rollouts_are_buffered_and_scored_as_we_know(trainer: Any) -> None:
    source = re.sub(r"\binputs\b", "batch", source_of(trainer._prepare_inputs))  # a local name, not what `reads` means
    found = reads(source)
    known = named_in(trainer.__name__, "_prepare_inputs") | {"args", "model", "num_iterations"}
    assert found["attributes"] == known and found["arguments"] == {"steps_per_generation"}
    assert '"ref" if "ref" in model.peft_config' in source_of(trainer._generate_and_score_completions)


@BOTH
def test_trls_rollout_asks_and_logs_by_the_names_that_rounds_answer_for(trainer: Any, contract: Contract) -> None:
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
    assert "zip(self.reward_funcs, " in re.sub(r"\s+", " ", source_of(trainer._calculate_rewards))
    assert "self._pending_extra_logs[column]" in source_of(trainer._log_completion_extra)
    assert parameters_of(trainer._get_collator_with_removed_columns) == ("self", "data_collator", "description")


def test_batches_can_be_read_ahead() -> None:
    source = source_of(transformers.Trainer._run_epoch)
    assert "self.get_batch_samples(epoch_iterator, num_batches, " in source
    assert "self.training_step(model, inputs, num_items_in_batch)" in source
    assert "self.callback_handler.train_dataloader = train_dataloader" in source_of(
        transformers.Trainer._prepare_for_training
    )


def test_trl_asks_a_server_once_for_a_rollout() -> None:
    """Generation ahead records this call, and stops TRL before the other one."""
    (call,) = (
        call for call in calls_in(VLLMGeneration.generate) if ast.unparse(call.func) == "self.vllm_client.generate"
    )
    assert not call.args and [keyword.arg for keyword in call.keywords] == ["prompts", "features", None]
    first = "self._generate_single_turn( prompt_ids, images, multimodal_fields, num_generations )"
    assert first in re.sub(r"\s+", " ", source_of(trl.GRPOTrainer._generate))


def test_trl_gives_a_model_and_takes_from_it_what_we_know_how_to_do_without_padding() -> None:
    """The scoring method uses the model in one call. RLOO's method has the same code."""
    source = source_of(trl.GRPOTrainer._get_per_token_logps_and_entropies)
    assert source == source_of(trl.RLOOTrainer._get_per_token_logps_and_entropies)
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    assert [name.id for name in names].count("model") == 1
    (call,) = (
        call
        for call in calls_in(trl.GRPOTrainer._get_per_token_logps_and_entropies)
        if ast.unparse(call.func) == "model"
    )
    assert not call.args
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert [ast.unparse(keyword.value) for keyword in call.keywords if not keyword.arg] == ["model_inputs"]
    given |= set(re.findall(r'model_inputs\["(\w+)"\] =', source))
    (literal,) = re.findall(r"model_inputs = \{(.*)\}", source)
    given |= set(re.findall(r'"(\w+)":', literal))
    taken = set(re.findall(r"outputs\.(\w+)", source))
    assert given | taken == SCORING


def test_our_trainers_have_trls_constructors_and_our_configs_trls_options() -> None:
    for name in ("GRPO", "RLOO"):
        ours, theirs = (getattr(package, f"{name}Trainer") for package in (trl_steady, trl))
        assert inspect.signature(ours) == inspect.signature(theirs) and issubclass(ours, theirs)
        assert issubclass(getattr(trl_steady, f"{name}Config"), getattr(trl, f"{name}Config"))
    ours, theirs = ({option.name for option in fields(config)} for config in (trl_steady.RLOOConfig, trl.RLOOConfig))
    assert ours - theirs == {option.name for option in fields(SharedOptions)}
