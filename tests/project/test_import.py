"""`import trl_steady` is cheap and free of side effects."""

import logging
import subprocess
import sys

import pytest

HEAVY = ("trl", "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("code", ["import trl_steady", "from trl_steady.launcher import cli; cli.main(['methods'])"])
def test_the_import_and_the_table_of_methods_import_nothing_heavy(code: str) -> None:
    printed = run(f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))")
    loaded = printed.splitlines()[-1].split()
    assert not set(HEAVY) & set(loaded)
    assert "trl_steady" in loaded


def test_one_message_of_bitsandbytes_is_dropped_and_no_other() -> None:
    import trl_steady  # noqa: F401

    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    missing = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure you ..."
    for text, is_printed in ((missing, False), ("another %s", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, text, ("no kernels",), None)
        assert bool(logger.filter(record)) == is_printed


def test_a_class_loads_when_it_is_used() -> None:
    assert run("from trl_steady import GRPOTrainer; import sys; print('trl' in sys.modules)") == "True"


def test_listing_and_unknown_names() -> None:
    import trl_steady

    assert {"GRPOConfig", "GRPOTrainer"} <= set(dir(trl_steady))
    with pytest.raises(AttributeError, match="GSPOTrainer"):
        _ = trl_steady.GSPOTrainer
