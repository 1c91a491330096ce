"""What a run has in memory: records of its experts, layers, caches and clock, and of a call."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.choosing import Asked
from lm_eval_moecache.algorithms.likeliest import Proposing
from lm_eval_moecache.records.ledger import Counters
from lm_eval_moecache.records.memory import kind_of


@dataclass
class Expert(features.Expert):
    """What rules see of an expert, and its neighbours in its cache's order of recency."""

    older: int = -1
    newer: int = -1


@dataclass
class Slot:
    """The state of one expert, apart from what rules see of it."""

    home: int = 0
    """Its layer."""
    demanded: int = 0
    done: int = 0
    """Marks of the last event that demanded it and of the last that executed it in a wave."""
    serves: int = 0
    required: int = 0
    """How many tokens of the event in progress it serves, and the best level that they require."""
    unused: int = 0
    """1 if a prefetch loaded it and no event has used it since."""
    predicted: int = 0
    """The `epoch` of its layer in which it was last predicted."""
    level: int = 0
    """Precision level at which it is resident or arriving."""
    demanded_level: int = 0
    executed_level: int = 0
    """Levels at which it was last demanded and executed."""
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
    uploaded_s: float = 0.0
    """When the upload arrives that made it resident and that nobody has waited for; else 0."""
    moving: int = 0
    arrives: int = 0
    """Whether it waits to move over the lanes, and the mark of the last event that has its arrival
    times."""
    host_s: float = 0.0
    """Scratch: seconds in which the host would execute it."""


@dataclass
class Layer(features.Layer):
    """A layer: what rules see, its predictions, its queue of prefetches, and its parts' costs.

    One row more than there are layers has a queue, too: events are due within a pass, by their
    number modulo the rows.
    """

    epoch: int = 1
    num_predicted: int = 0
    """The prediction for its next event: its number, and how many keys it names."""
    queue_first: int = -1
    queue_last: int = -1
    flop_s: float = 0.0
    read_s: float = 0.0
    overhead_s: float = 0.0
    """Of what precedes its experts: arithmetic for one token, reading weights, launches."""
    predict_flop: float = 0.0
    predict_read_s: float = 0.0
    predict_overhead_s: float = 0.0
    """The same of its predictions: FLOP for one token, of which gates have none."""


@dataclass
class Level:
    """One precision level of a layer's experts."""

    size_bytes: int = 0
    move_s: float = 0.0
    """Its transfer over a free link, without the latency."""
    flop_s: float = 0.0
    read_s: float = 0.0
    """Its arithmetic for one token, and reading its weights."""
    host_flop_s: float = 0.0
    host_read_s: float = 0.0
    """The same on the host."""
    fixed_s: float = 0.0
    host_fixed_s: float = 0.0
    """What an expert takes besides, on the device and on the host, where that is measured."""
    num_keys: int = 0
    num_served: int = 0
    """Scratch: keys and (token, key) pairs of the wave in progress."""


@dataclass
class Cache:
    """One cache: the layers `first_layer` to `end_layer` - 1, its bytes, and its counts."""

    first_layer: int = 0
    end_layer: int = 0
    capacity: int = 0
    used: int = 0
    peak: int = 0
    held: int = 0
    """Number of residents."""
    loads: int = 0
    warmed: int = 0
    """Residents present before the first request; not counted as loads."""
    evictions: int = 0
    replaced: int = 0
    """Residents released because the same expert was demanded at a better level."""
    lifetime: int = 0
    """Sum over evicted experts of the tokens processed while they were resident."""
    turns: int = 0
    accesses: int = 0
    """Events that it has seen, and keys that these needed."""
    cold_fills: int = 0
    has_evicted: int = 0
    """Loads before its first eviction, and whether that has been; once emptied it starts anew."""
    oldest: int = -1
    newest: int = -1
    """Ends of its residents' order of recency."""
    balance: float = 0.0
    """Duels won minus duels lost, with decay."""


@dataclass
class Run(features.Now):
    """A run: where its tables are, clock and link, totals, and what setting and policy ask for."""

    address: int = 0
    experts: int = 0
    slots: int = 0
    forecast_rows: int = 0
    layers: int = 0
    levels: int = 0
    caches: int = 0
    """Addresses: its own, and those of its tables: by key (three), layer, layer and level, cache.
    """
    rank: int = 0
    ask: int = 0
    """Addresses of functions: the eviction's rank, or Python's answer (`cache.ask`)."""
    keys: int = 0
    spare: int = 0
    demands: int = 0
    """Addresses of scratch: keys of the event in progress, and what of it is demanded."""
    arrivals: int = 0
    requests: int = 0
    """Addresses of scratch for lanes: arrival times [experts, reads], and requests [2, as many]."""
    messages: int = 0
    num_messages: int = 0
    max_messages: int = 0
    """What Python has not read yet, in pairs: where, how many numbers, and how many at most."""
    spans: int = 0
    num_spans: int = 0
    max_spans: int = 0
    """The timeline not read yet: five numbers a span (see `clock.add_span`); 0: none is kept."""

    now: float = 0.0
    busy_until: float = 0.0
    busy_s: float = 0.0
    """The clock; the link's next free time, and its seconds of work."""
    latency_s: float = 0.0
    wait_overhead_s: float = 0.0
    expert_overhead_s: float = 0.0
    load_overhead_s: float = 0.0
    """The compute's overhead of loading a byte."""
    peak_flops: float = 0.0
    lane_rate: float = 0.0
    link_rate: float = 0.0
    """Bytes a second of one request, and of the link."""
    way_s: float = 0.0
    """Seconds of activations to the host or back, beside their bytes'."""
    host_until: float = 0.0
    """When the host is free."""
    hidden_size: int = 0
    element_bytes: float = 0.0
    """Of a token's activations, as they go to the host and back."""
    sent_bytes: int = -1
    """Activations at the host during the event in progress; -1: none."""

    top_k: int = 0
    num_levels: int = 1
    num_caches: int = 1
    inflight: int = -1
    """Key of the prefetch in flight, which lands at `busy_until`."""
    open_batch: int = -1
    """Batch of the last transfer; the next one joins it if nothing comes between."""
    queued: int = 0
    earliest: int = 0
    """Number of queued prefetches, and a lower bound on the next one's due event."""
    tokens: int = 0
    mark: int = 0
    """Number of the event, or wave, whose keys are pinned."""
    loaded_bytes: int = 0
    """Loaded, with the compute's overhead still to be charged."""
    num_loads: int = 0
    moved: int = 0
    """Bytes."""
    transfers: int = 0
    evictions: int = 0
    lifetime: int = 0
    began_s: float = 0.0
    moved_before: int = 0
    busy_s_before: float = 0.0
    evictions_before: int = 0
    lifetime_before: int = 0
    """When the pass began, and these totals as of the end of the last one."""

    number: int = 0
    tokens_here: int = 0
    first_entry: int = 0
    end_entry: int = 0
    num_keys: int = 0
    num_demands: int = 0
    cursor: int = 0
    """The event in progress: its number in the run, tokens, entries in the batch, keys, demands,
    and its place among the unique keys of the batch."""
    row: int = 0
    """Its place among the rows of the call in progress."""
    wave_keys: int = 0
    wave_served: int = 0
    """What `mark_executed` found: keys, and (token, key) pairs."""

    fifo: int = 0
    prefetches: int = 0
    after_layer: int = 0
    cached_first: int = 0
    stateful: int = 0
    """Whether evictions keep a state of their own, and are asked for victims."""
    notifies: int = 0
    """Whether Python is notified of what the cache does."""
    wall: int = 0
    """Whether time is the machine's: nothing is charged, and an event is served by `wall.visit`."""
    recency: int = 0
    """Whether residents are kept in an order: 1 that of use, 2 of loading; 0: they are ranked."""
    predictor: int = 0
    """Whether a network predicts, in place of gates."""
    lanes: int = 0
    reads: int = 1
    """At how many requests at once an event's demands move together, and requests an expert; 0
    lanes: one after another."""
    piecewise: int = 0
    """Whether experts are executed as they arrive."""
    host: int = 0
    uploads: int = 0
    """Which rule gives the host its share (`host.HOST_RULES`), and how many of what it executes
    are loaded afterwards."""


@dataclass
class Call:
    """What is to be done for some runs, and where the batch is that it is done to.

    A row is a run with tables of its own. Each has the events of some passes and layers, in the
    order passes, layers, rows: event e has the tokens `bounds[e]` to `bounds[e + 1]`, or token e.
    """

    what: int = 0
    """See `serve.BEGIN`."""
    first_layer: int = 0
    end_layer: int = 0
    num_passes: int = 1
    num_rows: int = 1
    rows: int = 0
    first_passes: int = 0
    counts: int = 0
    """Addresses: each row's run, the number of its first pass, and `Counts` [rows, passes]."""
    bounds: int = 0
    experts: int = 0
    looked_up: int = 0
    executed: int = 0
    """Addresses: the router's choice [tokens, top_k], after routing, and after misses; below 0
    where dropped."""
    levels: int = 0
    """Address: what each entry requires, then how it was executed; 0: the best level."""
    upgrades: int = 1
    """Whether residents below that level are loaded again."""
    weights: int = 0
    seen_weights: int = 0
    """Addresses: the router's weights, where changes are judged by them, and those of what is
    executed, where the eviction looks at them."""
    next_use: int = 0
    """Address: by unique key of each event, the number of the next event that needs it."""
    proposed: int = 0
    proposed_bounds: int = 0
    proposed_levels: int = 0
    """Addresses: what event e prefetches is `proposed[proposed_bounds[e]:...]`; 0: nothing."""
    attention_s: int = 0
    """Address: seconds of a layer's attention to the context [rows, passes]; 0: not charged."""
    last_predicts: int = 0
    """Whether a network predicts the next pass at the last layer."""
    route: int = 0
    routing: int = 0
    replace: int = 0
    replacing: int = 0
    propose: int = 0
    proposing: int = 0
    """Addresses of loops that choose and of their records (`algorithms.choosing`): what routing
    makes of `experts` in `looked_up`, what a miss rule makes of that in `executed`, and which keys
    are prefetched; 0: nobody asks."""
    predictions: int = 0
    """Address: where the predictions of each event begin and end, [events + 1]."""
    changes: int = 0
    """How many entries were changed by what chose; added to."""
    resident: int = 0
    absent: int = 0
    """Addresses: flags [rows, experts] of where a layer's experts are, written as it is entered."""
    awaits: int = 0
    """Whether experts whose prefetch is under way are not absent."""
    keys: int = 0
    num_keys: int = 0
    """Address and number of keys: to be prefetched, or to fill the caches with."""
    number: int = 0
    batch: int = -1
    """Of keys to be prefetched: the first event of their pass, and what shares a latency."""
    seconds: float = 0.0
    """Those that pass, or until the keys are known; then, for which prefetches were awaited."""


@dataclass(kw_only=True)
class Counts(Counters):
    """The counts and times of one pass, under the names of `PassRecord`."""

    start_s: float = 0.0
    end_s: float = 0.0


EXPERT, SLOT, FORECAST = kind_of(Expert), kind_of(Slot), kind_of(features.Forecast)
LAYER, LEVEL, CACHE = kind_of(Layer), kind_of(Level), kind_of(Cache)
RUN, CALL, COUNTS = kind_of(Run), kind_of(Call), kind_of(Counts)
ASKED, PROPOSING = kind_of(Asked), kind_of(Proposing)
EXPERT_SIZE, LAYER_SIZE = EXPERT.itemsize, LAYER.itemsize
