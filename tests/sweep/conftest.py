"""The base of sweeps of the random checkpoint, and isolation of loaded models between tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lm_eval_moecache.sweep import worker
from tests.conftest import Checkpoint


@pytest.fixture
def base(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"pretrained": str(checkpoint("olmoe")), "device": "cpu"}


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Drop the models loaded by one test before the next."""
    yield
    worker._loaded.clear()
