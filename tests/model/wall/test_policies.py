"""What changes outputs, orders or records on the wall clock: as under the virtual one, 20 times."""

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
    path = str(checkpoint("olmoe"))
    host: dict[str, Any] = {"device": "cpu", "max_length": 48, "capacity": "40%", "policy": policy}
    traces = []
    for clock in ("virtual", "wall"):
        lm = MoECacheLM(pretrained=path, clock=clock, trace=str(tmp_path / clock), **host)
        answers(lm)
        traces.append(lm.finish_trace())
        lm.wrapped.unwrap()
    told, real = (pyarrow.parquet.read_table(trace) for trace in traces)
    assert real.num_rows > 0 and real.equals(told)
    if policy == "on_demand":
        # What prefetches come in time is the machine's; a lossy policy's replay is open-loop.
        again = replay(load_trace(str(traces[1])), lm.engine.setting)
        assert counts(lm.engine.ledger.passes) == counts(again.ledger.passes)
