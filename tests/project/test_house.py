"""Rules of the source that a reader relies on. import-linter checks the order of the rooms (`make check`)."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import grimp
from trl.generation import vllm_client, vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer, utils

import trl_steady

SRC = Path(trl_steady.__file__).parent
SOURCES = {path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items() if not name.startswith("trl_bridge/")}
IMPORTS = grimp.build_graph("trl_steady", exclude_type_checking_imports=False, cache_dir=None)
PUBLIC = "trl_steady"  # imports its public names for type checkers only
BELOW = {module: IMPORTS.find_modules_directly_imported_by(module) for module in IMPORTS.modules if module != PUBLIC}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield attributes of anything but `self`, imported names, and strings that are a name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "ctx")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) | ast.alias(name=name):
                yield name
            case _:
                pass


def test_only_the_bridge_names_what_is_private_to_trl() -> None:
    defined: set[str] = set()  # by TRL's classes, on themselves, and by their modules
    for source in (grpo_trainer, rloo_trainer, utils, vllm_generation, vllm_client):
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.FunctionDef(name=name):
                    defined.add(name)
                case ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                    defined.add(name)
                case _:
                    pass
    private = {name for name in defined if name.startswith("_") and not name.startswith("__")}
    assert {"_compute_loss", "_metrics", "_buffered_inputs", "_iter_named_params", "_post"} <= private
    found = {name: private & set(names_in(tree)) for name, tree in TREES.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_only_the_bridge_sets_attributes_of_a_trainer() -> None:
    """By assignment, deletion, `setattr`, `patched` or `vars`. Three files replace attributes of scripts or layers."""
    patching = {"cli/run.py", "features/scalar_head/model.py", "features/router_replay/replay.py"}
    assert {name for name, tree in TREES.items() if "patched" in set(names_in(tree))} == patching
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
                    written = ast.unparse(owner)
                case ast.Call(func=ast.Name(id="setattr" | "delattr" | "patched" | "vars"), args=[owner, *_]):
                    written = ast.unparse(owner)
                case ast.Attribute(value=owner, attr="__dict__" | "__setattr__"):
                    written = ast.unparse(owner)
                case _:
                    written = ""
            assert written.split(".")[-1] != "trainer", name


def test_no_files_import_each_other_in_a_circle() -> None:
    for module in BELOW:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            new = BELOW[ahead.pop()] & BELOW.keys() - found
            found |= new
            ahead += new
        assert module not in found


def test_there_are_at_most_31_arrows_between_rooms() -> None:
    rooms = {module.split(".")[1] for module in BELOW if module.count(".") > 1} | {"losses"}
    pairs = [(module, imported) for module, others in BELOW.items() for imported in others - {PUBLIC}]
    arrows = {tuple(name.split(".")[1] for name in pair) for pair in pairs}
    assert len([arrow for arrow in arrows if len(set(arrow)) == 2 and set(arrow) <= rooms]) <= 31


def test_files_and_text_run_no_code() -> None:
    """As .github/SECURITY.md promises: nothing unpickles, or runs text or the code of a model's repository."""

    def unsafe(source: str) -> list[str]:
        found: list[str] = []
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.alias(name="pickle" | "cloudpickle" | "dill" | "joblib" | "marshal" | "shelve"):
                    found.append(node.name)
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile")):
                    found.append(ast.unparse(node))
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "yaml"), attr="load")):
                    found += [] if "weights_only=True" in ast.unparse(node) else [ast.unparse(node)]
                case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                    found.append(ast.unparse(node))
                case _:
                    pass
        return found

    wrong = ["import pickle", "eval(t)", "torch.load(f)", "yaml.load(f)", "np.load(f, allow_pickle=True)"]
    assert all(map(unsafe, wrong))
    assert {name: unsafe(source) for name, source in SOURCES.items() if unsafe(source)} == {}
