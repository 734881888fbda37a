"""Hook of the build: give the package the README with links that work on PyPI, and the repository's address."""

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))  # the build knows only this file
import address


class Metadata(MetadataHookInterface):
    """Set what `dynamic` of pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme and the urls, of which there are none while the address is not known."""
        text = address.description(metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = address.urls()
