"""Compare what TRL's `_compute_loss` reads with `CONTRACT`: when TRL moves, name what moved."""

import ast
import inspect
import operator
import pkgutil
import re
import textwrap
from dataclasses import fields

import pytest
import trl
from trl.cli.commands.training import TrainingCommand
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils as trl_utils

from tests.host.contract import CONTRACT
from tests.tools.losses import NATIVE_LOSS_TYPES
from trl_steady.host.fused_head import Head

SOURCE = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._compute_loss))


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


def moved(source: str) -> list[str]:
    """One line for each name that TRL reads and the contract lacks, or the other way round."""
    lines: list[str] = []
    for kind, names in reads(source).items():
        listed = set(getattr(CONTRACT, kind))
        lines += [f"TRL reads {kind[:-1]} {name!r}, which CONTRACT lacks" for name in sorted(names - listed)]
        lines += [f"CONTRACT lists {kind[:-1]} {name!r}, which TRL no longer reads" for name in listed - names]
    return lines


def test_trls_loss_reads_what_the_contract_lists() -> None:
    assert moved(SOURCE) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("self.beta != 0.0", "self.gamma != 0.0 and self.beta != 0.0", "TRL reads attribute 'gamma'"),
        ("self.args.delta is not None", "self.args.delta_low is not None", "TRL reads argument 'delta_low'"),
        ("self.args.delta", "self.args.two_sided", "CONTRACT lists argument 'delta', which TRL no longer reads"),
        ('inputs["ref_per_token_logps"]', 'inputs["anchor"]', "TRL reads input 'anchor'"),
        ('inputs.get("old_per_token_logps")', 'inputs.get("old")', "TRL reads input 'old'"),
        ('"tool_mask" not in inputs', '"env_mask" not in inputs', "TRL reads input 'env_mask'"),
    ],
)
def test_a_doctored_trl_is_named(old: str, new: str, line: str) -> None:
    assert old in SOURCE
    assert any(line in found for found in moved(SOURCE.replace(old, new)))


@pytest.mark.parametrize(
    ("line", "whole"),
    [("x = getattr(self, 'gamma')", "self"), ("args = self.args", "self.args"), ("x = {**inputs}", "inputs")],
)
def test_a_doctored_trl_cannot_hide_a_name(line: str, whole: str) -> None:
    with pytest.raises(AssertionError, match=f"^{whole} is handed on whole"):
        reads(SOURCE + f"    {line}\n")


def test_every_entry_says_how_it_is_dealt_with() -> None:
    ways = ("honoured", "refused", "rewritten", "wrapped", "not reached")
    for kind in ("attributes", "arguments", "inputs"):
        for name, how in getattr(CONTRACT, kind).items():
            assert how.startswith(ways), f"{kind} {name}: {how}"


@pytest.mark.parametrize("method", CONTRACT.parameters)
def test_the_methods_we_wrap_have_the_parameters_we_know(method: str) -> None:
    found = tuple(inspect.signature(inspect.unwrap(getattr(trl.GRPOTrainer, method))).parameters)
    assert found == CONTRACT.parameters[method]


@pytest.mark.parametrize("method", CONTRACT.engine)
def test_the_methods_of_the_engine_that_we_wrap_have_the_parameters_we_know(method: str) -> None:
    kind, _, name = method.partition(".")
    module = vllm_generation if kind == "VLLMGeneration" else vllm_client
    found = tuple(inspect.signature(getattr(getattr(module, kind), name)).parameters)
    assert found == CONTRACT.engine[method]


def test_the_engine_is_built_from_names_that_we_replace() -> None:
    """`VLLMGeneration` of the trainer's module, `LLM` of the engine's."""
    for source, name in ((trl.GRPOTrainer.__init__, "VLLMGeneration"), (VLLMGeneration._init_vllm, "LLM")):
        calls = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(source)))))
        assert any(isinstance(node, ast.Call) and ast.unparse(node.func) == name for node in calls), name
    assert inspect.getmodule(trl.GRPOTrainer).VLLMGeneration is VLLMGeneration  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CONTRACT.head)
def test_the_functions_of_the_head_have_the_parameters_we_know(name: str) -> None:
    found = tuple(inspect.signature(operator.attrgetter(name)(trl_utils)).parameters)
    assert found == CONTRACT.head[name]


def test_the_fused_head_asks_once_by_the_name_that_we_answer_for() -> None:
    """And in the order of `Head`'s fields."""
    tree = ast.walk(ast.parse(inspect.getsource(trl_utils.add_fused_lm_head)))
    calls = [node for node in tree if isinstance(node, ast.Call)]
    asked = [call for call in calls if ast.unparse(call.func) == "_ChunkedLogProbFunction.apply"]
    assert len(asked) == 1 and len(asked[0].args) == len(fields(Head)) and not asked[0].keywords
    assert any(ast.unparse(call) == "maybe_gather_lm_head_ctx(weight, bias)" for call in calls)


@pytest.mark.parametrize("name", CONTRACT.command)
def test_the_functions_of_the_command_line_have_the_parameters_we_know(name: str) -> None:
    assert tuple(inspect.signature(pkgutil.resolve_name(name)).parameters) == CONTRACT.command[name]


def test_trls_command_parses_and_launches_by_the_names_that_we_answer_for() -> None:
    source = inspect.getsource(TrainingCommand.run)
    assert "from ..accelerate_launcher import launch_training_script" in source
    calls = [node for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Call)]
    (launch,) = (call for call in calls if ast.unparse(call.func) == "launch_training_script")
    assert [keyword.arg for keyword in launch.keywords] == ["script_name", "launch_args", "training_script_args"]
    assert [ast.unparse(call) for call in calls if ast.unparse(call.func) == "module.make_parser"] == [
        "module.make_parser(prog=f'trl {self.name}')"
    ]


def test_every_forwarded_input_is_a_parameter_of_trls_scoring_method() -> None:
    forwarded = {name for name, how in CONTRACT.inputs.items() if "forwarded" in how}
    assert forwarded <= set(CONTRACT.parameters["_get_per_token_logps_and_entropies"])


def test_the_loss_types_of_trl_are_those_we_know() -> None:
    """Every constant that TRL compares `self.loss_type` with."""
    known: set[str] = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            known |= {str(c.value) for c in ast.walk(node.comparators[0]) if isinstance(c, ast.Constant)}
    assert known == set(NATIVE_LOSS_TYPES)


def test_our_trainer_has_trls_constructor() -> None:
    import trl_steady

    assert inspect.signature(trl_steady.GRPOTrainer) == inspect.signature(trl.GRPOTrainer)
    assert issubclass(trl_steady.GRPOTrainer, trl.GRPOTrainer) and issubclass(trl_steady.GRPOConfig, trl.GRPOConfig)


def test_trls_buffering_is_what_checkpoints_hold() -> None:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(trl.GRPOTrainer._prepare_inputs)))
    source = re.sub(r"\binputs\b", "batch", source)  # a local name there, not what `reads` looks for
    assert reads(source)["attributes"] == set(CONTRACT.buffering)
    assert reads(source)["arguments"] == {"steps_per_generation"}


def test_trl_reads_the_adapter_named_ref_as_the_reference() -> None:
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        assert '"ref" if "ref" in model.peft_config' in inspect.getsource(trainer._generate_and_score_completions)


def test_trl_pushes_to_vllm_what_one_method_yields() -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    assert list(inspect.signature(VLLMGeneration._iter_named_params).parameters) == ["self"]
    assert "self._iter_named_params()" in inspect.getsource(VLLMGeneration.sync_weights)


def test_trl_gives_a_model_and_takes_from_it_what_we_know_how_to_do_without_padding() -> None:
    """In one call, the only use of the model: what stands in for it has to know no more."""
    source = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._get_per_token_logps_and_entropies))
    tree = ast.parse(textwrap.dedent(source))
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "model")
    assert not call.args and [
        ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "model"
    ] == ["model"]
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert [ast.unparse(keyword.value) for keyword in call.keywords if not keyword.arg] == ["model_inputs"]
    given |= set(re.findall(r'model_inputs\["(\w+)"\] =', source))
    (literal,) = re.findall(r"model_inputs = \{(.*)\}", source)
    given |= set(re.findall(r'"(\w+)":', literal))
    taken = set(re.findall(r"outputs\.(\w+)", source))
    assert given | taken == set(CONTRACT.scoring)
