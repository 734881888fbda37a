"""How often the CPU waits for a GPU in each row of the conformance table: `transfers.py` has the numbers.

The GPU is a pretended one. TRL and transformers wait too, far more often. Their transfers are not counted.
"""

import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from torch import Tensor
from transformers import LogitsProcessorList

from tests.conformance import cases
from tests.conformance.transfers import EACH_RUN, FURTHER, ROWS
from tests.tools import tiny
from tests.tools.cases import cases as parameters
from tests.tools.devices import CUDA, PretendedGPU, nodes_know_their_code, on_gpu, pretended_gpu
from trl_steady import RewardModelRefreshCallback
from trl_steady.features.reward_model import training
from trl_steady.functional import masks
from trl_steady.trl_bridge.callback import FeatureCallback
from trl_steady.trl_bridge.trainer import FeatureTrainerMixin

SIZES: dict[str, dict[str, Any]] = {
    "short": {"max_completion_length": 5},
    "long": {"max_completion_length": 9, "per_device_train_batch_size": 8},
}
NAMES = [*map("/".join, cases.names()), *(f"further/{name}" for name in FURTHER)]
RUNS = [(name, size) for name in NAMES for size in SIZES]
# `make test` runs each feature once: a number that is exact at one size shows a transfer for each sequence too
IN_LOOPS = ("sampling_mask", "dynamic", "step_rewards/process", "reward_model", "report", "R3 with", "skip_zero")
FIRST = {name.split("/")[0]: name for name in reversed(NAMES)} | {"policy_loss": "policy_loss/gmpo"}
QUICK = [
    (name, size)
    for name, size in RUNS
    if name in FIRST.values() and size == ("long" if any(each in name for each in IN_LOOPS) else "short")
]
PHASES = {
    "begin": (FeatureCallback, "on_train_begin"),
    "rollout": (FeatureTrainerMixin, "_generate_and_score_completions"),
    "forward": (FeatureTrainerMixin, "compute_loss"),
    "backward": (Accelerator, "backward"),
    "log": (FeatureTrainerMixin, "log"),
    "refresh": (RewardModelRefreshCallback, "refresh"),
    "end": (FeatureCallback, "on_train_end"),
}
UNITS: dict[str, tuple[Any, str]] = {
    "token": (LogitsProcessorList, "__call__"),
    "round": (trl.GRPOTrainer, "_generate"),
    "batch": (training, "_losses"),
}


class Run:
    """One run of a phase."""

    def __init__(self, **units: int) -> None:
        self.places, self.units = Counter[str](), Counter(run=1, **units)


class Watch:
    """The runs of each phase, with the places that wait and the units that each run had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: PretendedGPU | None = None
        self._seen, self._run = 0, Run()
        self.runs = defaultdict[str, list[Run]](list, {"step": [self._run]})
        for phase, (owner, name) in PHASES.items():
            monkeypatch.setattr(owner, name, self._watched(phase, getattr(owner, name)))
        for unit, (owner, name) in UNITS.items():
            monkeypatch.setattr(owner, name, self._counted(unit, getattr(owner, name)))

    def _watched(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            before = self.add_up()
            self._run = Run(first=int(not self.runs[phase]))
            self.runs[phase].append(self._run)
            try:
                return method(*arguments, **keywords)
            finally:
                self.add_up()
                self._run = before

        return call

    def _counted(self, unit: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            is_measured = unit == "batch" and not torch.is_grad_enabled()
            self._run.units[f"measured {unit}" if is_measured else unit] += 1
            return function(*arguments, **keywords)

        return call

    def add_up(self) -> Run:
        """Give the transfers so far to the run of a phase that had them."""
        waits = [] if self.gpu is None else self.gpu.waits
        self._run.places.update(wait.place for wait in waits[self._seen :] if wait.package == "trl_steady")
        self._seen = len(waits)
        return self._run


def trained(monkeypatch: pytest.MonkeyPatch, build: Any, name: str, size: str) -> dict[str, list[Run]]:
    """Train on a pretended GPU, for two rollouts and with two logs."""
    monkeypatch.setitem(cases.CASES, "further", FURTHER)
    feature, case = name.split("/")
    own, watch = cases.options(feature, case), Watch(monkeypatch)
    run = {"steps_per_generation": 2, "num_iterations": 1, "max_steps": 4, "logging_steps": 2, **SIZES[size]}
    run |= {key: own[key] for key in own.keys() & run.keys()}
    if own["model"] == "nf4":  # the kernels of bitsandbytes take no other tensors
        run["model"] = "dense"
    rows = max(own["build"]["train_dataset"], tiny.dataset(32), key=len)  # enough for one answer to each prompt
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = build(feature, case, **run, build={**own["build"], "train_dataset": rows})
    for model in (trainer.model, trainer.ref_model) if own["model"] == "moe" else ():
        if model is not None:  # transformers' other implementation has no kernel for the integers of a CPU
            trainer.accelerator.unwrap_model(model).set_experts_implementation("eager")
    with nodes_know_their_code(), on_gpu(trainer) as watch.gpu:
        trainer.train()
        watch.add_up()
    return watch.runs


def unlike_table(name: str, runs: dict[str, list[Run]]) -> list[str]:
    """A line for each run of a phase whose transfers are not as many as in the table, with the places that wait."""
    row, unlike = ROWS.get(name, {}), list[str]()
    for phase, of_phase in runs.items():
        added = row.get(phase, 0)
        each = {"run": added} if isinstance(added, int) else added
        for run in of_phase:
            allowed = EACH_RUN.get(phase, 0) + sum(number * run.units[unit] for unit, number in each.items())
            if phase == "log":
                allowed += bool(run.places)
            if run.places.total() != allowed:
                unlike.append(f"{phase}: {run.places.total()} transfers, not {allowed}: {dict(run.places)}")
    return unlike


@pytest.mark.fast_rows(1)
@pytest.mark.parametrize(("name", "size"), parameters(RUNS, QUICK))
def test_the_cpu_waits_as_often_as_the_table_says(
    build: Any, name: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = trained(monkeypatch, build, name, size)
    assert runs.keys() >= {"begin", "rollout", "forward", "backward", "step", "end"} | ROWS.get(name, {}).keys()
    unlike = unlike_table(name, runs)
    assert not unlike, "\n".join([name, *unlike])


@pytest.mark.slow
def test_a_number_read_in_a_loop_is_unlike_the_table(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure names the method that reads it."""
    veto = masks.token_veto

    def reading(mismatch: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        assert all(row.sum().item() < 1e9 for row in mismatch)
        return veto(mismatch, *arguments, **keywords)

    monkeypatch.setattr(masks, "token_veto", reading)
    name = "further/a sampler with gmpo"
    unlike = unlike_table(name, trained(monkeypatch, build, name, "short"))
    first, *later = [f"forward: {4 + once} transfers, not {once}: " for once in (1, 0, 0, 0)]  # of 4 sequences
    assert [line.partition("{")[0] for line in unlike] == [first, *later]
    assert all("policy_loss." in line for line in unlike)


def test_the_rows_of_the_table_exist() -> None:
    assert ROWS.keys() <= {*NAMES}


ON_DEVICE = torch.arange(6.0)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: bool(x.any()), id="a branch"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.cpu(), id="to the CPU"),
        pytest.param(lambda x: ON_DEVICE.to(x.device), id="from the CPU"),
        pytest.param(lambda x: torch.tensor([1.0], device=x.device), id="from a list"),
        pytest.param(lambda x: ON_DEVICE.to(x.device, non_blocking=True), id="from unpinned memory"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x[x > 1], id="a mask as index"),
        pytest.param(lambda x: x[[1, 2]], id="a list as index"),
        pytest.param(lambda x: x.where(x > 1, torch.tensor(0.0)), id="a scalar in where"),
        pytest.param(lambda x: x.repeat_interleave(x.long()), id="repeat_interleave"),
        pytest.param(lambda x: x.unique(), id="unique"),
    ],
)
def test_the_pretended_gpu_knows_what_waits(operation: Callable[[Tensor], object]) -> None:
    with pretended_gpu() as gpu:
        on_device = ON_DEVICE.to(CUDA)
        before = len(gpu.waits)
        operation(on_device)
        assert len(gpu.waits) > before


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x: (x * 2 + 1).clamp(min=0) / 3, id="numbers"),
        pytest.param(lambda x: torch.full((2,), 1.0, device=x.device) + torch.arange(2, device=x.device), id="filled"),
        pytest.param(lambda x: x.to(torch.float64), id="another dtype"),
        pytest.param(lambda x: ON_DEVICE.pin_memory().to(x.device, non_blocking=True), id="from pinned memory"),
        pytest.param(lambda x: x[x.long()], id="an index"),
        pytest.param(lambda x: x.where(x > 1, 0), id="a number in where"),
        pytest.param(lambda x: x.repeat_interleave(x.long(), output_size=15), id="repeat_interleave of a known size"),
    ],
)
def test_the_pretended_gpu_knows_what_does_not_wait(operation: Callable[[Tensor], object]) -> None:
    with pretended_gpu() as gpu:
        on_device = ON_DEVICE.to(CUDA)
        before = len(gpu.waits)
        operation(on_device)
        assert len(gpu.waits) == before


def test_a_gradient_that_waits_is_that_of_the_code_it_belongs_to() -> None:
    """No Python function computes it. The indices of the mask are found once more in the backward pass."""
    module: dict[str, Any] = {"__name__": "trl_steady.made_up"}
    exec("def chosen(x):\n    return x[x > 1].sum()", module)
    with pretended_gpu() as gpu, nodes_know_their_code():
        loss = module["chosen"](ON_DEVICE.to(CUDA).requires_grad_())
        before = len(gpu.waits)
        loss.backward()
    found = {(wait.package, wait.place) for wait in gpu.waits[before:]}
    assert found == {("trl_steady", "backward of made_up.chosen")}
