"""Runs examples/quickstart.ipynb, and keeps what its cells show: people read it before they run it.

python docs/make_notebook.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbclient
import nbformat

PAGE = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def main() -> None:
    """Run it in a folder of its own. Times of cells are left out: they would differ in every run."""
    notebook = nbformat.read(PAGE, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        # Warnings and bars of other libraries, which name the machine that ran them.
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, PAGE)


if __name__ == "__main__":
    main()
