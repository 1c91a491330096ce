"""A replay as a timeline: what compute, link and host did, in the Trace Event format.

Perfetto (ui.perfetto.dev) and chrome://tracing open it. Times are of the virtual clock, in
microseconds; each event of the compute has a duration, so that together they are the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.engine.virtual.executor import VirtualExecutor
from lm_eval_moecache.engine.virtual.link import VirtualLink
from lm_eval_moecache.records.event import Event, Fetch
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.report.replays import SweepSetting, one_replay

PASSES, COMPUTE, LINK, HOST = TRACKS = ("passes", "compute", "link", "host")


class Timeline:
    """Collects what happens, as events of the Trace Event format."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        for index, name in enumerate(TRACKS):
            self._add("thread_name", "M", index, args={"name": name})
            self._add("thread_sort_index", "M", index, args={"sort_index": index})

    def _add(self, name: str, kind: str, track: int, **rest: Any) -> None:
        self.events.append({"name": name, "ph": kind, "pid": 1, "tid": track, **rest})

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Add something that took time; what took none is left out."""
        if end_s > start_s:
            times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
            self._add(name, "X", TRACKS.index(track), cat=track, **times, args=args)

    def watch(self, engine: Engine) -> None:
        """Let the engine's clock, link and host tell what they do, from now on.

        They stay the objects that everybody holds: only their class changes, to one that tells.
        """
        executor = engine.executor
        assert isinstance(executor, VirtualExecutor), "only virtual time has a timeline"
        parts: list[tuple[Any, type]] = [(executor.clock, _TellingClock)]
        parts += [(executor.link, _TellingLink), (executor._host, _TellingHost)]
        for part, telling in parts:
            if part is not None:
                part.__class__ = telling
                part.timeline = self

    def as_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the file's content, the passes of the engine's ledger among it."""
        for record in engine.ledger.passes:
            args = {"tokens": record.num_tokens, "misses": record.misses, "late": record.late}
            self.span(PASSES, record.phase, record.start_s, record.end_s, **args)
        return {"traceEvents": self.events, "displayTimeUnit": "ms"}


class _TellingClock(VirtualClock):
    timeline: Timeline

    def wait_until(self, time_s: float) -> float:
        start_s = self.now
        waited_s = super().wait_until(time_s)
        self.timeline.span(COMPUTE, "wait", start_s, self.now)
        return waited_s

    def await_link(self, time_s: float) -> float:
        start_s = self.now
        # Not by `wait_until` of this class: it is one span, and another kind.
        stall_s = max(time_s - start_s, 0.0)
        if stall_s:
            self.now = time_s
            self.timeline.span(COMPUTE, "stall", start_s, time_s)
            self.now += self.wait_overhead_s
            self.timeline.span(COMPUTE, "wake", time_s, self.now)
        return stall_s

    def dense(self, layer: int, num_tokens: int) -> None:
        start_s = self.now
        super().dense(layer, num_tokens)
        self.timeline.span(COMPUTE, "dense", start_s, self.now, layer=layer, tokens=num_tokens)

    def experts(self, layer: int, num_experts: int, *how: Any, **more: Any) -> None:
        start_s = self.now
        super().experts(layer, num_experts, *how, **more)
        self.timeline.span(COMPUTE, "experts", start_s, self.now, layer=layer, experts=num_experts)


class _TellingLink(VirtualLink):
    timeline: Timeline
    _starting: int | None = None

    def start(self, key: int, nbytes: int, now: float) -> None:
        self._starting = key
        super().start(key, nbytes, now)
        self._starting = None

    def transfer(self, nbytes: int, now: float, joins: bool = False) -> float:
        start_s, key = max(now, self.busy_until), self._starting
        end_s = super().transfer(nbytes, now, joins)
        name, args = ("load", {}) if key is None else ("prefetch", {"key": key})
        self.timeline.span(LINK, name, start_s, end_s, bytes=nbytes, **args)
        return end_s

    def batch(self, sizes: Sequence[int], now: float) -> list[list[float]]:
        start_s = max(now, self.busy_until)
        landed = super().batch(sizes, now)
        self.timeline.span(LINK, "loads", start_s, self.busy_until, bytes=sum(sizes))
        return landed


class _TellingHost(HostStage):
    timeline: Timeline

    def begin(
        self, event: Event, fetches: Sequence[Fetch], record: PassRecord
    ) -> tuple[Event, Sequence[Fetch]]:
        before_s = record.host_s
        found = super().begin(event, fetches, record)
        worked_s = record.host_s - before_s
        begun_s = self.busy_until - worked_s
        self.timeline.span(HOST, "experts", begun_s, self.busy_until, layer=event.layer)
        return found


def write_timeline(files: Sequence[str], setting: SweepSetting, path: str) -> None:
    """Replay the one trace under the one setting, and write its timeline.

    Raises ValueError where there are several.
    """
    trace, replayed, future = one_replay(files, setting)
    timeline, reset = Timeline(), setting.cache_reset
    engine = replay(trace, replayed, future=future, cache_reset=reset, on_engine=timeline.watch)
    write_whole(Path(path), json.dumps(timeline.as_dict(engine)))
