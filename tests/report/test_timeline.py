"""A replay's timeline: in the Trace Event format, and with every part of the run."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.report.replay_report import COMPUTE, HOST, LINK, PASSES, TRACKS, Timeline
from lm_eval_moecache.trace.file import read_trace
from tests.conftest import Moecache
from tests.engine import traces


@pytest.mark.parametrize("policy", ["on_demand", "specmd", "hybrimoe"])
@pytest.mark.parametrize("link", ["priority", "fifo"])
def test_durations_and_bytes_add_up_to_the_runs_totals(
    policy: str, link: str, tmp_path: Path
) -> None:
    trace = read_trace(traces.record(tmp_path), logits=True, predicted=True)
    setting = dataclasses.replace(traces.setting(policy, "25%"), link=link)
    timeline = Timeline()
    engine = replay(trace, setting, cache_reset="never", on_engine=timeline.watch)
    plain = replay(trace, setting, cache_reset="never")
    assert engine.ledger.passes == plain.ledger.passes
    spans = [e for e in timeline.as_dict(engine)["traceEvents"] if e["ph"] == "X"]

    def total(track: str, name: str | None = None, what: str = "dur") -> float:
        track_spans = [e for e in spans if e["cat"] == track and name in (None, e["name"])]
        return sum(e["dur"] if what == "dur" else e["args"].get(what, 0) for e in track_spans)

    passes = engine.ledger.passes
    assert total(COMPUTE) == pytest.approx(engine.now * 1e6)
    assert total(PASSES) == pytest.approx(sum(p.duration_s for p in passes) * 1e6)
    assert total(COMPUTE, "stall") == pytest.approx(sum(p.stall_s for p in passes) * 1e6)
    assert total(LINK) == pytest.approx(engine.memory.run.busy_s * 1e6)
    assert total(LINK, what="bytes") == engine.memory.run.moved
    assert total(HOST) == pytest.approx(sum(p.host_s for p in passes) * 1e6)
    assert (total(HOST) > 0) == (policy in ("hybrimoe",))
    _assert_apart(spans)


def test_requests_that_start_anew_stand_one_behind_the_other(tmp_path: Path) -> None:
    trace = read_trace(traces.record(tmp_path), logits=True, predicted=True)
    timeline = Timeline()
    engine = replay(trace, traces.setting("specmd", "25%"), on_engine=timeline.watch)
    spans = [e for e in timeline.as_dict(engine)["traceEvents"] if e["ph"] == "X"]
    assert sum(p.start_s == 0 for p in engine.ledger.passes) == len(trace.requests) > 1
    assert len([e for e in spans if e["cat"] == PASSES]) == trace.num_passes
    _assert_apart(spans)


def _assert_apart(spans: list[dict[str, Any]]) -> None:
    for track in TRACKS:
        track_spans = sorted((e for e in spans if e["cat"] == track), key=lambda e: e["ts"])
        for before, after in pairwise(track_spans):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6, (before, after)


def test_the_command_writes_the_trace_event_format(tmp_path: Path, moecache: Moecache) -> None:
    path, out = traces.record(tmp_path), tmp_path / "out.json"
    moecache("replay", path, "--timeline", out)
    timeline: dict[str, Any] = json.loads(out.read_text())
    names = {e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    assert names == set(TRACKS)
    for event in timeline["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event) and event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] > 0
    message = moecache("replay", path, "--eviction=lru,lfu", "--timeline", out, code=2)
    assert "a timeline is of one replay" in message
