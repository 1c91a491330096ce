"""`warm=` on the wall clock: real transfers before the first request, which no pass counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.harness.lm import MoECacheLM
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.wall.models import counts

HOST: dict[str, Any] = {"device": "cpu", "max_length": 48}


@pytest.fixture(scope="module")
def trace(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trace")
    lm = MoECacheLM(str(checkpoint("olmoe")), policy="on_demand", trace=str(folder), **HOST)
    answers(lm)
    return str(lm.finish_trace())


@pytest.mark.parametrize("capacity", ["40%", "4/layer", "100%"])
@pytest.mark.parametrize("cache_reset", ["never", "request"])
def test_a_warmed_run_is_counted_and_answered_as_under_the_virtual_clock(
    capacity: str, cache_reset: str, checkpoint: Checkpoint, trace: str
) -> None:
    given = {"policy": "on_demand", "warm": trace, "capacity": capacity, "cache_reset": cache_reset}
    path, found = str(checkpoint("olmoe")), []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(path, clock=clock, **given, **HOST)
        assert lm.engine.link.bytes_moved == 0 and lm.engine.pools[0].resident
        found.append((answers(lm), counts(lm.engine.ledger.passes)))
        lm.engine.check_integrity()
        lm.wrapped.unwrap()
    assert found[0] == found[1]
    if capacity == "100%":
        # All that the trace asked for is there: nothing is loaded again.
        assert sum(passes[1] for passes in found[1][1]) == 0


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "int8:nf4", "miss": "fetch_priority"},
        {"miss": "host"},
        {"miss": "host", "miss.rule": "always"},
    ],
    ids=str,
)
def test_a_warmed_cache_goes_with_levels_and_with_the_host(
    given: dict[str, str], checkpoint: Checkpoint, trace: str, tmp_path: Path
) -> None:
    path = str(checkpoint("olmoe"))
    usual = {"policy": "on_demand", "capacity": "40%", **given}
    lm = MoECacheLM(path, clock="wall", warm=trace, **usual, **HOST)
    held = set(lm.engine.pools[0].resident)
    assert held
    found = answers(lm)
    lm.engine.check_integrity()
    expected = answers(MoECacheLM(path, warm=trace, **usual, **HOST))
    assert found == expected
    lm.wrapped.unwrap()
