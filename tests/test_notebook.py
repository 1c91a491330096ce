"""The notebook of the site runs from top to bottom, and its replays say what was saved."""

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
def test_the_notebook_runs_and_its_replays_say_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its shell commands are those of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    saved = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=600, kernel_name="python3", resources=place).execute()
    assert len(figures(run)) == len(figures(saved)) >= 7
    of_traces = [text for text in figures(run) if "qwen3-30b" in text or "hazard " in text]
    assert len(of_traces) >= 2
    # Those of the live run may differ by a near tie of the router on another CPU.
    assert set(of_traces) <= set(figures(saved))


def figures(notebook: Any) -> list[str]:
    """Return what the cells print and show."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if output.get("name") != "stderr":
                found.append(str(text))
    return found
