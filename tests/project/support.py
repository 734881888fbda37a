"""The list of features and setups in docs/several-processes.md, made of the marks of the tests that show them.

`@pytest.mark.supports(*features, on=SETUP)` says that a test shows features in a setup, or in several. With
`only="CPU"`, these are whole runs on CPU, where accelerate does not offer the setup. With `only="pieces"` or
`only="stand-in"`, there is no whole run, or none with the real engine. `@pytest.mark.refuses(*features, on=SETUP)`
says that a test sees them refused; with `where` not all of it, but what `where` says. Tests are read, not imported,
since some need vLLM. A test that `.ci/run` does not run backs no sign.

Usage: python -m tests.project.support [--write]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/several-processes.md"
BEGIN, END = "<!-- made by `python -m tests.project.support --write` -->\n", "\n<!-- end of what is made -->"

SETUPS = ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "vLLM colocate", "vLLM server")
FEATURES = {
    "gspo": '`loss_type="gspo"`',
    "gspo_token": '`loss_type="gspo_token"`',
    "gmpo": '`loss_type="gmpo"`',
    "dppo": '`loss_type="dppo"`',
    "sampler_penalty": "`sampler_penalty`",
    "KL corrections": "`kl_estimator`, `kl_ratio_denominator`",
    "masks": "`off_policy_mask_threshold`, `geometric_mask_range`, `token_veto_threshold`",
    "step rewards": "`StepRewards`",
    "group rewards": "`GroupReward`",
    "teacher": "`teacher`",
    "moving reference, full": "`sync_ref_model` (full)",
    "moving reference, LoRA": "`sync_ref_model` (LoRA)",
    "moving reference, quantised base": "`sync_ref_model` (QLoRA)",
    "ref_model_sync_kl": "`ref_model_sync_kl`",
    "ref_model_sync_reset_optimizer": "`ref_model_sync_reset_optimizer`",
    "quantised base": "QLoRA",
    "adapter_dtype": '`adapter_dtype="float32"`',
    "vllm_adapter_sync": "`vllm_adapter_sync`",
    "vllm_request_seeds": "`vllm_request_seeds`",
    "router_replay R2": '`router_replay="R2"`',
    "router_replay R3": '`router_replay="R3"`',
    "keep_sampling_mask": "`keep_sampling_mask`",
    "dynamic_sampling": "`dynamic_sampling`",
    "async_generate": "`async_generate`",
    "trim_padding": "`trim_padding`",
    "token_budget": "`token_budget`",
    "share_prompts": "`share_prompts`",
    "skip_zero_weight": "`skip_zero_weight`",
    "skip_nonfinite_steps": "`skip_nonfinite_steps`",
    "RLOO": "`RLOOTrainer`",
    "PPO, full": "`PPOTrainer` (full)",
    "PPO, LoRA": "`PPOTrainer` (LoRA)",
    "PPO, quantised base": "`PPOTrainer` (QLoRA)",
    "ptx_coef": "`ptx_coef`",
    "reward model, full": "retrained `RewardAdapter` (full)",
    "reward model, LoRA": "retrained `RewardAdapter` (LoRA)",
    "exact resume": "a resume inside a generation window",
}
SIGNS = {None: "tested", "CPU": "tested with gloo"}
"""Signs for whole runs, by `only`."""
NOTES = {None: "tested", "CPU": "tested, on CPU", "pieces": "pieces", "stand-in": "stand-in"}
REFUSED, NOT_RUN = "✗ refused", "not yet run"


class Mark(NamedTuple):
    """What one mark says of one test."""

    test: str
    kind: str
    features: tuple[str, ...]
    setups: tuple[str, ...]
    is_run: bool
    """Whether `.ci/run` runs the test, which it does unless the test needs CUDA."""
    only: str | None = None
    where: str = ""

    @property
    def note(self) -> str:
        """The words for a cell that has no sign of this mark."""
        if self.kind == "refuses":
            return f"refused {self.where}".strip()
        return NOTES[self.only] if self.is_run else "a test for CUDA is written"


def collect() -> list[Mark]:
    """Return the marks of all tests, in the order of their files."""
    return [mark for path in sorted((ROOT / "tests").rglob("test_*.py")) for mark in read(path)]


def read(path: Path) -> Iterator[Mark]:
    """Yield the marks of a file, whose tests are not skipped, except without CUDA."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        test = f"{path.relative_to(ROOT)}::{node.name}"
        texts = [ast.unparse(decorator) for decorator in node.decorator_list]
        for decorator in node.decorator_list:
            kind = ast.unparse(decorator).partition("(")[0].removeprefix("pytest.mark.")
            if kind not in ("supports", "refuses") or not isinstance(decorator, ast.Call):
                continue
            options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords}
            setups = options.pop("on")
            setups = (setups,) if isinstance(setups, str) else tuple(setups)
            features = tuple(ast.literal_eval(each) for each in decorator.args)
            assert features and {*features} <= FEATURES.keys() and {*setups} <= {*SETUPS}, f"{test}: an unknown name"
            assert not any(re.match(r"pytest\.mark\.(skip\b|xfail)", text) for text in texts), f"{test} is not run"
            is_run = not any("not torch.cuda.is_available()" in text for text in texts)
            yield Mark(test, kind, features, setups, is_run, **options)


def cell(marks: list[Mark], feature: str, setup: str) -> str:
    """Return what the list says of a feature in a setup."""
    found = [mark for mark in marks if feature in mark.features and setup in mark.setups]
    shown = [mark for mark in found if mark.kind == "supports"]
    refusals = [mark for mark in found if mark.kind == "refuses" and mark.is_run]
    if any(not mark.where for mark in refusals):
        assert not shown, f"{feature} on {setup} is shown and refused"
        return REFUSED
    in_part = dict.fromkeys(mark.note for mark in refusals)
    run = {mark.only for mark in shown if mark.is_run}
    signs = [sign for only, sign in SIGNS.items() if only in run]
    notes = [] if signs else dict.fromkeys(mark.note for mark in shown)
    return "; ".join([*(signs[:1] or [NOT_RUN]), *notes, *in_part])


def listing(marks: list[Mark]) -> str:
    """Return the cells as a list in Markdown: all features, then for each setup the features by cell.

    The cell that most features of a setup share comes first, without their names.
    """
    lines = [f"Features: {'; '.join(FEATURES.values())}.", ""]
    for setup in SETUPS:
        groups: dict[str, list[str]] = {}
        for feature, label in FEATURES.items():
            groups.setdefault(cell(marks, feature, setup), []).append(label)
        most = max(groups, key=lambda each: len(groups[each]))
        del groups[most]
        lines.append(f"- **{setup}**: **{most}**, except")
        lines += [f"    - **{each}**: {'; '.join(labels)}" for each, labels in groups.items()]
    return "\n".join(lines)


def behind(marks: list[Mark]) -> str:
    """Return the tests behind the cells, a line for each mark."""
    return "\n".join(
        f"{mark.test}: {mark.note} on {', '.join(mark.setups)}: {'; '.join(mark.features)}" for mark in marks
    )


def written(page: str, marks: list[Mark]) -> str:
    """Return the page with the list of these marks."""
    return re.sub(
        f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: f"\n{listing(marks)}\n", page, flags=re.S
    )


if __name__ == "__main__":
    collected = collect()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(), collected))
    else:
        sys.stdout.write(f"{listing(collected)}\n\n{behind(collected)}\n")
