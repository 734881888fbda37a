"""`import trl_steady` is cheap and free of side effects."""

import subprocess
import sys

HEAVY = ("trl", "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_imports_nothing_heavy() -> None:
    loaded = run("import sys, trl_steady; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert not set(HEAVY) & set(loaded)
    assert "trl_steady" in loaded


def test_a_class_loads_when_it_is_used() -> None:
    assert run("from trl_steady import GRPOConfig; import sys; print('trl' in sys.modules)") == "True"


def test_listing_and_unknown_names() -> None:
    import trl_steady

    assert {"GRPOConfig", "GRPOTrainer"} <= set(dir(trl_steady))
    try:
        trl_steady.GSPOTrainer  # noqa: B018
    except AttributeError as error:
        assert "GSPOTrainer" in str(error)
    else:
        raise AssertionError("an unknown name was found")
