"""The clock: waits, and what execution costs."""

from __future__ import annotations

from lm_eval_moecache.engine.kernel.state import LEVEL, Counts, Run
from lm_eval_moecache.records.memory import DOUBLES, at, invoke, numbers

DENSE, WAIT, STALL, WAKE, EXPERTS, TRANSFER, LOADS, HOST = SPANS = range(8)
"""Kinds of spans of the timeline."""
READ = -1
"""In place of a cache: asks Python for no victim, but to read messages and spans."""


def add_span(run: Run, kind: int, start_s: float, end_s: float, what: int, number: int) -> None:
    """Note a span: its layer or bytes, and its tokens or experts, or the key of a prefetch."""
    spans, place = numbers(run.spans, DOUBLES), 5 * run.num_spans
    spans[place] = kind
    spans[place + 1] = start_s
    spans[place + 2] = end_s
    spans[place + 3] = what
    spans[place + 4] = number
    run.num_spans += 1
    if run.num_spans == run.max_spans:
        invoke(run.ask, READ, 0, 0)


def wait_until(run: Run, time_s: float) -> float:
    """Advance the clock to `time_s`; return the seconds waited."""
    stall_s = time_s - run.now
    if stall_s <= 0:
        return 0.0
    if run.spans:
        add_span(run, WAIT, run.now, time_s, 0, 0)
    run.now = time_s
    return stall_s


def await_link(run: Run, time_s: float, count: Counts) -> None:
    """Wait for a transfer that arrives at `time_s`, and count the stall.

    Any wait also costs the profile's `wait_overhead_s`, which does not count as a stall.
    """
    stall_s = time_s - run.now
    if stall_s > 0:
        count.stall_s += stall_s
        if run.spans:
            add_span(run, STALL, run.now, time_s, 0, 0)
            add_span(run, WAKE, time_s, time_s + run.wait_overhead_s, 0, 0)
        run.now = time_s
        run.now += run.wait_overhead_s


def charge_loads(run: Run) -> None:
    """Charge the compute's overhead of what was loaded, prefetches included.

    Prefetches that land while it is busy are charged at the next event.
    """
    if run.loaded_bytes:
        run.now += run.load_overhead_s * run.loaded_bytes
        run.loaded_bytes = 0


def execute(run: Run, num_keys: int, assignments: int, count: Counts) -> None:
    """Charge the execution of some of a layer's experts; each precision level has its kernels."""
    if run.num_levels == 1:
        execute_level(run, 0, num_keys, assignments, 1.0, False)
        return
    for number in range(run.num_levels):
        level = at(run.levels, run.layer * run.num_levels + number, LEVEL)
        execute_level(run, number, level.num_keys, level.num_served, 1.0, False)
        if number:
            count.low_precision += level.num_served
        level.num_keys = 0
        level.num_served = 0


def execute_level(
    run: Run, number: int, num_keys: int, assignments: int, share: float, launched: bool
) -> None:
    """Charge experts of one level.

    Those whose event has its kernels `launched` already pay no launch overhead; `share` is the part
    of their weights that is executed (one projection of several).
    """
    if num_keys:
        level = at(run.levels, run.layer * run.num_levels + number, LEVEL)
        flop_s, read_s = level.flop_s * assignments, level.read_s * num_keys
        overhead_s = 0.0 if launched else run.expert_overhead_s
        start_s = run.now
        # A single addition: the last digits of a time decide which transfers have arrived.
        run.now += share * (flop_s if flop_s > read_s else read_s) + overhead_s
        if run.spans:
            add_span(run, EXPERTS, start_s, run.now, run.layer, num_keys)
