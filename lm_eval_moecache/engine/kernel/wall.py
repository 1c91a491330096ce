"""What the wall clock does between the steps of an event, when its transfers arrive."""

from __future__ import annotations

from lm_eval_moecache.engine.kernel.cache import insert, pin
from lm_eval_moecache.engine.kernel.clock import execute
from lm_eval_moecache.engine.kernel.event import (
    load_some,
    mark_executed,
    note,
    pin_rest,
    prepare_loads,
)
from lm_eval_moecache.engine.kernel.lanes import count_host, share_out
from lm_eval_moecache.engine.kernel.link import cancel_due, head, reserve, submit, withdraw
from lm_eval_moecache.engine.kernel.serve import note_levels
from lm_eval_moecache.engine.kernel.state import (
    CACHE,
    COUNTS,
    EXPERT,
    LAYER,
    LEVEL,
    RUN,
    SLOT,
    Call,
    Counts,
    Run,
)
from lm_eval_moecache.records.memory import INTS, at, numbers

LANDED, TAKEN_BACK, CANCEL, HOST, RELEASE, LOAD, WAVE, ENDED, SUBMIT, NEXT, RESERVE = range(11)
"""The call's keys have arrived; the first one's prefetch is taken back; drop prefetches up to event
`number`; give the host its part, `seconds` after which the link is free; release what is demanded
at a better level; load demands from `number` on; a wave of the event has been executed; its last
one has; queue what is proposed; find the next queued prefetch; begin that of the first key."""


def visit(call: Call, what: int, mark: int) -> int:
    """Do one of these things to a run, whose event in progress has pinned its keys by a mark."""
    run, keys = at(numbers(call.rows, INTS)[0], 0, RUN), numbers(call.keys, INTS)
    count = at(call.counts, 0, COUNTS)
    if what == LANDED:
        for place in range(call.num_keys):
            slot = at(run.slots, keys[place], SLOT)
            slot.arriving = 0
            insert(run, keys[place], slot.level, True)
    elif what == TAKEN_BACK:
        take_back(run, keys[0])
    elif what == CANCEL:
        cancel_due(run, call.number)
    elif what == HOST:
        share_out(run, mark, 0.0, call.seconds)
        count_host(run, mark, count)
    elif what == RELEASE:
        release_demands(run, mark)
    elif what == LOAD:
        return load_some(run, call.number, mark)
    elif what == WAVE:
        end_wave(run, mark, count)
        pin_rest(run, call, mark)
    elif what == ENDED:
        end_wave(run, mark, count)
        if call.levels:
            note_levels(run, call)
        pin(run)
        note(run, call)
    elif what == SUBMIT:
        submit(run, call, 0, call.seconds)
    elif what == NEXT:
        return find_next(run)
    elif what == RESERVE:
        found = reserve(run, keys[0], mark)
        # The event's keys are free later, maybe before anything else is noted of their layer.
        if run.layer >= 0:
            at(run.layers, run.layer, LAYER).stale = 1
        return int(found)
    return 0


def take_back(run: Run, key: int) -> None:
    """Release an arriving key whose transfer has not begun."""
    slot = at(run.slots, key, SLOT)
    cache = at(run.caches, at(run.layers, slot.home, LAYER).cache, CACHE)
    slot.arriving = 0
    cache.used -= at(run.levels, slot.home * run.num_levels + slot.level, LEVEL).size_bytes
    cache.loads -= 1


def release_demands(run: Run, mark: int) -> None:
    """Release residents demanded at a better level, and take demands off the prefetches' queue."""
    demands = numbers(run.demands, INTS)
    for place in range(run.num_demands):
        if at(run.slots, demands[place], SLOT).due >= 0:
            withdraw(run, demands[place])
    prepare_loads(run, mark, 0.0)


def end_wave(run: Run, mark: int, count: Counts) -> None:
    """Count what has been executed below the best level."""
    mark_executed(run, mark, False)
    execute(run, run.wave_keys, run.wave_served, count)


def find_next(run: Run) -> int:
    """Return the next queued prefetch of a key that is not resident, or -1."""
    while True:
        key = head(run)
        if key < 0 or not at(run.experts, key, EXPERT).resident:
            return key
        withdraw(run, key)
