"""The link: transfers, and the queue of prefetches."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.algorithms.features import Rank, note_hint
from lm_eval_moecache.engine.core.cache import HINTED, insert, make_room, notify, take_bytes
from lm_eval_moecache.engine.core.clock import wait_until
from lm_eval_moecache.engine.core.state import IN_PYTHON, BatchEvent, Keys, RunState, State
from lm_eval_moecache.records.jit import Array


def is_active(run: RunState) -> bool:
    """Whether a prefetch is in flight or queued."""
    return run.inflight >= 0 or run.queued > 0


def transfer(
    state: State, layer: int, level: int, now: float, joins: bool, prefetched: int
) -> float:
    """Move an expert of a layer from `now` on or once the link is free; return its arrival.

    A transfer that `joins` the previous one in a batch pays no latency of its own. `prefetched` is
    the key of a prefetch, else -1.
    """
    size, run = state.levels[layer * state.run[0].num_levels + level], state.run[0]
    carry_s = size.move_s
    if not joins:
        carry_s += run.latency_s
        run.open_batch = -1
    run.transfers += 1
    return occupy(state, now, carry_s, size.nbytes, prefetched)


def occupy(state: State, now: float, carry_s: float, nbytes: int, prefetched: int) -> float:
    """Occupy the link for some seconds from `now` on or once it is free; return when it ends."""
    run = state.run[0]
    start_s = now if now > run.busy_until else run.busy_until
    run.busy_until = start_s + carry_s
    run.busy_s += carry_s
    run.moved += nbytes
    if IN_PYTHON and run.recorded:
        state.outside.add_span("transfer", start_s, run.busy_until, nbytes, prefetched)
    return run.busy_until


def submit(state: State, event: BatchEvent, ready_s: float) -> None:
    """Queue the prefetches proposed at an event."""
    batch, first_event = event.batch, event.number - event.layer
    start, stop = batch.proposed_bounds[event.place], batch.proposed_bounds[event.place + 1]
    proposed = Keys(batch.proposed, start, stop)
    submit_keys(state, proposed, batch.proposed_levels, first_event, event.layer, ready_s, -1)


def submit_keys(
    state: State,
    proposed: Keys,
    levels: Array,
    first_event: int,
    after: int,
    ready_s: float,
    batch: int,
) -> None:
    """Queue prefetches; note a prediction of the keys already resident.

    `first_event` is the number of the pass's first event, and `levels` are by place in the array of
    keys. Those of layers up to `after` are for the next pass. Consecutive prefetches of one `batch`
    with no gap between them share one latency.
    """
    run, num_layers = state.run[0], len(state.layers)
    for place in range(proposed.start, proposed.stop):
        key = proposed.keys[place]
        slot = state.slots[key]
        home = slot.home
        predicted = state.layer_states[home]
        if slot.predicted != predicted.epoch:
            slot.predicted = predicted.epoch
            predicted.num_predicted += 1
        if state.experts[key].resident:
            note_hint(state, key, home)
            if run.own:
                notify(state, HINTED, key)
        elif not slot.arriving and slot.due < 0:
            due = 0
            if not run.fifo:
                due = first_event + home + (num_layers if home <= after else 0)
            slot.queued_level = levels[place] if run.num_levels > 1 else 0
            slot.batch = batch
            enqueue(state, key, due, ready_s)


def enqueue(state: State, key: int, due: int, ready_s: float) -> None:
    """Queue a prefetch for event `due`, to start at `ready_s` or later."""
    run, slot, queue = state.run[0], state.slots[key], state.queues[due % len(state.queues)]
    if run.queued == 0 or due < run.earliest:
        run.earliest = due
    run.queued += 1
    slot.due, slot.earliest_s = due, ready_s
    slot.previous, slot.next = queue.last, -1
    if queue.last >= 0:
        state.slots[queue.last].next = key
    else:
        queue.first = key
    queue.last = key


def head(state: State) -> int:
    """Return the key of the next queued prefetch, or -1."""
    run = state.run[0]
    if run.queued == 0:
        return -1
    while state.queues[run.earliest % len(state.queues)].first < 0:
        run.earliest += 1
    return state.queues[run.earliest % len(state.queues)].first


def withdraw(state: State, key: int) -> None:
    """Take a prefetch off its queue."""
    slot = state.slots[key]
    queue = state.queues[slot.due % len(state.queues)]
    if slot.previous >= 0:
        state.slots[slot.previous].next = slot.next
    else:
        queue.first = slot.next
    if slot.next >= 0:
        state.slots[slot.next].previous = slot.previous
    else:
        queue.last = slot.previous
    slot.due = -1
    state.run[0].queued -= 1


def cancel_due(state: State, number: int) -> None:
    """Drop the queued prefetches of events up to this one."""
    run = state.run[0]
    while run.queued and run.earliest <= number:
        queue = state.queues[run.earliest % len(state.queues)]
        while queue.first >= 0 and state.slots[queue.first].due == run.earliest:
            withdraw(state, queue.first)
        run.earliest += 1


def drain(state: State, rank: Rank, until: float, mark: int, layer: int) -> None:
    """Let the link work through its prefetches up to a time.

    A transfer that could start at this very instant is left: a demand at that instant goes first.
    """
    run = state.run[0]
    while is_active(run):
        if run.inflight >= 0:
            if run.busy_until > until:
                return
            land(state)
        key = head(state)
        if key < 0:
            return
        start_s = max(state.slots[key].earliest_s, run.busy_until)
        if start_s >= until:
            return
        if not begin(state, rank, key, start_s, mark, layer):
            # All other residents are in use until then.
            state.slots[key].earliest_s = until
            return


def begin(state: State, rank: Rank, key: int, start_s: float, mark: int, layer: int) -> bool:
    """Begin a queued prefetch, or withdraw it if resident; False where no room can be made."""
    run, slot = state.run[0], state.slots[key]
    home, level = slot.home, slot.queued_level
    cache, nbytes = state.layers[home].cache, state.levels[home * run.num_levels + level].nbytes
    if state.experts[key].resident:
        withdraw(state, key)
        return True
    if not make_room(state, rank, key, nbytes, cache, mark, layer):
        return False
    reserve(state, key)
    joins = slot.batch >= 0 and slot.batch == run.open_batch and start_s <= run.busy_until
    transfer(state, home, level, start_s, joins, key)
    run.open_batch, run.inflight = slot.batch, key
    return True


def reserve(state: State, key: int) -> None:
    """Take a prefetch whose transfer begins off its queue; its bytes are reserved from now on."""
    slot = state.slots[key]
    withdraw(state, key)
    slot.level, slot.arriving = slot.queued_level, 1
    level = state.levels[slot.home * state.run[0].num_levels + slot.level]
    take_bytes(state, state.layers[slot.home].cache, level.nbytes)


def land(state: State) -> None:
    """Make the prefetch in flight resident."""
    run = state.run[0]
    key = run.inflight
    run.inflight = -1
    slot = state.slots[key]
    if run.load_overhead_s:
        run.loaded_bytes += state.levels[slot.home * run.num_levels + slot.level].nbytes
    arrive(state, key)


def arrive(state: State, key: int) -> None:
    """Make a key resident whose prefetch has arrived."""
    slot = state.slots[key]
    slot.arriving = 0
    insert(state, key, slot.home, slot.level, True)


def drain_fifo(state: State, rank: Rank, demands: Keys, mark: int, layer: int) -> float:
    """Move the prefetches issued before these demands, as a fifo link does.

    If every demand is pending these are the ones up to the last demand, else all that are queued. A
    prefetch that finds no room is dropped. Returns the arrival of the last pending demand, or 0.
    """
    run = state.run[0]
    ready_s, waits, absent = 0.0, 0, False
    for place in range(demands.start, demands.stop):
        key = demands.keys[place]
        if state.slots[key].demanded == mark:
            pending = state.slots[key].arriving != 0 or state.slots[key].due >= 0
            waits += pending
            absent = absent or not pending
    while is_active(run) and (absent or waits > 0):
        key = run.inflight
        if key >= 0:
            if state.slots[key].demanded == mark:
                ready_s = run.busy_until
                waits -= 1
            land(state)
            continue
        key = head(state)
        start_s = max(state.slots[key].earliest_s, run.busy_until)
        was_demanded = state.slots[key].demanded == mark
        if not begin(state, rank, key, start_s, mark, layer):
            waits -= was_demanded
            withdraw(state, key)
        elif run.inflight != key:
            waits -= was_demanded  # It was resident already.
    return ready_s


def flush(state: State) -> None:
    """Empty the link: drop queued prefetches and land the one in flight; forget predictions."""
    run = state.run[0]
    for place in range(len(state.queues)):
        state.queues[place].first = state.queues[place].last = -1
    for home in range(len(state.layer_states)):
        state.layer_states[home].num_predicted = 0
        state.layer_states[home].epoch += 1
    for key in range(len(state.slots)):
        state.slots[key].due = -1
    run.queued = 0
    if run.inflight >= 0:
        wait_until(state, run.busy_until)
        land(state)
