"""Experts moved side by side, executed as they arrive, or executed by the host.

Where the profile has several lanes, or experts are read by projections, an event's demands move
together over the lanes. Prefetches go one at a time, at the rate of one request. The host is a
second server: like the link it serves one at a time, one expert on all its cores. Experts that it
executes do not become resident; the activations cross the link to the host and back.
"""

from __future__ import annotations

from lm_eval_moecache.engine.kernel.cache import insert, is_missing, make_room, take_bytes
from lm_eval_moecache.engine.kernel.clock import (
    HOST,
    LOADS,
    add_span,
    await_link,
    execute_level,
    wait_until,
)
from lm_eval_moecache.engine.kernel.link import drain, is_active, land, occupy, transfer
from lm_eval_moecache.engine.kernel.state import EXPERT, LEVEL, SLOT, Call, Counts, Level, Run
from lm_eval_moecache.records.memory import DOUBLES, INTS, at, numbers

ALWAYS, FIRST, BALANCED = 1, 2, 3
"""Rules that give the host its share."""
WAITING, MOVING, DONE = 0.0, 1.0, 2.0


def share_of(run: Run, read: int) -> float:
    """Return the share of an expert's weights that a read brings.

    An expert has three projections of equal size: gate, up, down. With two reads, as in engines
    that keep gate and up in one tensor, the first brings two of the three.
    """
    if run.reads == 2:
        return 1 / 3 if read else 2 / 3
    return 1 / run.reads


def move_together(run: Run, first: int, stop: int, mark: int, ready_s: float) -> float:
    """Move demands over the lanes from `ready_s` on; return when all are there.

    They are those that wait among `first` to `stop`. The first projection of every expert goes
    first.
    """
    demands, values = numbers(run.demands, INTS), numbers(run.requests, DOUBLES)
    count, nbytes = 0, 0
    for place in range(first, stop):
        count += at(run.slots, demands[place], SLOT).moving
    if not count:
        return ready_s
    request = 0
    for read in range(run.reads):
        for place in range(first, stop):
            slot = at(run.slots, demands[place], SLOT)
            if slot.moving:
                size = at(run.levels, slot.home * run.num_levels + slot.level, LEVEL).size_bytes
                nbytes += 0 if read else size
                values[request] = size * share_of(run, read)
                request += 1
    start_s = ready_s if ready_s > run.busy_until else run.busy_until
    last_s = serve_requests(run, request)
    request, arrivals = 0, numbers(run.arrivals, DOUBLES)
    for read in range(run.reads):
        for place in range(first, stop):
            slot = at(run.slots, demands[place], SLOT)
            if slot.moving:
                expert = demands[place] - slot.home * run.num_experts
                arrivals[expert * run.reads + read] = start_s + values[request]
                slot.arrives = mark
                slot.moving = 0 if read == run.reads - 1 else 1
                request += 1
    run.open_batch = -1
    run.busy_until = start_s + last_s
    run.busy_s += run.busy_until - start_s
    run.moved += nbytes
    run.transfers += count
    if run.spans:
        add_span(run, LOADS, start_s, run.busy_until, nbytes, -1)
    return max(ready_s, run.busy_until)


def serve_requests(run: Run, count: int) -> float:
    """Serve requests of some bytes over the lanes; return when the last one arrives.

    Each one's bytes become its arrival time, in seconds from the start of the first. Requests are
    served in order, up to `lanes` at once. Each waits its latency, then moves at `lane_rate` or at
    its share of `link_rate`, whichever is lower. Cost: O(requests x lanes).
    """
    values, now, last_s = numbers(run.requests, DOUBLES), 0.0, 0.0
    begun = busy = moving = low = 0
    while begun < count or busy:
        while begun < count and busy < run.lanes:
            values[count + begun] = run.latency_s
            values[2 * count + begun] = WAITING
            begun += 1
            busy += 1
        rate = min(run.lane_rate, run.link_rate / max(moving, 1))
        best, step_s = -1, 0.0
        for request in range(low, begun):
            left, state = values[count + request], values[2 * count + request]
            seconds = left / rate if state == MOVING else left
            if state != DONE and (best < 0 or seconds < step_s):
                best, step_s = request, seconds
        now += step_s
        for request in range(low, begun):
            values[count + request] -= (
                rate * step_s if values[2 * count + request] == MOVING else step_s
            )
        if values[2 * count + best] == WAITING:
            values[2 * count + best] = MOVING
            values[count + best] = values[best]
            moving += 1
        else:
            values[2 * count + best] = DONE
            values[best] = now
            last_s = max(last_s, now)  # by rounding, a later one may end a little earlier
            moving -= 1
            busy -= 1
        while low < begun and values[2 * count + low] == DONE:
            low += 1
    return last_s


def note_arrived(run: Run, mark: int, ready_s: float) -> None:
    """Note when the demands arrived that a prefetch has brought."""
    demands, arrivals = numbers(run.demands, INTS), numbers(run.arrivals, DOUBLES)
    for place in range(run.num_demands):
        key = demands[place]
        if not is_missing(run, key, mark):
            at(run.slots, key, SLOT).arrives = mark
            first = (key - run.layer * run.num_experts) * run.reads
            for read in range(run.reads):
                arrivals[first + read] = ready_s


def execute_piecewise(run: Run, mark: int, count: Counts) -> None:
    """Execute projection by projection: residents first, the others as each read arrives."""
    keys, arrivals = numbers(run.keys, INTS), numbers(run.arrivals, DOUBLES)
    launched, base = False, run.layer * run.num_experts
    for read in range(run.reads):
        share, present, served, coming = share_of(run, read), 0, 0, 0
        for place in range(run.num_keys):
            slot = at(run.slots, keys[place], SLOT)
            if slot.done != mark and slot.arrives == mark:
                coming += 1
            elif slot.done != mark:
                present += 1
                served += slot.serves
        execute_level(run, 0, present, served, share, launched)
        launched |= present > 0
        last, last_s = -1, -1.0
        for _ in range(coming):
            best, best_s = -1, 0.0
            for place in range(run.num_keys):
                key = keys[place]
                slot, time_s = at(run.slots, key, SLOT), arrivals[(key - base) * run.reads + read]
                is_next = time_s > last_s or (time_s == last_s and key > last)
                is_next = is_next and slot.done != mark and slot.arrives == mark
                if is_next and (best < 0 or time_s < best_s or (time_s == best_s and key < best)):
                    best, best_s = key, time_s
            last, last_s = best, best_s
            await_link(run, best_s, count)
            execute_level(run, 0, 1, at(run.slots, best, SLOT).serves, share, launched)
            launched = True


def share_out(run: Run, mark: int, now: float, link_s: float) -> None:
    """Give the host its part of the event, with a link that is free from some time on.

    - `ALWAYS`: all that is missing (llama.cpp's expert offload, ktransformers).
    - `FIRST`: each expert on its own goes where it would end first with everything idle: to the
      host and back, or over the link to the device (Fiddler, algorithm 1). Ties go to the link,
      because a loaded expert stays.
    - `BALANCED`: host and link at once. The host takes the cheapest expert left, the link the most
      expensive, whichever would end first (HybriMoE's intra-layer schedule, without its moving of
      resident experts to an idle host). Ties go to the link.
    """
    demands, queue, waiting = numbers(run.demands, INTS), numbers(run.spare, INTS), 0
    level = at(run.levels, run.layer * run.num_levels, LEVEL)
    load_s = run.latency_s + level.size_bytes / run.link_rate
    crossing_s = run.latency_s + activations(run, run.tokens_here) / run.link_rate + run.way_s
    for place in range(run.num_demands):
        key = demands[place]
        slot = at(run.slots, key, SLOT)
        if slot.arriving or not is_missing(run, key, mark):
            continue
        slot.host_s = max(level.host_flop_s * slot.serves, level.host_read_s) + level.host_fixed_s
        device_s = device_seconds(level, slot.serves)
        if run.host == ALWAYS:
            slot.done = mark
        elif run.host == FIRST:
            if crossing_s + crossing_s + slot.host_s < load_s + device_s:
                slot.done = mark
        else:
            behind = waiting
            while behind > 0 and is_dearer(run, queue[behind - 1], key):
                queue[behind] = queue[behind - 1]
                behind -= 1
            queue[behind] = key
            waiting += 1
    if not waiting:
        return
    device_s, link_s = now, max(now, link_s)
    host_s, low, high = max(now + crossing_s, run.host_until), 0, waiting - 1
    while low <= high:
        cheap, costly = at(run.slots, queue[low], SLOT), at(run.slots, queue[high], SLOT)
        arrives_s = link_s + load_s
        by_link_s = max(arrives_s, device_s) + device_seconds(level, costly.serves)
        if host_s + cheap.host_s + crossing_s < by_link_s:
            cheap.done = mark
            host_s += cheap.host_s
            low += 1
        else:
            link_s, device_s = arrives_s, by_link_s
            high -= 1


def device_seconds(level: Level, tokens: int) -> float:
    """Return the seconds in which the device would execute one expert for some tokens."""
    return max(level.flop_s * tokens, level.read_s) + level.fixed_s


def is_dearer(run: Run, key: int, other: int) -> bool:
    """Whether a key takes the host longer than another; ties by key."""
    own_s, other_s = at(run.slots, key, SLOT).host_s, at(run.slots, other, SLOT).host_s
    return own_s > other_s or (own_s == other_s and key > other)


def count_host(run: Run, mark: int, count: Counts) -> float:
    """Count what the host executes, in `wave_keys` and `wave_served`; return its seconds."""
    demands, seconds, run.wave_keys, run.wave_served = numbers(run.demands, INTS), 0.0, 0, 0
    for place in range(run.num_demands):
        slot = at(run.slots, demands[place], SLOT)
        if slot.done == mark:
            seconds += slot.host_s
            run.wave_keys += 1
            run.wave_served += slot.serves
            slot.executed_level = 0
            at(run.experts, demands[place], EXPERT).ran_below_best_precision = 0
    count.host_executed += run.wave_served
    return seconds


def begin_host(run: Run, call: Call, mark: int, count: Counts) -> None:
    """Send the activations of what is marked as the host's, which then goes in order of need."""
    experts, base = numbers(call.executed, INTS), run.layer * run.num_experts
    seconds, tokens = count_host(run, mark, count), 0
    if not run.wave_keys:
        return
    for start in range(run.first_entry, run.end_entry, run.top_k):
        sent = 0
        for entry in range(start, start + run.top_k):
            if experts[entry] >= 0 and at(run.slots, base + experts[entry], SLOT).done == mark:
                sent = 1
        tokens += sent
    run.sent_bytes = activations(run, tokens)
    begun_s = max(carry(run, run.now), run.host_until)
    run.host_until = begun_s + seconds
    count.host_s += seconds
    if run.spans:
        add_span(run, HOST, begun_s, run.host_until, run.layer, run.wave_keys)


def activations(run: Run, tokens: int) -> int:
    """Return the bytes of some tokens' activations."""
    return int(tokens * run.hidden_size * run.element_bytes)


def carry(run: Run, now: float) -> float:
    """Move activations, which are not counted as a transfer of experts; return the arrival."""
    run.open_batch = -1
    seconds = run.sent_bytes / run.lane_rate + run.latency_s
    return occupy(run, now, seconds, run.sent_bytes, -1)


def end_host(run: Run, mark: int, count: Counts) -> None:
    """Let prefetches use the link until the host is done, then send its outputs back.

    The compute waits for them. Some of the experts that the host executed (`uploads`) are then
    loaded without waiting for them.
    """
    if is_active(run):
        drain(run, run.host_until, run.mark)
        if run.inflight >= 0:
            # It is not interrupted; the outputs follow it.
            land(run)
    count.host_wait_s += wait_until(run, carry(run, run.host_until))
    run.sent_bytes = -1
    nbytes = at(run.levels, run.layer * run.num_levels, LEVEL).size_bytes
    demands = numbers(run.demands, INTS)
    for place in range(min(run.uploads, run.num_demands)):
        key = demands[place]
        slot = at(run.slots, key, SLOT)
        if at(run.experts, key, EXPERT).resident or slot.arriving:
            continue  # A prefetch loaded it while the host computed.
        if not make_room(run, key, nbytes, run.mark):
            return
        slot.uploaded_s = transfer(run, run.layer, 0, run.now, False, -1)
        run.loaded_bytes += nbytes if run.load_overhead_s else 0
        take_bytes(run, run.layer, 0)
        insert(run, key, 0, False)
