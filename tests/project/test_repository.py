"""Files that GitHub reads say what the rest of the repository says."""

import re

import yaml
from packaging.version import Version

import trl_steady
from tests.project.installs import ROOT

WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()


def targets(workflow: str) -> set[str]:
    """Return the targets that the jobs of a workflow make."""
    found: set[str] = set()
    for job in yaml.safe_load(WORKFLOWS[workflow])["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        cells = [*matrix.get("target", []), *(each["target"] for each in matrix.get("include", []))]
        steps = " ".join(step.get("run", "") for step in job.get("steps", []))
        found |= {*" ".join(cells).split(), *re.findall(r"\bmake ([a-z][\w-]*)", steps)}
    return found


def test_the_workflows_make_what_the_makefile_has() -> None:
    phony = set(" ".join(re.findall(r"^\.PHONY: (.+)", MAKEFILE, re.MULTILINE)).split())
    for workflow in WORKFLOWS:
        assert targets(workflow) <= phony, workflow
    everything = set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    assert {"check", "test", "docs"} <= everything <= targets("tests") | targets("docs")


def test_the_page_cites_as_the_citation_file_does() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entry = re.search(r"@software\{trl_steady,.*?\n\}", (ROOT / "docs/cite.md").read_text(), re.DOTALL)
    assert entry
    fields = dict(re.findall(r"(\w+) *= \{+(.+?)\}+,?\n", entry[0]))
    assert fields == {
        "title": citation["title"],
        "author": citation["authors"][0]["name"],
        "year": citation["date-released"][:4],
        "license": citation["license"],
    }
    assert citation["version"] == Version(trl_steady.__version__).base_version
