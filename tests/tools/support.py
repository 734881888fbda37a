"""The table of features and setups in docs/several-processes.md, made of the marks of the tests that show them.

`@pytest.mark.supports(*features, on=SETUP)` says that a test shows features in a setup, or in several. With
`only="CPU"`, these are whole runs on CPU, where accelerate does not offer the setup. With `only="pieces"` or
`only="stand-in"`, there is no whole run, or none with the real engine. `@pytest.mark.refuses(*features,
on=SETUP, message=...)` says that a test sees them refused; with `where` not all of it, but what `where` says. Tests
are read, not imported. One that `.ci/run` does not run backs no "tested".

Usage: python -m tests.tools.support [--write]
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/several-processes.md"
BEGIN, END = "<!-- made by `python -m tests.tools.support --write` -->\n", "\n<!-- end of what is made -->"

SETUPS = ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "vLLM colocate", "vLLM server")
FEATURES = {
    "gspo": '`loss_type="gspo"`',
    "gspo_token": '`loss_type="gspo_token"`',
    "gmpo": '`loss_type="gmpo"`',
    "KL corrections": "`kl_estimator`, `kl_ratio_denominator`",
    "masks": "`off_policy_mask_threshold`, `geometric_mask_range`, `token_veto_threshold`",
    "step rewards": "`StepRewards`",
    "moving reference, full": "`sync_ref_model`, full fine-tuning",
    "moving reference, LoRA": "`sync_ref_model`, LoRA",
    "moving reference, quantised base": "`sync_ref_model`, LoRA (NF4 base)",
    "ref_model_sync_kl": "`ref_model_sync_kl`",
    "ref_model_sync_reset_optimizer": "`ref_model_sync_reset_optimizer`",
    "quantised base": "LoRA (NF4 base)",
    "adapter_dtype": '`adapter_dtype="float32"`',
    "vllm_adapter_sync": "`vllm_adapter_sync`",
    "router_replay R2": '`router_replay="R2"`',
    "router_replay R3": '`router_replay="R3"`',
    "keep_sampling_mask": "`keep_sampling_mask`",
    "trim_padding": "`trim_padding`",
    "token_budget": "`token_budget`",
    "share_prompts": "`share_prompts`",
    "RLOO": "`RLOOTrainer`",
    "PPO, full": "`PPOTrainer`, full fine-tuning",
    "PPO, LoRA": "`PPOTrainer`, LoRA",
    "PPO, quantised base": "`PPOTrainer`, LoRA (NF4 base)",
    "ptx_coef": "`ptx_coef`",
    "reward model, full": "`RewardAdapter`, retrained, full fine-tuning",
    "reward model, LoRA": "`RewardAdapter`, retrained, LoRA",
    "exact resume": "a resume inside a generation window",
}
SHOWN = {None: "tested", "CPU": "tested, on CPU", "pieces": "pieces", "stand-in": "stand-in"}
"""By `only`."""
SIGNS = {None: "✓", "CPU": "(✓)"}
"""Signs for whole runs, by `only`."""
REFUSED, NOT_RUN = "✗", "?"
CUDA = "on CUDA"
APART = ("sharded", "distributed")
"""The folders with a target of their own, such as `make test-sharded`. `make test` does not run them."""


@dataclass(frozen=True)
class Mark:
    """What one mark says of one test."""

    test: str
    """Its file and its name."""
    kind: str
    """`supports` or `refuses`."""
    features: tuple[str, ...]
    setups: tuple[str, ...]
    only: str | None = None
    message: str = ""
    where: str = ""
    needs: tuple[str, ...] = ()
    """What keeps `.ci/run` from running it."""

    @property
    def is_run(self) -> bool:
        return not self.needs

    @property
    def note(self) -> str:
        """In a cell that is not "tested"."""
        if self.kind == "refuses":
            return f"refused {self.where}".strip()
        if CUDA in self.needs:
            return "a test for CUDA is written"
        return " ".join([SHOWN[self.only], *self.needs])


class Wrong(ValueError):
    """A mark that cannot be."""


def collect(folder: Path = ROOT / "tests") -> list[Mark]:
    """The marks of all tests, in the order of their files."""
    skipping = {name for path in folder.rglob("*.py") for name in _skipping_fixtures(ast.parse(path.read_text()))}
    return [mark for path in sorted(folder.rglob("test_*.py")) for mark in read(path, skipping)]


def read(path: Path, skipping: Iterable[str] = ()) -> Iterator[Mark]:
    """The marks of a file.

    Raises:
        Wrong: a mark that names what there is not, or sits where it cannot be told whether `.ci/run` runs it.
    """
    module = ast.parse(path.read_text())
    of_all = [mark for node in module.body if _assigns(node, "pytestmark") for mark in _listed(node.value)]
    for node in module.body:
        marks = getattr(node, "decorator_list", [])
        own = [mark for mark in marks if _name(mark) in ("pytest.mark.supports", "pytest.mark.refuses")]
        if not own:
            continue
        assert isinstance(node, ast.FunctionDef)
        relative = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        test = f"{relative.as_posix()}::{node.name}"
        caught = {argument.arg for argument in node.args.args} & set(skipping)
        if caught:
            raise Wrong(f"{test}: {caught.pop()} may skip it")
        needs = tuple(dict.fromkeys(_needs([*of_all, *marks, *_skips(node)], path, test)))
        for mark in own:
            made = _made(mark, test, needs)
            if made.kind == "refuses":
                _check_message(made, node, module)
            yield made


def _made(mark: ast.expr, test: str, needs: tuple[str, ...]) -> Mark:
    assert isinstance(mark, ast.Call)
    said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
    setups = said.pop("on", ())
    setups = (setups,) if isinstance(setups, str) else tuple(setups)
    features = tuple(ast.literal_eval(each) for each in mark.args)
    made = Mark(test, _name(mark).rsplit(".")[-1], features, setups, needs=needs, **said)  # type: ignore[arg-type]
    for known, named in ((FEATURES, features), (SETUPS, setups)):
        unknown = [each for each in named if each not in known]
        if unknown or not named:
            raise Wrong(f"{test}: a mark names {unknown or 'nothing'}, and there are {', '.join(known)}")
    if made.only not in SHOWN or (made.kind == "refuses") != bool(made.message):
        raise Wrong(f"{test}: only={made.only!r}, message={made.message!r}")
    return made


def _needs(marks: list[ast.expr], path: Path, test: str) -> Iterator[str]:
    """What a test needs that `.ci/run` does not have."""
    if path.parent.name in APART and f"test-{path.parent.name}" not in suites():
        yield f"by `make test-{path.parent.name}`"
    for mark in marks:
        name = _name(mark)
        if name in ("pytest.mark.skip", "pytest.mark.xfail", "pytest.skip", "pytest.xfail"):
            raise Wrong(f"{test} is skipped or expected to fail")
        if name == "pytest.mark.slow" and "slow" in left_out():
            yield "by `make test-slow`"
        elif name == "pytest.mark.gpu" and "gpu" in left_out():
            yield CUDA
        elif name in ("pytest.mark.skipif", "pytest.importorskip"):
            assert isinstance(mark, ast.Call)
            condition = ast.unparse(mark.args[0])
            package = re.fullmatch(r"importlib\.util\.find_spec\('(\w+)'\) is None|'(\w+)'", condition)
            if package:
                needed = package[1] or package[2]
                if needed not in installed(path.parent.name):
                    yield f"where {needed} is installed"
            elif condition == "not torch.cuda.is_available()":
                yield CUDA
            elif condition != "torch.cuda.is_available()":  # which CI has not
                raise Wrong(f"{test}: whether .ci/run skips it, `{condition}` does not tell")


def suites() -> set[str]:
    """The targets that `.ci/run` makes."""
    return set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci/run").read_text(), re.M))


def left_out() -> set[str]:
    """The marks whose tests `make test` does not run."""
    return set(re.findall(r"not (\w+)", _rule("test")))


def installed(folder: str) -> set[str]:
    """Distributions that `.ci/run` runs the tests of a folder with, in one of its suites."""
    if folder == "vllm":
        named = (ROOT / "tests/vllm/no-deps.txt").read_text() + (ROOT / "tests/vllm/requirements.txt").read_text()
        names = set(re.findall(r"^[\w-]+", named, re.M)) if "test-vllm" in suites() else set()
        return names | {name.removesuffix("-cpu") for name in names}
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\w+", re.findall(r'-e "\.\[(.*?)\]"', _rule("$(VENV)/.test"))[0])
    named = project["dependencies"] + [each for extra in extras for each in project["optional-dependencies"][extra]]
    if folder in APART and f"test-{folder}" in suites():
        named += re.findall(r"--upgrade (.*)$", _rule("$(DEEPSPEED)/.test"), re.M)[0].split()
    return {re.findall(r"^[\w-]+", each)[0] for each in named}


def _rule(target: str) -> str:
    return re.findall(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[0]


def _check_message(mark: Mark, node: ast.FunctionDef, module: ast.Module) -> None:
    """It is what some error of the package says, and what the test expects.

    Raises:
        Wrong: it is not.
    """
    if not any(_fits(template, mark.message) for template in templates()):
        raise Wrong(f"{mark.test}: no error of the package says {mark.message!r}")
    patterns = [pattern for call in ast.walk(node) for pattern in _patterns(call, node, module)]
    if not any(re.search(pattern, mark.message) for pattern in patterns):
        raise Wrong(f"{mark.test} expects {patterns}, and none of them is in {mark.message!r}")


def _fits(template: list[str], message: str) -> bool:
    """A template of an error, by its parts that are always there; of them is a quarter of the message, or more."""
    pattern = ".*".join(map(re.escape, template))
    return 4 * sum(map(len, template)) > len(message) and re.fullmatch(pattern, message, re.S) is not None


def templates() -> list[list[str]]:
    """The errors that the package raises."""
    raised = (
        node.exc.args[0]
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    )
    return [parts for parts in map(_parts, raised) if parts]


def _parts(value: ast.expr) -> list[str]:
    """A string, or an f-string without what is filled in."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    if not isinstance(value, ast.JoinedStr):
        return []
    parts = [""]
    for each in value.values:
        if isinstance(each, ast.Constant):
            parts[-1] += each.value
        else:
            parts.append("")
    return parts


def _patterns(call: ast.AST, node: ast.FunctionDef, module: ast.Module) -> Iterator[str]:
    """What a call of `pytest.raises` matches; a name is looked up in the test, and in what it is given."""
    if not (isinstance(call, ast.Call) and _name(call) == "pytest.raises"):
        return
    for value in (keyword.value for keyword in call.keywords if keyword.arg == "match"):
        if isinstance(value, ast.Name):
            assigned = [each.value for each in ast.walk(node) if _assigns(each, value.id)]
            given = [each for mark in node.decorator_list if _name(mark).endswith("parametrize") for each in [mark]]
            found = [*assigned, *(each for mark in given for each in ast.walk(mark) if isinstance(each, ast.Constant))]
        else:
            found = [value]
        for each in found:
            parts = _parts(each)  # type: ignore[arg-type]
            if parts:
                yield ".*".join(parts)


def _skips(node: ast.FunctionDef) -> list[ast.expr]:
    """Calls that skip the test while it runs."""
    skips = ("pytest.skip", "pytest.xfail", "pytest.importorskip")
    return [call for call in ast.walk(node) if isinstance(call, ast.Call) and _name(call) in skips]


def _skipping_fixtures(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any("fixture" in _name(mark) for mark in node.decorator_list):
            yield from [node.name] if _skips(node) else []


def _assigns(node: Any, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)


def _listed(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.List) else [value]


def _name(node: ast.AST) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def cell(marks: list[Mark], feature: str, setup: str) -> str:
    """What the table says of a feature in a setup.

    Raises:
        Wrong: it is tested, and refused.
    """
    own = [mark for mark in marks if feature in mark.features and setup in mark.setups]
    refusals = [mark for mark in own if mark.kind == "refuses" and mark.is_run]
    tested = {mark.only for mark in own if mark.kind == "supports" and mark.is_run}
    in_part = list(dict.fromkeys(mark.note for mark in refusals if mark.where))
    if any(not mark.where for mark in refusals):
        if any(mark.kind == "supports" for mark in own):
            raise Wrong(f"{feature} on {setup} is shown and refused")
        return REFUSED
    for only, sign in SIGNS.items():
        if only in tested:
            return "; ".join([sign, *in_part])
    shown = [mark for mark in own if mark.kind == "supports"]
    notes = dict.fromkeys(mark.note for mark in sorted(shown, key=lambda mark: len(mark.needs)))
    return "; ".join([NOT_RUN, *notes, *in_part])


def table(marks: list[Mark]) -> str:
    """Markdown: the cells, and what is refused."""
    lines = [f"| | {' | '.join(SETUPS)} |", f"|---{'|---' * len(SETUPS)}|"]
    for feature, label in FEATURES.items():
        lines.append(f"| {label} | {' | '.join(cell(marks, feature, setup) for setup in SETUPS)} |")
    lines += ["", "### Refusal messages", "", "| feature | setup | message |", "|---|---|---|"]
    for mark in marks:
        if mark.kind == "refuses" and mark.is_run:
            on = " ".join([", ".join(mark.setups), mark.where]).strip()
            lines.append(f"| {_labels(mark.features)} | {on} | {' '.join(mark.message.split())} |")
    return "\n".join(lines)


def behind(marks: list[Mark]) -> str:
    """Markdown: the tests behind the cells."""
    lines = ["| test | result | setup | features |", "|---|---|---|---|"]
    shown: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for mark in marks:
        shown.setdefault((mark.test, mark.note, mark.setups), []).extend(mark.features)
    for (test, note, setups), features in shown.items():
        file, name = test.split("::")
        lines.append(f"| `{file}`: `{name}` | {note} | {', '.join(setups)} | {_labels(features)} |")
    return "\n".join(lines)


def _labels(features: Iterable[str]) -> str:
    return "; ".join(FEATURES[feature] for feature in features)


def written(page: str, marks: list[Mark]) -> str:
    """The page with the table as it is now."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(marks)}\n{END}{after}"


if __name__ == "__main__":
    collected = collect()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(), collected))
    else:
        sys.stdout.write(f"{table(collected)}\n\n{behind(collected)}\n")
