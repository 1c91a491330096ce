"""The small recorded trace that most replays here use, and the loop in machine code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_eval_moecache.engine.virtual import loop
from lm_eval_moecache.engine.virtual.loop import MODULES
from lm_eval_moecache.records.jit import Upgrade, has_numba
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


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile at once the loop that runs as plain Python in the other tests (tests/conftest.py)."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", False)
    monkeypatch.setattr(loop, "UPGRADE", Upgrade(MODULES, "step", load=0, make=0))
    has_numba.cache_clear()
    yield
    has_numba.cache_clear()
