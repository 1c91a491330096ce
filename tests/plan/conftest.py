"""Plans that replay one policy at what fits, where a test asks for something else."""

from __future__ import annotations

import pytest

from moecache_plan import ideal


@pytest.fixture
def replay_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideal, "POLICIES", {"lru": ideal.POLICIES["lru"]})
    monkeypatch.setattr(ideal, "SHARES", ())
