"""One event, from its layer's dense part to the end of its last expert."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from lm_eval_moecache.engine.kernel.cache import (
    EXECUTED,
    NOTED,
    RELEASED,
    WAVE,
    insert,
    is_missing,
    make_room,
    notify,
    pin,
    release,
    take_bytes,
)
from lm_eval_moecache.engine.kernel.clock import (
    DENSE,
    add_span,
    await_link,
    charge_loads,
    execute,
    wait_until,
)
from lm_eval_moecache.engine.kernel.lanes import (
    begin_host,
    count_host,
    end_host,
    execute_piecewise,
    move_together,
    note_arrived,
    share_out,
)
from lm_eval_moecache.engine.kernel.link import (
    cancel_due,
    drain,
    drain_fifo,
    head,
    is_active,
    land,
    reserve,
    submit,
    transfer,
    withdraw,
)
from lm_eval_moecache.engine.kernel.ranking import cache_of, note_event, note_next_uses
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
from lm_eval_moecache.records.memory import FLOATS, INTS, at, numbers

LANDED, TAKEN_BACK, CANCEL, HOST, RELEASE, LOAD, WAVE_ENDED, ENDED, SUBMIT, NEXT, RESERVE = range(
    11
)
"""The call's keys have arrived; the first one's prefetch is taken back; drop prefetches up to event
`number`; give the host its part, `seconds` after which the link is free; release what is demanded
at a better level; load demands from `number` on; a wave of the event has been executed; its last
one has; queue what is proposed; find the next queued prefetch; begin that of the first key."""


def enter(run: Run, attention_s: float) -> None:
    """Charge the layer's dense part, up to its router's decision, while the link works on."""
    layer, start_s = at(run.layers, run.layer, LAYER), run.now
    flop_s = layer.flop_s * run.tokens_here
    dense_s = (flop_s if flop_s > layer.read_s else layer.read_s) + layer.overhead_s + attention_s
    run.now += dense_s
    if run.spans:
        add_span(run, DENSE, start_s, run.now, run.layer, run.tokens_here)
    drain(run, run.now, -1)
    charge_loads(run)


def predicting_s(run: Run, call: Call) -> float:
    """Return the seconds of predicting from the layer's input, by gates or by a network."""
    layer = at(run.layers, run.layer, LAYER)
    if run.predictor and run.layer == run.num_layers - 1 and not call.last_predicts:
        return 0.0
    flop_s = layer.predict_flop * run.tokens_here / run.peak_flops
    return max(flop_s, layer.predict_read_s) + layer.predict_overhead_s


def collect(run: Run, call: Call, experts_at: int, keys_at: int) -> int:
    """Pin what the event's tokens need, under a new mark; return how many keys these are.

    Writes the keys, in order of first need, how many tokens each serves, and the best level that
    they require.
    """
    experts, keys = numbers(experts_at, INTS), numbers(keys_at, INTS)
    run.mark += 1
    found, base = 0, run.layer * run.num_experts
    for entry in range(run.first_entry, run.end_entry):
        if experts[entry] >= 0:
            key = base + experts[entry]
            expert, slot = at(run.experts, key, EXPERT), at(run.slots, key, SLOT)
            level = numbers(call.levels, INTS)[entry] if call.levels else 0
            if expert.pinned != run.mark:
                expert.pinned = run.mark
                slot.serves = 0
                slot.required = level
                keys[found] = key
                found += 1
            slot.serves += 1
            slot.required = min(slot.required, level)
    at(run.layers, run.layer, LAYER).stale = 1
    return found


def look_up(run: Run, call: Call, count: Counts) -> int:
    """Count what is there of the event's keys, and score the predictions for the layer.

    Returns how many keys are absent.
    """
    keys, layer = numbers(run.keys, INTS), at(run.layers, run.layer, LAYER)
    absent = right = 0
    for place in range(run.num_keys):
        key = keys[place]
        slot = at(run.slots, key, SLOT)
        if not at(run.experts, key, EXPERT).resident:
            absent += 1
            count.token_misses += slot.serves
            if slot.arriving or slot.due >= 0:
                count.late += 1
            else:
                count.misses += 1
                count.collisions += slot.left_in == run.pass_index
        count.prefetch_hits += slot.unused
        slot.unused = 0
        right += slot.predicted == layer.epoch
    count.requests += run.num_keys
    count.token_requests += run.tokens_here * run.top_k
    if layer.num_predicted:
        count.predicted += layer.num_predicted
        count.predicted_right += right
        count.predictable += run.num_keys
        layer.epoch += 1
        layer.num_predicted = 0
    return absent


def decide(run: Run, call: Call, count: Counts) -> None:
    """Look up the event's keys, and demand those to be loaded of what is executed.

    What is executed stands in `keys` afterwards.
    """
    run.num_keys = collect(run, call, call.looked_up, run.keys)
    absent = look_up(run, call, count)
    is_changed = call.executed != call.looked_up
    if call.experts:
        count_changes(run, call, absent, count)
    num_executed = run.num_keys
    if is_changed:
        num_executed = collect(run, call, call.executed, run.spare)
    keys, demands, spare = numbers(run.keys, INTS), numbers(run.demands, INTS), run.spare
    run.num_demands = 0
    for place in range(run.num_keys):
        key = keys[place]
        expert, slot = at(run.experts, key, EXPERT), at(run.slots, key, SLOT)
        if is_changed and expert.pinned != run.mark:
            count.avoided += not expert.resident
        elif not expert.resident or (call.upgrades and slot.level > slot.required):
            slot.demanded = run.mark
            slot.demanded_level = slot.required
            demands[run.num_demands] = key
            run.num_demands += 1
    if is_changed:
        others = numbers(spare, INTS)
        for place in range(num_executed):
            slot = at(run.slots, others[place], SLOT)
            if not at(run.experts, others[place], EXPERT).resident and slot.demanded != run.mark:
                slot.demanded = run.mark
                slot.demanded_level = slot.required
                demands[run.num_demands] = others[place]
                run.num_demands += 1
        run.spare = run.keys
        run.keys = spare
        run.num_keys = num_executed


def count_changes(run: Run, call: Call, absent: int, count: Counts) -> None:
    """Count how what is executed differs from what the router chose, token by token."""
    chosen, weights = numbers(call.experts, INTS), numbers(call.weights, FLOATS)
    looked_up, executed = numbers(call.looked_up, INTS), numbers(call.executed, INTS)
    changes = 0
    for start in range(run.first_entry, run.end_entry, run.top_k):
        total, lost = 0.0, 0.0
        for entry in range(start, start + run.top_k):
            kept = faithful = 0
            for other in range(start, start + run.top_k):
                kept += executed[other] == chosen[entry]
                faithful += chosen[other] == executed[entry]
            if call.weights:
                total += weights[entry]
                lost += 0.0 if kept else weights[entry]
            changes += executed[entry] != chosen[entry]
            if executed[entry] < 0:
                count.dropped += 1
            else:
                count.substituted += looked_up[entry] >= 0 and looked_up[entry] != executed[entry]
                count.unfaithful += faithful == 0
        count.lost_weight += lost / max(total, 1e-20)
    if call.weights and (absent or changes):
        count.weighed_tokens += run.tokens_here


def close_event(run: Run, call: Call, place: int, count: Counts) -> None:
    """Load what is demanded, execute the event, and let the link work through its prefetches."""
    mark, rest, assignments = run.mark, run.num_keys, 0
    keys = numbers(run.keys, INTS)
    for number in range(run.num_keys):
        assignments += at(run.slots, keys[number], SLOT).serves
    gate_s, ready_s, predict_s = run.now, run.now, predicting_s(run, call)
    if run.num_demands:
        ready_s = await_in_flight(run, mark)
        if run.host:
            share_out(run, mark, run.now, run.busy_until)
            begin_host(run, call, mark, count)
            rest, assignments = rest - run.wave_keys, assignments - run.wave_served
        if run.num_levels > 1 or run.load_overhead_s:
            ready_s = prepare_loads(run, mark, ready_s)
        ready_s = load(run, call, mark, ready_s, count)
        rest, assignments = rest - run.wave_keys, assignments - run.wave_served
        if run.cached_first:
            # The compute is busy from here on: predictions do not hide behind the wait.
            wait_until(run, run.now + predict_s)
            mark_executed(run, mark, True)
            execute(run, run.wave_keys, run.wave_served, count)
            rest, assignments = rest - run.wave_keys, assignments - run.wave_served
    if run.uploads:
        await_uploads(run, count)
    if run.queued and not run.fifo:
        cancel_due(run, run.number)
    if run.num_demands and not run.piecewise:
        await_link(run, ready_s, count)
    if run.prefetches:
        ready_s = gate_s + predict_s
        if not run.after_layer:
            submit(run, call, place, ready_s)
        wait_until(run, ready_s)
    if run.num_demands and run.piecewise:
        execute_piecewise(run, mark, count)
    else:
        if run.num_levels > 1:
            mark_executed(run, mark, False)
            rest, assignments = run.wave_keys, run.wave_served
        execute(run, rest, assignments, count)
    if run.mark != mark:
        pin(run)  # After waves, all keys of the event are pinned again.
    if run.sent_bytes >= 0:
        end_host(run, mark, count)
    if run.prefetches:
        if run.after_layer:
            submit(run, call, place, run.now)
        drain(run, run.now, run.mark)
    note(run, call)


def await_in_flight(run: Run, mark: int) -> float:
    """Land what precedes the demands; return when the last of it that is needed arrives."""
    ready_s = run.now
    if not is_active(run) or (not run.fifo and run.inflight < 0):
        return ready_s
    if run.fifo:
        ready_s = max(ready_s, drain_fifo(run))
    else:
        # It lands before any demand can start, while the compute waits.
        if at(run.experts, run.inflight, EXPERT).pinned == mark:
            ready_s = run.busy_until
        land(run)
    keys = numbers(run.keys, INTS)
    for place in range(run.num_keys):
        at(run.slots, keys[place], SLOT).unused = 0
    if run.lanes:
        note_arrived(run, mark, ready_s)
    return ready_s


def prepare_loads(run: Run, mark: int, ready_s: float) -> float:
    """Release what is loaded at a better level, and charge the compute for all that is loaded."""
    demands = numbers(run.demands, INTS)
    for place in range(run.num_demands):
        key = demands[place]
        if is_missing(run, key, mark):
            slot = at(run.slots, key, SLOT)
            if at(run.experts, key, EXPERT).resident:
                release(run, key)
                slot.upgrading = 1
                if run.wall:
                    notify(run, RELEASED, key)
                cache_of(run, run.layer).replaced += 1
            if run.load_overhead_s:
                level = run.layer * run.num_levels + slot.demanded_level
                run.loaded_bytes += at(run.levels, level, LEVEL).size_bytes
    charge_loads(run)
    return max(ready_s, run.now)


def load(run: Run, call: Call, mark: int, ready_s: float, count: Counts) -> float:
    """Load the demanded keys, in waves where they do not fit together.

    Returns the arrival of the last key; `wave_keys` and `wave_served` are what waves have executed.
    """
    first = all_keys = all_served = 0
    while True:
        stop = load_some(run, first, mark)
        ready_s = move(run, first, stop, mark, ready_s)
        if stop == run.num_demands:
            break
        mark_executed(run, mark, False)
        all_keys, all_served = all_keys + run.wave_keys, all_served + run.wave_served
        await_link(run, ready_s, count)
        execute(run, run.wave_keys, run.wave_served, count)
        ready_s = run.now
        pin_rest(run, call, mark)
        first = stop
    run.wave_keys = all_keys
    run.wave_served = all_served
    return ready_s


def load_some(run: Run, first: int, mark: int) -> int:
    """Make demands from `first` on resident; return the first one without room, or their number."""
    demands = numbers(run.demands, INTS)
    for place in range(first, run.num_demands):
        key = demands[place]
        slot = at(run.slots, key, SLOT)
        if slot.arriving or not is_missing(run, key, mark):
            continue
        level = slot.demanded_level
        size = at(run.levels, run.layer * run.num_levels + level, LEVEL).size_bytes
        if not make_room(run, key, size, run.mark):
            return place
        slot.moving = 1
        take_bytes(run, run.layer, level)
        insert(run, key, level, False)
    return run.num_demands


def move(run: Run, first: int, stop: int, mark: int, ready_s: float) -> float:
    """Move the demands from `first` to `stop` that wait; return when the last arrives."""
    if run.lanes:
        return move_together(run, first, stop, mark, ready_s)
    demands = numbers(run.demands, INTS)
    for place in range(first, stop):
        slot = at(run.slots, demands[place], SLOT)
        if slot.moving:
            slot.moving = 0
            ready_s = transfer(run, run.layer, slot.level, ready_s, False, -1)
    return ready_s


def pin_rest(run: Run, call: Call, mark: int) -> None:
    """After a wave, pin the event's keys that are still to be executed, under a new mark."""
    run.mark += 1
    keys = numbers(run.keys, INTS)
    for place in range(run.num_keys):
        if at(run.slots, keys[place], SLOT).done != mark:
            at(run.experts, keys[place], EXPERT).pinned = run.mark
    if run.offline:
        note_next_uses(run, call, mark)
    at(run.layers, run.layer, LAYER).stale = 1
    notify(run, WAVE, run.layer)


def mark_executed(run: Run, mark: int, undemanded: bool) -> None:
    """Mark resident keys as executed; count keys and assignments in `wave_keys`, `wave_served`.

    `undemanded`: only those that were not demanded.
    """
    keys, run.wave_keys, run.wave_served = numbers(run.keys, INTS), 0, 0
    for place in range(run.num_keys):
        key = keys[place]
        expert, slot = at(run.experts, key, EXPERT), at(run.slots, key, SLOT)
        is_ready = expert.resident and not slot.upgrading
        if undemanded:
            is_ready = slot.demanded != mark
        if is_ready and slot.done != mark:
            slot.done = mark
            if run.wall:
                slot.unused = 0
            run.wave_keys += 1
            run.wave_served += slot.serves
            if run.num_levels > 1:
                slot.executed_level = slot.level
                expert.ran_below_best_precision = slot.level > 0
                level = at(run.levels, slot.home * run.num_levels + slot.level, LEVEL)
                level.num_keys += 1
                level.num_served += slot.serves
            notify(run, EXECUTED, key)


def await_uploads(run: Run, count: Counts) -> None:
    """Wait for those of the event's keys that an upload is bringing."""
    keys, ready_s = numbers(run.keys, INTS), 0.0
    for place in range(run.num_keys):
        slot = at(run.slots, keys[place], SLOT)
        if at(run.experts, keys[place], EXPERT).resident:
            ready_s = max(ready_s, slot.uploaded_s)
            slot.uploaded_s = 0.0
    await_link(run, ready_s, count)


def note(run: Run, call: Call) -> None:
    """Let the evictions learn of the executed event."""
    notify(run, NOTED, run.layer)
    if not run.stateful:
        note_event(run, call)
    run.cursor += run.num_keys


def note_levels(run: Run, call: Call) -> None:
    """Write at which level each entry of the event was executed."""
    experts, levels = numbers(call.executed, INTS), numbers(call.levels, INTS)
    for entry in range(run.first_entry, run.end_entry):
        if experts[entry] >= 0:
            key = run.layer * run.num_experts + experts[entry]
            levels[entry] = at(run.slots, key, SLOT).executed_level


def visit(call: Call, what: int, mark: int) -> int:
    """Do one of these things to a run, whose event in progress has pinned its keys by a mark.

    It is what the wall clock does between the steps of an event, when its transfers arrive.
    """
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
    elif what == WAVE_ENDED:
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
