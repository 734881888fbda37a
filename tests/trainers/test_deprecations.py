"""Warnings that only TRL can mend do not bury a run, and all others stay."""

import warnings
from collections.abc import Callable
from pathlib import Path

from tests.tools import tiny
from trl_steady.trainers import deprecations
from trl_steady.trainers import grpo as trainer


def warned(prepare: Callable[[], None], model: Path, output: Path) -> set[tuple[str, str]]:
    """The modules and messages of a run's FutureWarnings, after `prepare` has set filters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare()
        tiny.train(tiny.trainer(model, output, max_steps=1, steps_per_generation=1))
    future = [each for each in caught if each.category is FutureWarning]
    return {(Path(each.filename).stem, str(each.message)) for each in future}


def test_a_run_shows_no_deprecation_of_trls(models: dict[str, Path], tmp_path: Path) -> None:
    """Each filter is needed: without the filters, its warning appears."""
    shown = warned(lambda: None, models["dense"], tmp_path / "shown")
    assert shown >= {(module.split(".")[-1], message) for module, message in deprecations.TRLS}
    assert trainer.ignore_trls is deprecations.ignore_trls  # called when the module is imported, before this test
    assert warned(deprecations.ignore_trls, models["dense"], tmp_path / "ignored") == set()


def test_other_warnings_of_the_same_modules_stay() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deprecations.ignore_trls()
        for module, message in deprecations.TRLS:
            warnings.warn_explicit(message, FutureWarning, "", 1, module)
            warnings.warn_explicit(f"{message} And more.", FutureWarning, "", 1, module)
            warnings.warn_explicit(message, FutureWarning, "", 1, "theirs")
            warnings.warn_explicit(message, UserWarning, "", 1, module)
    assert len(caught) == 3 * len(deprecations.TRLS)
