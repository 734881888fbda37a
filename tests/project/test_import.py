"""`import trl_steady` is cheap and free of side effects."""

import importlib
import importlib.metadata
import logging
import subprocess
import sys

import pytest

import trl_steady
from trl_steady import trl_bridge

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


def import_with(package: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import our layer on TRL again, where another version of a package is found."""
    versions = {package: found}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    importlib.reload(trl_bridge)


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("trl", "1.13.0"),
        ("trl", "2.0.0.dev0"),
        ("transformers", "5.17.1"),
        ("transformers", "6.0.0.dev0"),
        ("peft", "0.20.0"),
    ],
)
def test_another_version_is_refused_with_the_command_that_mends_it(
    package: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = package + trl_bridge.SUPPORTED[package]
    with pytest.raises(ImportError) as error:
        import_with(package, found, monkeypatch)
    assert str(error.value) == f'trl-steady supports {wanted}, found {found}. Run: pip install "{wanted}"'


@pytest.mark.parametrize(("package", "found"), [("transformers", "5.99.0.dev0"), ("peft", "0.99.0+local")])
def test_builds_from_source_inside_the_range_are_taken(
    package: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_with(package, found, monkeypatch)
