"""docs/corrections.md and the warning show what docs/figures/evidence/precision.py has measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig

from tests.tools import wide as wide_model
from tests.tools.script import figure
from trl_steady.features.engine_check import COST_OF_FLOAT16, COSTS

PAGE = (Path(__file__).parents[2] / "docs/corrections.md").read_text()
TEXT = " ".join(PAGE.split())


@pytest.fixture(scope="module")
def tables() -> Iterator[Any]:
    with figure("page_tables", draws=False) as script:
        yield script


@pytest.fixture(scope="module")
def precision() -> Iterator[Any]:
    with figure("evidence/precision", draws=False) as script:
        yield script


@pytest.fixture(scope="module")
def recorded(precision: Any) -> dict[str, dict[tuple[str, str], dict[str, float]]]:
    """Case -> engine and trainer -> figures."""
    found = json.loads(precision.RECORDED.read_text())
    return {case: {(row["engine"], row["trainer"]): row for row in rows} for case, rows in found.items()}


def test_the_page_shows_the_recorded_tables(precision: Any, recorded: Any, tables: Any) -> None:
    for case, cases in precision.CASES.items():
        assert [*recorded[case]] == [(engine, each.name) for engine, trainers in cases.items() for each in trainers]
    page = PAGE
    for name, table in precision.tables(json.loads(precision.RECORDED.read_text())).items():
        page = tables.replaced(page, name, table)
        assert table in PAGE
    assert page == PAGE, "run `python docs/figures/evidence/precision.py --write`"


def test_the_page_and_the_warning_quote_what_was_measured(precision: Any, recorded: Any) -> None:
    usual, both = f"{precision.FP32} weights, bfloat16 autocast", f"{precision.FP32} weights, float16 autocast"
    full = recorded[precision.FULL]
    times = full["bfloat16", usual]["k3"] / full["float16", both]["k3"]
    assert f"{times:.0f} times less than TRL's default beside an engine in bfloat16" in TEXT
    nf4 = [row["k3"] for row in recorded[precision.NF4].values()]
    assert f"float16 on both sides differs {nf4[0] / nf4[3]:.0f} times less" in TEXT
    assert f"stays bfloat16, {nf4[2] / nf4[3]:.0f} times more is left" in TEXT
    routes = recorded[precision.MIXTURE]
    fewer = routes["bfloat16", usual]["routes"] / routes["float16", both]["routes"]
    assert f"{fewer:.0f} times fewer routes differ than with TRL's default" in TEXT
    for (engine, trainer), warned in {
        ("bfloat16", "float32 weights"): COSTS["bfloat16"],
        ("float16", "float32 weights"): COSTS["float16"],
        ("float16", both): COST_OF_FLOAT16,
    }.items():
        assert f"{full[engine, trainer]['k3']:.0e}" == warned.replace("e-", "e-0")


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_script_measures_rounding_and_nothing_else(precision: Any, models: dict[str, Path], name: str) -> None:
    """Prompts of unequal length, padded for the engine. Without rounding, both sides agree; bfloat16 rounds most.

    The trainer computes in float32, because a CPU may round both sides alike.
    """
    ids = torch.randint(40, 250, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) >= torch.tensor([0, 3, 5, 8])[:, None]
    dtypes = ("float32", "float16", "bfloat16")
    cases = {dtype: (precision.Trainer("float32"),) for dtype in dtypes}

    def load(weights: str, _: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=weights).eval()

    rows = {row["engine"]: row for row in precision.measured(load, cases, ids.masked_fill(~mask, 0), mask.long())}
    assert rows["float32"]["k3"] < 1e-9 and rows["float32"]["outside"] == 0
    if name == "moe":  # one route that flips hides the rounding of all others
        assert rows["float32"]["routes"] == 0
    else:
        assert rows["float32"]["k3"] < rows["float16"]["k3"] < rows["bfloat16"]["k3"] / 10


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scripts_product_with_4_bit_weights_is_that_of_bitsandbytes(
    precision: Any, wide: Path, computed: torch.dtype, autocast: torch.dtype | None
) -> None:
    nf4 = BitsAndBytesConfig(
        **{**wide_model.NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": computed}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, quantization_config=nf4).train()
    layer = model.model.layers[0].mlp.gate_proj
    hidden = torch.randn(5, layer.in_features)
    weight = precision.dequantised(layer)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        assert torch.equal(layer(hidden), precision._product(weight, computed, hidden))
