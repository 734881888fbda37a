"""Links of the docs resolve, and readers find every command, every method and its paper."""

import copy
import importlib
import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import trl_steady
from tests.project.code_blocks import Block, blocks
from trl_steady.cli import main as cli
from trl_steady.config.methods import METHODS

ROOT = Path(__file__).parents[2]
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}
PAGES = {**DOCS, **{path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("*.md")}}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("recipes/**/*.md")}
methods = importlib.import_module("docs.hooks.methods")
PAPERS = {paper["arxiv"]: paper for paper in methods.read()["paper"]}
SETTINGS = [block for block in itertools.chain(*map(blocks, DOCS)) if block.language == "yaml"]


def test_the_launchers_page_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    commands = set(re.findall(r"^  (\w+) ", capsys.readouterr().out, flags=re.MULTILINE))
    assert commands == {"run", "grpo", "rloo", "ppo", "report", "methods", "schema", "env"}
    for command in commands:
        assert f"| `trl-steady {command}" in DOCS["docs/launcher.md"]


def test_links_between_files_resolve() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_the_readme_is_short_and_says_early_how_to_run() -> None:
    before, found, after = methods.filled("README.md", "").partition("\nmake demo ")
    assert found and len(before.split()) < 300 and len((before + after).split()) < 500


@pytest.mark.parametrize("command", ["demo", "test"])
def test_the_readme_names_what_a_fresh_machine_needs_with_its_time(command: str) -> None:
    assert re.search(rf"^make {command} +# .* minutes", PAGES["README.md"], flags=re.MULTILINE)
    assert re.search(rf"^{command}: ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", methods.PARTS)
def test_what_is_made_of_the_methods_is_in_the_files(name: str) -> None:
    made = methods.PARTS[name](methods.read())
    text = (ROOT / name).read_text()
    assert made in text and methods.filled(name, made) == text, "run `python docs/hooks/methods.py`"


@pytest.mark.parametrize("name", methods.PARTS)
def test_a_new_method_and_its_paper_are_in_what_is_made(name: str) -> None:
    table = copy.deepcopy(methods.read())
    row = {"name": "XPO", "setting": 'loss_type="xpo"', "paper": "1234.56789, equation 1"}
    problem = table["problem"][0]["id"]
    table["group"].append({"kind": "loss", "page": "methods/xpo.md", "problem": problem, "methods": [row]})
    paper = {
        "arxiv": "1234.56789",
        "key": "doe2000xpo",
        "title": "The {XPO} Paper",
        "authors": "A and B",
        "year": 2000,
    }
    table["paper"].append(paper)
    made = methods.PARTS[name](table)
    shown = {
        "README.md": "[XPO](docs/methods/xpo.md)",
        "docs/paper-index.md": "abs/1234.56789), `doe2000xpo`): [XPO](methods/xpo.md), equation 1",
        "docs/references.bib": "@article{doe2000xpo,\n  title   = {The {XPO} Paper},",
    }
    assert shown[name] in made
    assert shown[name] not in (ROOT / name).read_text()


def test_the_readme_has_a_method_for_every_problem() -> None:
    table = methods.read()
    solved = {group["problem"] for group in table["group"] if "problem" in group}
    assert solved == {problem["id"] for problem in table["problem"]}


@pytest.mark.parametrize("page", sorted({method.page for method in METHODS}))
def test_the_page_that_chooses_a_method_leads_to_every_page(page: str) -> None:
    assert re.search(rf"\]\({re.escape(page)}[)#]", DOCS["docs/choose.md"])


def test_the_page_of_a_method_links_its_papers() -> None:
    for method in METHODS:
        for arxiv in re.findall(r"\d{4}\.\d{5}", method.paper):
            assert f"(https://arxiv.org/abs/{arxiv})" in DOCS[f"docs/{method.page}"], method.name
            assert arxiv in PAPERS, f"methods.toml has no [[paper]] {arxiv}"


def test_every_paper_has_a_method_or_a_link() -> None:
    followed = " ".join(method.paper for method in METHODS)
    assert [arxiv for arxiv, paper in PAPERS.items() if arxiv not in followed and "also" not in paper] == []


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_settings_of_a_paper_are_options(block: Block) -> None:
    options = {field.name for field in fields(trl_steady.GRPOConfig)}
    assert {*yaml.safe_load(block.source)} <= options
