"""The small recorded trace that most replays here use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from tests.engine import traces


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `traces.record`."""
    return traces.record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def trace(path: Path) -> Trace:
    """The trace in that file, with logits and predictions."""
    return load_trace(str(path), logits=True, predicted=True)
