"""Uses of experts counted in a trace, by hand."""

from __future__ import annotations

import pytest

from lm_eval_moecache.trace.use import touched, use_of
from tests.engine.traces import decode_trace

TRACE = decode_trace([[[0, 1]], [[0, 2]], [[0, 1]], [[3, 4]], [[5, 6]]], 8)


@pytest.mark.parametrize(("window", "experts"), [(1, 2), (2, 3.5), (3, 3), (5, 7), (9, 7)])
def test_windows_are_whole_and_count_an_expert_once(window: int, experts: float) -> None:
    """Two tokens take 0 1 2, the next two 0 1 3 4; the last one is no window of two."""
    assert touched(TRACE, window) == pytest.approx(experts / 8)


def test_uses_are_those_of_the_passes_asked_for() -> None:
    assert use_of(TRACE).counts == ((3, 2, 1, 1, 1, 1, 1, 0),)
    assert use_of(TRACE, 1, 3).counts == ((2, 1, 1, 0, 0, 0, 0, 0),)
    assert use_of(TRACE, 3).counts == ((0, 0, 0, 1, 1, 1, 1, 0),)
