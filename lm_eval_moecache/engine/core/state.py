"""The state of a run as tables, the batches that it serves, and what functions hand each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval_moecache.records.jit import Array, Table
from lm_eval_moecache.records.ledger import Counters

IN_PYTHON = True
"""False in machine code, which thereby leaves out what only Python can do."""


@dataclass(slots=True)
class Slot:
    """The engine's state of one expert, apart from the features that eviction rules see."""

    home: int = 0
    """Its layer."""
    demanded: int = 0
    done: int = 0
    """Marks of the last event that demanded it and of the last that executed it in a wave."""
    unused: int = 0
    """1 if a prefetch loaded it and no event has used it since."""
    predicted: int = 0
    """The `epoch` of its layer in which it was last predicted."""
    level: int = 0
    """Precision level at which it is resident or arriving."""
    demanded_level: int = 0
    """Level at which it was last demanded."""
    executed_level: int = 0
    arriving: int = 0
    """1 while a prefetch of it is in flight, its bytes reserved."""
    upgrading: int = 0
    """1 from its release for a better level until that is loaded."""
    since: int = 0
    """Tokens processed before its load."""
    arrival: int = 0
    """Number of its load among all."""
    left_in: int = -2
    """The pass in which it was last evicted."""
    due: int = -1
    """Due event of its queued prefetch (-1: none queued); then its neighbours in that queue."""
    next: int = -1
    previous: int = -1
    queued_level: int = 0
    batch: int = -1
    """Level and batch (-1: none) of its queued prefetch."""
    earliest_s: float = 0.0
    """Earliest start of its queued prefetch."""
    serves: int = 0
    """Scratch: how many tokens of the event in progress it serves."""


@dataclass(slots=True)
class Level:
    """One precision level of a layer's experts."""

    nbytes: int = 0
    move_s: float = 0.0
    """Its transfer over a free link, without the latency."""
    flop_s: float = 0.0
    read_s: float = 0.0
    """Its arithmetic for one token, and reading its weights."""
    num_keys: int = 0
    num_served: int = 0
    """Scratch: keys and (token, key) pairs of the wave in progress."""


@dataclass(slots=True)
class LayerState:
    """The prediction for a layer's next event: its number, and how many keys it names."""

    epoch: int = 1
    num_predicted: int = 0


@dataclass(slots=True)
class Queue:
    """Ends of the queue of prefetches for one due event."""

    first: int = -1
    last: int = -1


@dataclass(slots=True)
class CacheState:
    """One cache: the layers `first_layer` to `end_layer` - 1, its bytes, and its counts."""

    first_layer: int = 0
    end_layer: int = 0
    capacity: int = 0
    used: int = 0
    peak: int = 0
    loads: int = 0
    warmed: int = 0
    """Residents present before the first request; not counted as loads."""
    evictions: int = 0
    replaced: int = 0
    """Residents released because the same expert was demanded at a better level."""
    lifetime: int = 0
    """Sum over evicted experts of the tokens processed while they were resident."""


@dataclass(slots=True)
class RunState:
    """Clock, link and totals of the run, and what its setting and policy ask for (flags: 0, 1)."""

    now: float = 0.0
    busy_until: float = 0.0
    busy_s: float = 0.0
    latency_s: float = 0.0
    wait_overhead_s: float = 0.0
    expert_overhead_s: float = 0.0
    load_overhead_s: float = 0.0
    """The compute's overhead of loading a byte."""
    top_k: int = 0
    num_levels: int = 1
    inflight: int = -1
    """Key of the prefetch in flight, which lands at `busy_until`."""
    open_batch: int = -1
    """Batch of the last transfer; the next one joins it if nothing comes between."""
    queued: int = 0
    """Number of queued prefetches; `earliest` is a lower bound on the next one's due event."""
    earliest: int = 0
    tokens: int = 0
    mark: int = 0
    """Number of the event, or wave, whose keys are pinned."""
    absent: int = 0
    """Number of keys that the event in progress demands as it was looked up."""
    loaded_bytes: int = 0
    """Loaded, with the compute's overhead still to be charged."""
    arrivals: int = 0
    moved: int = 0
    """Bytes."""
    transfers: int = 0
    evictions: int = 0
    lifetime: int = 0
    fifo: int = 0
    prefetches: int = 0
    after_layer: int = 0
    cached_first: int = 0
    lossy: int = 0
    """Whether events come with all their experts, some of which may be dropped."""
    own: int = 0
    """Whether evictions keep a state of their own."""
    hosts: int = 0
    lanes: int = 0
    """Whether an event's demands move together, over lanes or by projections."""
    piecewise: int = 0
    """Whether experts are executed as they arrive."""
    watched: int = 0
    """Whether somebody is notified of each wave."""
    num_messages: int = 0
    """Number of messages not yet read."""
    placed: int = 0
    """Whether residents have slots in memory (the wall clock)."""
    recorded: int = 0
    """Whether a timeline records what clock and link do."""


@dataclass(slots=True)
class PassCounts(Counters):
    """The counts and times of one pass, under the names of `PassRecord`."""

    start_s: float = 0.0
    end_s: float = 0.0


class State(NamedTuple):
    """All state that outlasts an event, as tables."""

    experts: Table
    """This and the next three are the tables of `algorithms.features.Features`."""
    layers: Table
    now: Table
    forecasts: Table
    slots: Table
    """By key."""
    levels: Table
    """By layer * levels + level."""
    layer_states: Table
    queues: Table
    """By due event modulo their number, one more than layers: events are due within a pass."""
    caches: Table
    run: Table
    """A single record."""
    messages: Array
    """To evictions with a state of their own, not yet read (`notify`); empty in plain Python."""
    outside: Any
    """What is not a table (`engine.outside.Outside`); in machine code, how it is called."""


class PassBatch(NamedTuple):
    """Some passes of a run. Arrays are by event unless they say otherwise."""

    first_pass: int
    """Index in the run of the first one."""
    num_passes: int
    keys: Array
    bounds: Array
    """Event e needs `keys[bounds[e]:bounds[e + 1]]`, in order of first need."""
    rows: Array
    """Event e's tokens are rows `rows[e]:rows[e + 1]` of `experts` and `weights`."""
    experts: Array
    weights: Array
    """Flat, `top_k` entries per row."""
    dense_s: Array
    predict_s: Array
    """Seconds until the layer's router has decided, and of predicting from its input."""
    next_use: Array
    """By place in `keys`: number of the next event that needs the key (offline rules only)."""
    proposed: Array
    proposed_bounds: Array
    """Event e proposes `proposed[proposed_bounds[e]:proposed_bounds[e + 1]]`."""
    proposed_levels: Array
    """By place in `proposed`, if there are several levels: that of the prefetch."""
    warm: Array
    """Keys that a reset cache starts with, in order of loading."""


class BatchEvent(NamedTuple):
    """One event of a batch."""

    batch: PassBatch
    place: int
    """Its number in the batch."""
    number: int
    """Its number in the run; where a pass begins, that of the pass."""
    layer: int
    start: int
    stop: int
    """It needs the keys of the batch from `start` to `stop`."""
    tokens: int


def event_of(batch: PassBatch, place: int, number: int, layer: int) -> BatchEvent:
    """Return an event of a batch."""
    bounds, rows = batch.bounds, batch.rows
    tokens = rows[place + 1] - rows[place]
    return BatchEvent(batch, place, number, layer, bounds[place], bounds[place + 1], tokens)


class Keys(NamedTuple):
    """The keys `keys[start:stop]`."""

    keys: Array
    start: int
    stop: int


class Task(NamedTuple):
    """What to do with an event, or a batch."""

    what: int
    number: int
    layer: int
    """See `BatchEvent`."""
    demands: Keys
    levels: Array
    """By place in the array of demands."""
