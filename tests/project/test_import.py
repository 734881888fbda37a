"""`import trl_steady` is cheap and free of side effects."""

import logging
import subprocess
import sys

import pytest

import trl_steady

HEAVY = ("trl", "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes")


def test_the_import_and_the_table_of_methods_import_nothing_heavy() -> None:
    code = "from trl_steady.cli.main import main; main(['methods']); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "trl_steady" in loaded and not loaded & set(HEAVY)


def test_one_message_of_bitsandbytes_is_dropped_and_no_other() -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    missing = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure you ..."
    for text, is_printed in ((missing, False), ("another %s", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, text, ("no kernels",), None)
        assert bool(logger.filter(record)) == is_printed


def test_listing_and_unknown_names() -> None:
    assert {"GRPOConfig", "GRPOTrainer"} <= set(dir(trl_steady))
    with pytest.raises(AttributeError, match="GSPOTrainer"):
        _ = trl_steady.GSPOTrainer
