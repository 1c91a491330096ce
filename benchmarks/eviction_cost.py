"""Microseconds that each eviction's own bookkeeping takes per request, on real routing.

Usage: python benchmarks/eviction_cost.py [--out results/real_routing]. Writes `cost.md` there.

A replay on demand at 25% of all experts writes down every call that the cache makes to its eviction
algorithm; the calls are then made to a fresh one in a bare loop, and that loop is timed. What the
loop itself takes is measured with an algorithm that does nothing, and taken off. CPU time, the
least of three; the figures change with the machine, what stands between them hardly does.

Rules that rank residents find victims by machine code, as in a run of more than a few hundred
tokens; those with a state of their own are Python. A column says which, as the two do not compare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from grid import sections, setting_of, shipped_traces, table
from real_routing import EVICTIONS

from lm_eval_moecache.algorithms import ranked
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay_events import EventFields, events_of
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

Call = tuple[str, tuple[Any, ...]]
CAPACITY, ROUNDS = "25%", 3


class Nothing(EvictionAlgorithm):
    """Does nothing when it is called: what the loop takes without an algorithm."""

    def on_insert(self, key: int, prefetched: bool) -> None:
        return

    def on_evict(self, key: int) -> None:
        return

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        return None


class Written:
    """Stands in for an eviction algorithm and writes down what it is asked."""

    def __init__(self, eviction: EvictionAlgorithm) -> None:
        self._eviction = eviction
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        known = getattr(self._eviction, name)
        if not callable(known):
            return known

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return known(*arguments)

        return call


def calls_of(trace: Trace, future: Future, setting: Setting) -> list[Call]:
    """Replay a trace and return the calls to its eviction algorithm."""
    engine = Engine(trace.geometry, setting, future)
    pool, num_layers = engine.pools[0], trace.geometry.num_layers
    written = Written(pool.eviction)
    pool.eviction = written  # type: ignore[assignment]
    events = events_of(trace, EventFields(False, False, 0, ""), 0, trace.num_passes, False)
    for _ in range(trace.num_passes):
        for layer, event in zip(range(num_layers), events, strict=False):
            if layer == 0:
                engine.begin_pass(event.phase, event.num_tokens)
            engine.enter(layer, event.num_tokens)
            engine.run(event)
        engine.end_pass()
    return written.calls


def seconds(calls: list[Call], eviction: EvictionAlgorithm) -> float:
    """Make the calls to an algorithm that has not had any; return the CPU time."""
    bound = [(getattr(eviction, name), arguments) for name, arguments in calls]
    start_s = time.process_time()
    for call, arguments in bound:
        call(*arguments)
    return time.process_time() - start_s


def cost(trace: Trace, future: Future, overrides: dict[str, Any]) -> tuple[float, float]:
    """Return microseconds a request, and victims a request."""
    geometry = trace.geometry
    setting = setting_of(geometry, CAPACITY, overrides)
    calls = calls_of(trace, future, setting)
    requests = sum(len(a[0].keys) for _, a in calls if a and isinstance(a[0], Event))
    took = []
    for _ in range(ROUNDS):
        eviction = fresh(setting.policy.eviction, geometry, future, setting.capacity.total_bytes)
        took.append(seconds(calls, eviction) - seconds(calls, Nothing(geometry)))
    victims = sum(name == "victim" for name, _ in calls)
    return 1e6 * min(took) / requests, victims / requests


def fresh(choice: Any, geometry: Geometry, future: Future, nbytes: int) -> EvictionAlgorithm:
    eviction: EvictionAlgorithm = choice.build(geometry, 0)
    eviction.capacity_bytes = nbytes
    eviction.num_slots = nbytes * geometry.num_layers // sum(e[0] for e in geometry.expert_bytes)
    eviction.prepare(future)
    return eviction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/real_routing"))
    out = parser.parse_args().out
    # From the first one on, so that no rule is timed as Python here and as machine code there.
    ranked._PLAIN_VICTIMS = 0
    traces = dict(shipped_traces())
    futures = {name: Future(trace) for name, trace in traces.items()}
    rows: list[tuple[float, list[str]]] = []
    for eviction, overrides in EVICTIONS.items():
        found = [cost(traces[name], futures[name], overrides) for name in traces]
        costs = [f"{microseconds:.2f} ({victims:.2f})" for microseconds, victims in found]
        mean = sum(own for own, _ in found) / len(found)
        algorithm = load_policy("on_demand", overrides).eviction.algorithm
        victims_by = "machine code" if issubclass(algorithm, RankedEviction) else "Python"
        rows.append((mean, [eviction, victims_by, *costs, f"{mean:.2f}"]))
    headers = ["Eviction", "victims by", *traces, "mean"]
    title = f"Bookkeeping at {CAPACITY}, microseconds a request (victims a request)"
    costs_by_rule = table(headers, [row for _, row in sorted(rows)])
    (out / "cost.md").write_text(sections([(title, costs_by_rule)]))


if __name__ == "__main__":
    main()
