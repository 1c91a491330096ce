"""The link: transfers, and the queue of prefetches.

With `fifo` everything moves in order of issue: prefetches are neither overtaken by demands nor
withdrawn when their event is over. This is CommitMoE's premise of transfers that "cannot be
canceled once initiated".
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.engine.kernel.cache import (
    HINTED,
    insert,
    make_room,
    notify,
    take_bytes,
)
from lm_eval_moecache.engine.kernel.clock import TRANSFER, add_span
from lm_eval_moecache.engine.kernel.ranking import note_hint
from lm_eval_moecache.engine.kernel.state import (
    EXPERT,
    LAYER,
    LEVEL,
    PROPOSING,
    SLOT,
    Call,
    Layer,
    Run,
)
from lm_eval_moecache.records.memory import INTS, at, invoke, numbers


def is_active(run: Run) -> bool:
    """Whether a prefetch is in flight or queued."""
    return run.inflight >= 0 or run.queued > 0


def transfer(run: Run, home: int, level: int, now: float, joins: bool, prefetched: int) -> float:
    """Move an expert of a layer from `now` on or once the link is free; return its arrival.

    A transfer that `joins` the previous one in a batch pays no latency of its own. `prefetched` is
    the key of a prefetch, else -1.
    """
    size = at(run.levels, home * run.num_levels + level, LEVEL)
    carry_s = size.move_s
    if not joins:
        carry_s += run.latency_s
        run.open_batch = -1
    run.transfers += 1
    return occupy(run, now, carry_s, size.size_bytes, prefetched)


def occupy(run: Run, now: float, carry_s: float, nbytes: int, prefetched: int) -> float:
    """Occupy the link for some seconds from `now` on or once it is free; return when it ends."""
    start_s = now if now > run.busy_until else run.busy_until
    run.busy_until = start_s + carry_s
    run.busy_s += carry_s
    run.moved += nbytes
    if run.spans:
        add_span(run, TRANSFER, start_s, run.busy_until, nbytes, prefetched)
    return run.busy_until


def submit(run: Run, call: Call, place: int, ready_s: float) -> None:
    """Queue the prefetches proposed at an event of the batch."""
    if call.propose:
        asked, bounds = at(call.proposing, 0, PROPOSING), numbers(call.predictions, INTS)
        start, stop = bounds[place], bounds[place + 1]
        if stop > start:
            asked.row = run.row
            asked.first_layer = run.layer + 1
            asked.tokens = run.tokens_here
            keys = numbers(asked.keys, INTS)
            for proposed in range(invoke(call.propose, call.proposing, start, stop)):
                first_event = run.number - run.layer
                hint(run, keys[proposed], 0, first_event, run.layer, ready_s, -1)
    elif call.proposed:
        bounds = numbers(call.proposed_bounds, INTS)
        keys, levels = numbers(call.proposed, INTS), numbers(call.proposed_levels, INTS)
        first_event = run.number - run.layer
        for proposed in range(bounds[place], bounds[place + 1]):
            level = levels[proposed] if call.proposed_levels else 0
            hint(run, keys[proposed], level, first_event, run.layer, ready_s, -1)


def hint(
    run: Run, key: int, level: int, first_event: int, after: int, ready_s: float, batch: int
) -> None:
    """Queue a prefetch; note a prediction of a key already resident.

    `first_event` is the number of the pass's first event; layers up to `after` are for the next
    pass. Consecutive prefetches of one `batch` with no gap between them share one latency.
    """
    slot = at(run.slots, key, SLOT)
    layer = at(run.layers, slot.home, LAYER)
    if slot.predicted != layer.epoch:
        slot.predicted = layer.epoch
        layer.num_predicted += 1
    if at(run.experts, key, EXPERT).resident:
        note_hint(run, key)
        notify(run, HINTED, key)
    elif not slot.arriving and slot.due < 0:
        due = 0
        if not run.fifo:
            due = first_event + slot.home + (run.num_layers if slot.home <= after else 0)
        slot.queued_level = level
        slot.batch = batch
        enqueue(run, key, due, ready_s)


def queue_of(run: Run, due: int) -> Layer:
    """Return the row that has the queue of an event."""
    return at(run.layers, due % (run.num_layers + 1), LAYER)


def enqueue(run: Run, key: int, due: int, ready_s: float) -> None:
    """Queue a prefetch for event `due`, to start at `ready_s` or later."""
    slot, queue = at(run.slots, key, SLOT), queue_of(run, due)
    if run.queued == 0 or due < run.earliest:
        run.earliest = due
    run.queued += 1
    slot.due = due
    slot.earliest_s = ready_s
    slot.previous = queue.queue_last
    slot.next = -1
    if queue.queue_last >= 0:
        at(run.slots, queue.queue_last, SLOT).next = key
    else:
        queue.queue_first = key
    queue.queue_last = key


def head(run: Run) -> int:
    """Return the key of the next queued prefetch, or -1."""
    if run.queued == 0:
        return -1
    while queue_of(run, run.earliest).queue_first < 0:
        run.earliest += 1
    return queue_of(run, run.earliest).queue_first


def withdraw(run: Run, key: int) -> None:
    """Take a prefetch off its queue."""
    slot = at(run.slots, key, SLOT)
    queue = queue_of(run, slot.due)
    if slot.previous >= 0:
        at(run.slots, slot.previous, SLOT).next = slot.next
    else:
        queue.queue_first = slot.next
    if slot.next >= 0:
        at(run.slots, slot.next, SLOT).previous = slot.previous
    else:
        queue.queue_last = slot.previous
    slot.due = -1
    run.queued -= 1


def cancel_due(run: Run, number: int) -> None:
    """Drop the queued prefetches of events up to this one."""
    while run.queued and run.earliest <= number:
        queue = queue_of(run, run.earliest)
        while queue.queue_first >= 0 and at(run.slots, queue.queue_first, SLOT).due == run.earliest:
            withdraw(run, queue.queue_first)
        run.earliest += 1


def drain(run: Run, until: float, mark: int) -> None:
    """Let the link work through its prefetches up to a time.

    A transfer that could start at this very instant is left: a demand at that instant goes first.
    """
    while is_active(run):
        if run.inflight >= 0:
            if run.busy_until > until:
                return
            land(run)
        key = head(run)
        if key < 0:
            return
        slot = at(run.slots, key, SLOT)
        start_s = max(slot.earliest_s, run.busy_until)
        if start_s >= until:
            return
        if not begin(run, key, start_s, mark):
            # All other residents are in use until then.
            slot.earliest_s = until
            return


def begin(run: Run, key: int, start_s: float, mark: int) -> bool:
    """Begin a queued prefetch, or withdraw it if resident; False where no room can be made."""
    slot = at(run.slots, key, SLOT)
    if at(run.experts, key, EXPERT).resident:
        withdraw(run, key)
        return True
    if not reserve(run, key, mark):
        return False
    joins = slot.batch >= 0 and slot.batch == run.open_batch and start_s <= run.busy_until
    transfer(run, slot.home, slot.level, start_s, joins, key)
    run.open_batch = slot.batch
    run.inflight = key
    return True


def reserve(run: Run, key: int, mark: int) -> bool:
    """Take a prefetch whose transfer begins off its queue; its bytes are reserved from now on."""
    slot = at(run.slots, key, SLOT)
    nbytes = at(run.levels, slot.home * run.num_levels + slot.queued_level, LEVEL).size_bytes
    if not make_room(run, key, nbytes, mark):
        return False
    withdraw(run, key)
    slot.level = slot.queued_level
    slot.arriving = 1
    take_bytes(run, slot.home, slot.level)
    return True


def land(run: Run) -> None:
    """Make the prefetch in flight resident."""
    key, run.inflight = run.inflight, -1
    slot = at(run.slots, key, SLOT)
    if run.load_overhead_s:
        run.loaded_bytes += at(
            run.levels, slot.home * run.num_levels + slot.level, LEVEL
        ).size_bytes
    slot.arriving = 0
    insert(run, key, slot.level, True)


def drain_fifo(run: Run) -> float:
    """Move the prefetches issued before the event's demands, as a fifo link does.

    If every demand is pending these are the ones up to the last demand, else all that are queued. A
    prefetch that finds no room is dropped. Returns the arrival of the last pending demand, or 0.
    """
    ready_s, waits, absent, mark = 0.0, 0, False, run.mark
    demands = numbers(run.demands, INTS)
    for place in range(run.num_demands):
        slot = at(run.slots, demands[place], SLOT)
        if slot.arriving or slot.due >= 0:
            waits += 1
        else:
            absent = True
    while is_active(run) and (absent or waits > 0):
        key = run.inflight
        if key >= 0:
            if at(run.slots, key, SLOT).demanded == mark:
                ready_s = run.busy_until
                waits -= 1
            land(run)
            continue
        key = head(run)
        slot = at(run.slots, key, SLOT)
        start_s, was_demanded = max(slot.earliest_s, run.busy_until), slot.demanded == mark
        if not begin(run, key, start_s, mark):
            waits -= was_demanded
            withdraw(run, key)
        elif run.inflight != key:
            waits -= was_demanded  # It was resident already.
    return ready_s
