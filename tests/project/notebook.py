"""Execute the quickstart's notebook and store its outputs.

    python -m tests.project.notebook

This takes three to seven minutes on a CPU. The stored file has no warnings, paths or times of the machine that ran it.
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
NOTEBOOK = FOLDER / "quickstart.ipynb"


def stored(path: Path = NOTEBOOK) -> NotebookNode:
    """Return a notebook as it is in the repository."""
    return nbformat.read(path, as_version=4)


def executed(folder: Path) -> NotebookNode:
    """Run all cells in a folder, with a kernel of this environment."""
    return NotebookClient(stored(), timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Drop what depends on the machine: progress bars and warnings, times of execution, details of the kernel."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(cleaned(executed(Path(folder))), NOTEBOOK)
