"""The trainers of the conformance table."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import cases
from tests.tools import tiny, wide

# a rollout is used for 4 steps
WINDOW: dict[str, Any] = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}


@pytest.fixture
def build(models: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that builds the trainer of a row, with further options."""

    def build(feature: str, case: str, **further: Any) -> Any:
        options = {**WINDOW, **cases.options(feature, case), **further}
        if options.get("teacher") in models:
            options["teacher"] = str(models[options["teacher"]])
        name, then = options.pop("model"), options.pop("then", lambda _: None)
        model = wide.load(request.getfixturevalue("wide"), name) if name in wide.BASES else models[name]
        torch.manual_seed(0)
        trainer = tiny.trainer(model, tmp_path, **options)
        then(trainer)
        return trainer

    return build
