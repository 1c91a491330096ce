"""How large traces are, by what they keep, for a model of 16 layers of 64 experts, 8 a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trace import write

TOKENS = 768


@pytest.mark.parametrize(
    ("kept", "most_kb"), [("routing", 0.15), ("sweep", 0.3), ("lossless", 0.7)]
)
def test_bytes_a_token(tmp_path: Path, kept: str, most_kb: float) -> None:
    size = write(tmp_path, TOKENS, kept).stat().st_size
    assert size / TOKENS / 1000 < most_kb
