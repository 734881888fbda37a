"""Model cards: the methods that were on, with their citations, beside TRL's text."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from trl_steady import __version__
from trl_steady.config.methods import Method

if TYPE_CHECKING:
    from trl_steady.config.shared import SharedOptions

_NUMBER = r"\d{4}\.\d{5}"


def add_methods(path: Path, on: Sequence[Method], args: "SharedOptions") -> None:
    """Add a tag, the methods of the run, and their citations to a model card that TRL has just written."""
    card = ModelCard.load(path)
    data: Any = card.data  # huggingface_hub declares the data of any card
    data.tags = [*(data.tags or []), "trl-steady"]
    lines = ["\n## trl-steady\n", f"The trainer was `trl_steady.{args.METHOD}Trainer` of trl-steady {__version__}."]
    if on:
        lines += ["It trained with these methods:\n", "| method | options | paper |", "|---|---|---|"]
        lines += [f"| {method.name} | {_options(method, args)} | {_papers(method.paper)} |" for method in on]
    else:
        lines += ["None of its methods was on, so it trained as TRL's trainer does."]
    cited = citations([number for method in on for number in re.findall(_NUMBER, method.paper)])
    if cited:
        lines += ["\nCite the papers of these methods as:\n", "```bibtex", "\n\n".join(cited), "```"]
    card.text = card.text.rstrip() + "\n" + "\n".join(lines) + "\n"
    card.save(path)


def citations(numbers: Sequence[str]) -> list[str]:
    """Return the BibTeX entries of papers by their arXiv numbers, in the order of `citations.bib`."""
    entries = files("trl_steady.trainers").joinpath("citations.bib").read_text("utf-8").strip().split("\n\n")
    return [entry for entry in entries if any(f"arXiv:{number}" in entry for number in numbers)]


def _papers(paper: str) -> str:
    return re.sub(_NUMBER, lambda found: f"[{found[0]}](https://huggingface.co/papers/{found[0]})", paper)


def _options(method: Method, args: "SharedOptions") -> str:
    return ", ".join(f"`{setting}`" for setting in method.settings(args))
