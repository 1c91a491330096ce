"""The notebook of the site runs from top to bottom, and says what its saved output says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_its_figures_are_those_it_was_saved_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its shell commands are those of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    saved = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=600, kernel_name="python3", resources=place).execute()
    assert figures(run) == figures(saved)
    assert any("closeness" in text or "miss" in text for text in figures(saved))


def figures(notebook: Any) -> list[str]:
    """Return what the cells print: virtual times and counts, which are the same everywhere."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if output.get("name") != "stderr":
                found.append(str(text))
    return found
