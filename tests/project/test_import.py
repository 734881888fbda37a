"""`import trl_steady` is cheap and free of side effects."""

import subprocess
import sys

import pytest

HEAVY = ("trl", "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_imports_nothing_heavy() -> None:
    loaded = run("import sys, trl_steady; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert not set(HEAVY) & set(loaded)
    assert "trl_steady" in loaded


def test_a_class_loads_when_it_is_used() -> None:
    assert run("from trl_steady import GRPOTrainer; import sys; print('trl' in sys.modules)") == "True"


def test_listing_and_unknown_names() -> None:
    import trl_steady

    assert {"GRPOConfig", "GRPOTrainer"} <= set(dir(trl_steady))
    with pytest.raises(AttributeError, match="GSPOTrainer"):
        _ = trl_steady.GSPOTrainer
