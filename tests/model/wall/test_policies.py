"""What changes outputs, orders or records on the wall clock does as under the virtual one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.trace.importers import load_trace
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.wall.models import counts, wrap_wall
from tests.models import random_model

HOST: dict[str, Any] = {"device": "cpu", "max_length": 48}


def test_the_resident_run_before_what_is_missing_is_there() -> None:
    """A decode step whose second expert never comes: the first one has run all the same."""
    model = random_model("olmoe")
    wrapped = wrap_wall(model, "on_demand", "40%", changes={"miss": "fetch_cached_first"})
    engine = wrapped.engine
    engine.begin_pass(DECODE, 1)
    engine.run(Event(0, 0, DECODE, 1, [0, 1]))
    assert [dict(slot_of).keys() for slot_of, _ in engine.waves()] == [{0, 1}]
    engine.run(Event(0, 0, DECODE, 1, [2, 0, 1]))
    assert [list(slot_of) for slot_of, _ in engine.waves()] == [[0, 1], [2]]
    wrapped.unwrap()


@pytest.mark.parametrize("policy", ["on_demand", "mixture_cache", "specmd"])
def test_a_trace_holds_the_virtual_clocks_routing_and_replays_to_the_runs_counts(
    policy: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path, given = str(checkpoint("olmoe")), {"capacity": "40%", "policy": policy}
    traces = []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(path, clock=clock, trace=str(tmp_path / clock), **given, **HOST)
        answers(lm)
        traces.append(lm.finish_trace())
        lm.wrapped.unwrap()
    told, real = (pyarrow.parquet.read_table(trace) for trace in traces)
    assert real.num_rows > 0 and real.equals(told)
    if policy == "on_demand":
        # What prefetches come in time is the machine's; a lossy policy's replay is open-loop.
        again = replay(load_trace(str(traces[1])), lm.engine.setting)
        assert counts(lm.engine.ledger.passes) == counts(again.ledger.passes)


@pytest.fixture(scope="module")
def trace(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trace")
    lm = MoECacheLM(str(checkpoint("olmoe")), policy="on_demand", trace=str(folder), **HOST)
    answers(lm)
    return str(lm.finish_trace())


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": "4/layer"},
        {"cache_reset": "request"},
        {"capacity": "100%", "cache_reset": "request"},
        {"precision": "int8:nf4", "miss": "fetch_priority"},
        {"miss": "host"},
        {"miss": "host", "miss.rule": "always"},
    ],
    ids=str,
)
def test_a_warmed_run_is_counted_and_answered_as_under_the_virtual_clock(
    changes: dict[str, str], checkpoint: Checkpoint, trace: str
) -> None:
    """By real transfers before the first request, which no pass counts."""
    given = {"policy": "on_demand", "warm": trace, "capacity": "40%", **changes}
    path, found = str(checkpoint("olmoe")), []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(path, clock=clock, **given, **HOST)
        assert lm.engine.link.bytes_moved == 0 and lm.engine.pools[0].resident
        found.append((answers(lm), counts(lm.engine.ledger.passes)))
        lm.engine.check_integrity()
        lm.wrapped.unwrap()
    # What the host executes, by how fast it is, is this machine's.
    assert found[0][0] == found[1][0]
    assert found[0] == found[1] or "miss" in changes
    if changes.get("capacity") == "100%":
        # All that the trace asked for is there: nothing is loaded again.
        assert sum(passes[1] for passes in found[1][1]) == 0
