"""The one door: what is done to the events of a batch, for each row of it."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math

from lm_eval_moecache.engine.kernel.cache import EVENT, PASS, fill, find, notify
from lm_eval_moecache.engine.kernel.clock import wait_until
from lm_eval_moecache.engine.kernel.event import close_event, decide, enter, note_levels
from lm_eval_moecache.engine.kernel.link import drain, hint, is_active
from lm_eval_moecache.engine.kernel.ranking import note_pass
from lm_eval_moecache.engine.kernel.state import ASKED, COUNTS, RUN, Call, Counts, Run
from lm_eval_moecache.records.memory import DOUBLES, INTS, at, invoke, numbers

BEGIN, ENTER, CLOSE, END, SCAN = 1, 2, 4, 8, 16
"""What is done with each pass of a row, and with its events: begin the pass; charge what precedes a
layer's experts; look up, load and execute; end the pass. Of a scanned text each token is a pass of
its own, and layers come one after another: what a pass takes is added up."""
FILL, HINT, ADVANCE, SETTLE = 32, 64, 128, 256
"""What is done with each row instead: fill its empty caches with the call's keys; queue these as
prefetches; let some seconds pass; wait until all prefetches have arrived."""


def serve(call: Call) -> int:
    """Do what a call says, for each of its rows."""
    rows, first_passes = numbers(call.rows, INTS), numbers(call.first_passes, INTS)
    for row in range(call.num_rows):
        run = at(rows[row], 0, RUN)
        if call.what >= FILL:
            settle(run, call)
            continue
        run.row = row
        run.cursor = 0
        for index in range(call.num_passes):
            count = at(call.counts, row * call.num_passes + index, COUNTS)
            serve_pass(run, call, index, first_passes[row] + index, count)
    return 0


def serve_pass(run: Run, call: Call, index: int, number: int, count: Counts) -> None:
    """Serve some layers of a pass with this number in its run."""
    num_layers, attention_s = call.end_layer - call.first_layer, 0.0
    if call.attention_s:
        attention_s = numbers(call.attention_s, DOUBLES)[run.row * call.num_passes + index]
    if call.what & BEGIN:
        run.began_s = run.now
        if not call.what & SCAN:
            count.start_s = run.now
        place = index * num_layers * call.num_rows + run.row
        run.tokens += first_token(call, place + 1) - first_token(call, place)
        note_pass(run, number)
        notify(run, PASS, number)
    for layer in range(call.first_layer, call.end_layer):
        place = (index * num_layers + layer - call.first_layer) * call.num_rows + run.row
        serve_event(run, call, place, number, layer, attention_s, count)
    if call.what & END:
        if call.what & SCAN:
            count.end_s += run.now - run.began_s
        else:
            count.end_s = run.now
        count.bytes_moved += run.moved - run.moved_before
        count.link_busy_s += run.busy_s - run.busy_s_before
        count.evictions += run.evictions - run.evictions_before
        count.lifetime_tokens += run.lifetime - run.lifetime_before
        run.moved_before = run.moved
        run.busy_s_before = run.busy_s
        run.evictions_before = run.evictions
        run.lifetime_before = run.lifetime


def first_token(call: Call, place: int) -> int:
    """Return where in the batch the tokens of an event begin."""
    return numbers(call.bounds, INTS)[place] if call.bounds else place


def serve_event(
    run: Run, call: Call, place: int, number: int, layer: int, attention_s: float, count: Counts
) -> None:
    """Serve one event of a pass, which stands at a place in the batch."""
    start, stop = first_token(call, place), first_token(call, place + 1)
    run.layer = layer
    run.number = number * run.num_layers + layer
    run.tokens_here = stop - start
    run.first_entry = start * run.top_k
    run.end_entry = stop * run.top_k
    if call.what & ENTER:
        if not run.wall:
            enter(run, attention_s)
        if call.resident:
            find(run, call)
    if call.what & CLOSE:
        if call.route or call.replace:
            choose(run, call, start, stop)
        notify(run, EVENT, place)
        decide(run, call, count)
        if not run.wall:
            close_event(run, call, place, count)
            if call.levels:
                note_levels(run, call)


def choose(run: Run, call: Call, start: int, stop: int) -> None:
    """Let what the call names change which experts the event's tokens get."""
    for number in range(2):
        function, record = call.route, call.routing
        if number:
            function, record = call.replace, call.replacing
        if function:
            asked = at(record, 0, ASKED)
            asked.layer = run.layer
            asked.row = run.row
            call.changes += invoke(function, record, start, stop)


def settle(run: Run, call: Call) -> None:
    """Do what is done between the events of passes."""
    if call.what == FILL:
        fill(run, call)
    elif call.what == HINT:
        keys, levels = numbers(call.keys, INTS), numbers(call.proposed_levels, INTS)
        ready_s = run.now + call.seconds
        for place in range(call.num_keys):
            level = levels[place] if call.proposed_levels else 0
            hint(run, keys[place], level, call.number, -1, ready_s, call.batch)
        wait_until(run, ready_s)
    elif call.what == ADVANCE:
        run.layer = 0
        wait_until(run, run.now + call.seconds)
        drain(run, run.now, -1)
    elif is_active(run):
        run.layer = 0
        drain(run, math.inf, -1)
        call.seconds = wait_until(run, run.busy_until)
