"""The clock: waits, and what execution costs."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.engine.core.state import IN_PYTHON, RunState, State
from lm_eval_moecache.records.ledger import Counters


def wait_until(state: State, time_s: float) -> float:
    """Advance the clock to `time_s`; return the seconds waited."""
    run = state.run[0]
    stall_s = time_s - run.now
    if stall_s <= 0:
        return 0.0
    if IN_PYTHON and run.recorded:
        state.outside.add_span("wait", run.now, time_s, 0, 0)
    run.now = time_s
    return stall_s


def await_link(state: State, time_s: float) -> float:
    """Wait for a transfer that arrives at `time_s`; return the seconds of the stall.

    Any wait also costs the profile's `wait_overhead_s`, which does not count as a stall.
    """
    run = state.run[0]
    stall_s = time_s - run.now
    if stall_s <= 0:
        return 0.0
    if IN_PYTHON and run.recorded:
        state.outside.add_span("stall", run.now, time_s, 0, 0)
        state.outside.add_span("wake", time_s, time_s + run.wait_overhead_s, 0, 0)
    run.now = time_s
    run.now += run.wait_overhead_s
    return stall_s


def charge_loads(run: RunState) -> None:
    """Charge the compute's overhead of what was loaded, prefetches included.

    Prefetches that land while it is busy are charged at the next event.
    """
    if run.loaded_bytes:
        run.now += run.load_overhead_s * run.loaded_bytes
        run.loaded_bytes = 0


def execute(state: State, layer: int, num_keys: int, assignments: int, count: Counters) -> None:
    """Charge the execution of some of a layer's experts; each precision level has its kernels."""
    run = state.run[0]
    if IN_PYTHON and run.watched:
        state.outside.notify_wave()
    if run.num_levels == 1:
        execute_level(state, layer, 0, num_keys, assignments, 1.0, False)
        return
    for number in range(run.num_levels):
        level = state.levels[layer * run.num_levels + number]
        execute_level(state, layer, number, level.num_keys, level.num_served, 1.0, False)
        if number:
            count.low_precision += level.num_served
        level.num_keys = level.num_served = 0


def execute_level(
    state: State,
    layer: int,
    number: int,
    num_keys: int,
    assignments: int,
    share: float,
    launched: bool,
) -> None:
    """Charge experts of one level.

    Those whose event has its kernels `launched` already pay no launch overhead; `share` is the part
    of their weights that is executed (one projection of several).
    """
    if num_keys:
        run = state.run[0]
        level = state.levels[layer * run.num_levels + number]
        flop_s, read_s = level.flop_s * assignments, level.read_s * num_keys
        overhead_s = 0.0 if launched else run.expert_overhead_s
        start_s = run.now
        # A single addition: the last digits of a time decide which transfers have arrived.
        run.now += share * (flop_s if flop_s > read_s else read_s) + overhead_s
        if IN_PYTHON and run.recorded:
            state.outside.add_span("experts", start_s, run.now, layer, num_keys)
