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

import time
from typing import Any

from grid import RESULTS, arguments, sections, setting_of, shipped_traces
from real_routing import EVICTIONS

from lm_eval_moecache.algorithms import ranked
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.engine.engine import VirtualEngine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.report.tables import padded
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

Call = tuple[str, tuple[Any, ...]]
CAPACITY, ROUNDS = "25%", 3


class Written:
    """Stands in for an eviction algorithm and writes down what it is asked."""

    def __init__(self, eviction: EvictionAlgorithm, calls: list[Call]) -> None:
        self._eviction, self._calls = eviction, calls

    def __getattr__(self, name: str) -> Any:
        known = getattr(self._eviction, name)
        if not callable(known):
            return known

        def call(*given: Any) -> Any:
            self._calls.append((name, given))
            return known(*given)

        return call


def calls_of(trace: Trace, future: Future, setting: Setting) -> list[Call]:
    """Replay a trace and return the calls to its eviction algorithm."""
    calls: list[Call] = []

    def watch(engine: VirtualEngine) -> None:
        pool = engine.pools[0]
        pool.eviction = Written(pool.eviction, calls)  # type: ignore[assignment]

    replay(trace, setting, future=future, on_engine=watch, compiled=False)
    return calls


def seconds(calls: list[Call], eviction: EvictionAlgorithm | None) -> float:
    """Make the calls to an algorithm that has not had any, or to nobody; return the CPU time."""

    def nobody(*_: Any) -> None:
        return

    bound = [(getattr(eviction, name) if eviction else nobody, given) for name, given in calls]
    start_s = time.process_time()
    for call, given in bound:
        call(*given)
    return time.process_time() - start_s


def cost(trace: Trace, future: Future, overrides: dict[str, Any]) -> tuple[float, float]:
    """Return microseconds a request, and victims a request."""
    setting = setting_of(trace.geometry, CAPACITY, overrides)
    calls, took = calls_of(trace, future, setting), []
    requests = sum(len(a[0].keys) for _, a in calls if a and isinstance(a[0], Event))
    for _ in range(ROUNDS):
        fresh = VirtualEngine(trace.geometry, setting, future).pools[0].eviction
        took.append(seconds(calls, fresh) - seconds(calls, None))
    victims = sum(name == "victim" for name, _ in calls)
    return 1e6 * min(took) / requests, victims / requests


def main() -> None:
    out = arguments(__doc__, out=RESULTS / "real_routing").out
    # From the first one on, so that no rule is timed as Python here and as machine code there.
    ranked._PLAIN_VICTIMS = 0
    traces = {name: (trace, Future(trace)) for name, trace in shipped_traces()}
    rows: list[tuple[float, list[str]]] = []
    for eviction, overrides in EVICTIONS.items():
        found = [cost(trace, future, overrides) for trace, future in traces.values()]
        costs = [f"{microseconds:.2f} ({victims:.2f})" for microseconds, victims in found]
        mean = sum(own for own, _ in found) / len(found)
        algorithm = load_policy("on_demand", overrides).eviction.algorithm
        victims_by = "machine code" if issubclass(algorithm, RankedEviction) else "Python"
        rows.append((mean, [eviction, victims_by, *costs, f"{mean:.2f}"]))
    headers = ["Eviction", "victims by", *traces, "mean"]
    title = f"Bookkeeping at {CAPACITY}, microseconds a request (victims a request)"
    told = sections({title: padded(headers, [row for _, row in sorted(rows)])})
    (out / "cost.md").write_text(told)


if __name__ == "__main__":
    main()
