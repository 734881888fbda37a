"""Rules of the source that a reader relies on: who may name what, and how deep a trainer is."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from trl.generation import vllm_client, vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer, utils

import trl_steady

SRC = Path(trl_steady.__file__).parent
HOST = SRC / "host"
FILES = sorted(path for path in SRC.rglob("*.py") if HOST not in path.parents)
TRAINERS = (trl_steady.GRPOTrainer, trl_steady.RLOOTrainer, trl_steady.PPOTrainer)


def private_names() -> set[str]:
    """Return the private names that TRL's classes define or set on themselves, and those of its modules."""
    found: set[str] = set()
    for source in (grpo_trainer, rloo_trainer, utils, vllm_generation, vllm_client):
        tree = ast.parse(inspect.getsource(source))
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                    found.add(name)
                case _:
                    pass
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Attributes of anything but `self`, imported names, and strings that are a name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "ctx")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) | ast.alias(name=name):
                yield name
            case _:
                pass


def test_only_the_host_names_what_is_private_to_trl() -> None:
    theirs = private_names()
    assert {"_compute_loss", "_metrics", "_buffered_inputs", "_iter_named_params", "_post"} <= theirs
    found = {path.relative_to(SRC): theirs & set(names_in(ast.parse(path.read_text()))) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_trainer_is_itself_on_what_all_trainers_share() -> None:
    for trainer in TRAINERS:
        ours = [base.__name__ for base in trainer.__mro__ if base.__module__.startswith("trl_steady")]
        above = ["GRPOTrainer"] if trainer is trl_steady.PPOTrainer else []
        assert ours == [trainer.__name__, *above, "SteadyTrainer", "Steady"]


def test_outside_the_host_nothing_of_the_trainer_is_replaced_for_a_call() -> None:
    """`patched` may replace attributes of a config, a model or its module, not of a trainer."""
    for path in FILES:
        if path.name == "trl_commands.py":  # replaces names of TRL's modules, before there is a trainer
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "patched":
                assert ast.unparse(node.args[0]) in ("args", "layer", "model", "module"), (
                    f"{path}: {ast.unparse(node)}"
                )
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "patch.object"):
                assert "trainer" not in ast.unparse(node.args[0]), f"{path}: {ast.unparse(node)}"


def test_the_way_of_a_micro_batch_is_one_short_file() -> None:
    """From generation to loss, in this order."""
    lines = (HOST / "seam.py").read_text().splitlines()
    assert len(lines) < 300
    steps = ["def rollout", "def generate", "def log_probs", "def compute_loss", "def _compute_loss", "def score"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(f"    {step}(")) for step in steps]
    assert places == sorted(places)
