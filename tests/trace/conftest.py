"""What dead recordings leave is looked at without delay."""

from __future__ import annotations

import pytest

from lm_eval_moecache.trace import partial


@pytest.fixture(autouse=True)
def no_stream_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "FRESH_S", 0)
