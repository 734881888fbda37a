"""Tiny models and a tokenizer built in memory: no network, no GPU, bit-reproducible."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import importlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import Tensor

from tests.tools import tiny
from tests.tools import wide as wide_model
from tests.tools.batches import HIGH, LOW, Batch, Evaluate, Outcome
from tests.tools.headroom import Headroom

torch.set_num_threads(1)

collect_ignore = ["project/dist.py"]  # a script, which the doctest collector would import


QUICK_CASES = 8  # of each test in a quick run
RECIPES_FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = [f"{path.parent.name}.{path.stem}" for path in sorted(RECIPES_FOLDER.glob("*/[a-z]*.py"))]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test-portable` and `make test-quick`."""
    parser.addoption("--headroom", type=float, help="the factor that each comparison keeps from its bound")
    parser.addoption("--quick", action="store_true", help="run only tests that build no trainer")


def pytest_configure(config: pytest.Config) -> None:
    """Do what the options ask for."""
    if config.option.headroom is not None:
        config.pluginmanager.register(Headroom(config.option.headroom))
    if config.option.quick:
        transformers.Trainer.__init__ = skip_trainer


def skip_trainer(*_: Any, **__: Any) -> None:
    """Stand in place of the constructor of all trainers in a quick run."""
    pytest.skip("builds a trainer")


def is_quick(item: pytest.Item) -> bool:
    """Return False for tests that have a mark or need a saved model. `skip_trainer` finds those that build one."""
    fixtures = {*getattr(item, "fixturenames", ())}
    marks = {mark.name for mark in item.iter_markers()}
    return not (fixtures & {"models", "wide", "recipes"} or marks & {"slow", "gpu", "vllm"})


def mark_slow_rows(items: list[pytest.Item]) -> None:
    """Mark as slow all rows of a test but as many as `fast_rows` says, evenly spread from the first one on."""
    rows: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast_rows") and not item.get_closest_marker("slow"):
            rows[item.nodeid.partition("[")[0]].append(item)
    for of_test in rows.values():
        mark = of_test[0].get_closest_marker("fast_rows")
        assert mark is not None
        step = math.ceil(len(of_test) / mark.args[0])
        for row, item in enumerate(of_test):
            if row % step:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before pytest reads `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark rows as slow. In a quick run, leave out what is not quick, and all but the first cases of a test."""
    mark_slow_rows(items)
    if not config.option.quick:
        return
    quick: list[pytest.Item] = []
    cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if is_quick(item) and cases[name] < QUICK_CASES:
            quick.append(item)
            cases[name] += 1
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = quick


def pytest_collection_finish() -> None:
    """accelerate collects garbage with every trainer: not among what has been imported by now."""
    gc.freeze()


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Each test leaves one thread, no process group and float32, so that later tests round as those that run alone."""
    yield
    left = torch.get_num_threads(), torch.distributed.is_initialized(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    assert left == (1, False, torch.float32), f"threads, process group, default type: {left}"


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what transformers does in float32 whatever the model's type: norms, rotary angles and "eager" softmaxes."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny dense and a tiny mixture-of-experts model, each with the tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.save_model(name, root / name) for name in tiny.CONFIGS}


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model wide enough for bitsandbytes."""
    return wide_model.save_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture
def evaluate(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Loss, gradient and metrics of a batch whose log-probs we choose, through the trainer's own `compute_loss`."""

    def evaluate(
        batch: Batch,
        *,
        ours: bool = True,
        entropies: Tensor | None = None,
        inputs: dict[str, Any] | None = None,
        training: bool = True,
        **options: Any,
    ) -> Outcome:
        options = {"epsilon": LOW, "epsilon_high": HIGH, "beta": 0.0, **options}
        # TRL reads the accumulation window from the training loop, which does not run here
        attributes = {"current_gradient_accumulation_steps": 1, **options.pop("attributes", {})}
        trainer = tiny.trainer(models["dense"], tmp_path, ours=ours, **options)
        trainer.model.train(training)
        vars(trainer).update(attributes)
        logps = batch.logps.clone().requires_grad_()
        scores = (logps, torch.ones_like(logps) if entropies is None else entropies, None)
        monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: scores)
        loss = trainer.compute_loss(trainer.model, batch.inputs(**(inputs or {})))
        loss.backward()
        assert logps.grad is not None
        if ours:
            trainer.metrics.settle()
        metrics = {k: v[-1] for k, v in trainer._metrics["train" if training else "eval"].items()}
        logs: dict[str, float] = {}
        trainer.log(logs)
        return Outcome(loss.detach(), logps.grad, {**logs, **metrics})

    return evaluate


class Recipes:
    """Imports a module when a test first asks for it."""

    def __getattr__(self, name: str) -> Any:
        for module in reversed(RECIPES):  # of two files of one name, the last
            if module.removesuffix(".train").split(".")[-1] == name:
                return importlib.import_module(module)
        raise AttributeError(name)


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of recipes/ by their own names, and the scripts by those of their folders."""
    pytest.importorskip("matplotlib", reason="needs the recipes extra")
    monkeypatch.syspath_prepend(str(RECIPES_FOLDER))
    yield Recipes()
    for module in RECIPES:
        sys.modules.pop(module, None)
        sys.modules.pop(module.partition(".")[0], None)
