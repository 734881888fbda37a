"""The versions that pyproject.toml promises are those that are tested."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl_steady.trl_bridge import SUPPORTED

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["recipes"]]


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / file).read_text(), re.MULTILINE))


def test_the_import_checks_the_ranges_of_pyproject() -> None:
    ranges = {each.name: each.specifier for each in RUNTIME}
    assert {package: ranges[package] for package in SUPPORTED} == {
        package: SpecifierSet(range_) for package, range_ in SUPPORTED.items()
    }


def test_every_floor_is_what_the_lowest_versions_are_tested_with() -> None:
    for requirement in RUNTIME:
        (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
        if requirement.name != "torch":  # of which no older build for the CPU alone is at hand
            assert Version(floor) == Version(pins("constraints-lowest.txt")[requirement.name])


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_what_is_tested_is_allowed(file: str) -> None:
    for requirement in RUNTIME:
        assert requirement.specifier.contains(pins(file)[requirement.name]), requirement
    assert pins(file)["torch"] == pins("constraints.txt")["torch"]
