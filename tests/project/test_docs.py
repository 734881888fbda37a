"""Links of the docs resolve, and the page of the launchers has every command."""

import re
from pathlib import Path

import pytest

from trl_steady.cli import main as cli

ROOT = Path(__file__).parents[2]
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}
PAGES = {**DOCS, **{path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("*.md")}}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("recipes/**/*.md")}


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
    before, found, after = PAGES["README.md"].partition("\nmake demo ")
    assert found and len(before.split()) < 300 and len((before + after).split()) < 700
