"""Lossless replays by one compiled loop over arrays: the same figures as the engine, much faster.

`reason_against` says what has to go through the engine event by event: lossy algorithms, evictions
that are no ranking, several levels of precision, the host, drafts, scanned texts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.features import LOADED, NEXT_USE, RESIDENT, make_features
from lm_eval_moecache.algorithms.ranked import Rank, RankedEviction
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.core import (
    BUSY,
    BUSY_UNTIL,
    CAPACITY,
    CARRY_S,
    END,
    END_LAYER,
    EVICTIONS,
    EXPERT_OVERHEAD,
    FIRST_LAYER,
    FLOP_S,
    INFLIGHT,
    LIFETIME,
    LINK_BUSY,
    LOADS,
    MOVED,
    NBYTES,
    NOW,
    NUM_COUNTS,
    NUM_TIMES,
    PEAK,
    READ_S,
    SINCE,
    STALL,
    START,
    TOKENS,
    TRANSFERS,
    UNUSED,
    USED,
    WAIT_OVERHEAD,
    WARMED,
    Piece,
    make_state,
)
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.virtual.executor import VirtualExecutor
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.jit import has_numba, specialise
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.stream import StreamedTrace
from lm_eval_moecache.trace.trace import Trace

Array = Any

COUNTED = (
    *("requests", "late", "misses", "collisions", "token_misses", "prefetch_hits"),
    *("predicted", "predicted_right", "predictable", "evictions", "lifetime_tokens", "bytes_moved"),
)
"""Names of the core's counts, in its order."""
_NOTHING = np.zeros(0, np.int64)


def reason_against(trace: Trace | StreamedTrace, engine: Engine) -> str:
    """Say why a replay cannot be compiled; empty where it can."""
    rules, executor, eviction = engine.executor.rules, engine.executor, engine.pools[0].eviction
    if not has_numba():
        return "numba is not installed"
    if rules.may_change:
        return "a lossy algorithm decides by what is resident"
    if not isinstance(executor, VirtualExecutor) or rules.ladder:
        return "the store has several levels of precision"
    if not type(eviction).__module__.startswith("lm_eval_moecache.algorithms."):
        return f"{type(eviction).__name__} is no eviction of this package"
    if not isinstance(eviction, RankedEviction):
        return f"{type(eviction).__name__} keeps a state of its own and ranks nobody"
    if not engine.setting.is_one_server:
        return "the link has lanes, or experts are executed as they arrive"
    if rules.algorithms.miss.host_rule:
        return "the host computes"
    if trace.drafted.draft is not None or engine.draft_stage is not None:
        return "a draft model drafts"
    if rules.algorithms.prefetch.foresees:
        return "a whole pass is foreseen before it begins"
    if trace.scans:
        return "texts were scanned layer by layer"
    return ""


@cache
def compiled_run(rank: Rank, ages: bool, prefetches: bool) -> Callable[..., None]:
    """Return `core.run` for a rule."""
    bound = {"rank": rank, "AGES": ages, "PREFETCHES": prefetches}
    return specialise([features, core], "run", bound)


class CompiledReplay:
    """Serves passes for an engine, and gives it what they counted; `finish` ends it."""

    def __init__(self, engine: Engine, future: Future | None) -> None:
        self._engine, self._future = engine, future
        executor, geometry = engine.executor, engine.geometry
        assert isinstance(executor, VirtualExecutor)
        self._executor = executor
        self._layers, self._experts = geometry.num_layers, geometry.num_experts
        eviction = engine.pools[0].eviction
        assert isinstance(eviction, RankedEviction)
        self._eviction = eviction
        self._weights = eviction.uses_weights
        self._offline = eviction.is_offline
        per_layer = len(engine.pools) > 1
        self._s = make_state(self._layers, self._experts)
        self._f = make_features(self._layers, self._experts, per_layer, eviction.growth)
        prefetch = engine.algorithms.prefetch
        whole = self._s.whole
        whole[core.FIFO] = executor.link.fifo
        whole[core.AFTER_LAYER] = prefetch.after_layer
        whole[core.CACHED_FIRST] = engine.algorithms.miss.cached_first
        whole[core.WEIGHTS], whole[core.OFFLINE] = self._weights, self._offline
        self._run = compiled_run(eviction.plain_rank, eviction.ages, prefetch.is_active)
        self._fill_in()

    def _fill_in(self) -> None:
        """Write down what the machine and the caches are like, and who is resident already."""
        s, executor, pools = self._s, self._executor, self._engine.pools
        geometry, clock = self._engine.geometry, executor.clock
        s.layers[:, NBYTES] = [levels[0] for levels in geometry.expert_bytes]
        s.layer_s[:, CARRY_S] = [
            executor.link.duration_s(int(size)) for size in s.layers[:, NBYTES]
        ]
        s.layer_s[:, FLOP_S], s.layer_s[:, READ_S] = np.transpose(
            [clock.expert_parts_s(layer) for layer in range(self._layers)]
        )
        s.seconds[NOW], s.seconds[BUSY_UNTIL] = clock.now, executor.link.busy_until
        s.seconds[WAIT_OVERHEAD] = clock.wait_overhead_s
        s.seconds[EXPERT_OVERHEAD] = clock.expert_overhead_s
        for place, (pool, layers) in enumerate(
            zip(pools, self._engine.setting.capacity.partitions(self._layers), strict=True)
        ):
            s.layers[place, CAPACITY], s.layers[place, USED] = pool.capacity_bytes, pool.used_bytes
            s.layers[place, FIRST_LAYER], s.layers[place, END_LAYER] = layers.start, layers.stop
            s.layers[place, PEAK], s.layers[place, WARMED] = pool.peak_bytes, pool.warmed
        self._warm = np.asarray([key for pool in pools for key in pool.resident], np.int64)
        if self._offline:
            assert self._future is not None, "an offline eviction without a future"
            self._f.keys[:, NEXT_USE] = self._future.first_use
        for key in self._warm.tolist():
            s.keys[key, SINCE] = 0
            features.note_load(self._f, key, key // self._experts, False)

    def serve(
        self, part: Trace, first: int, last: int, proposed: tuple[Array, Array], cold: Array
    ) -> None:
        """Serve passes `first` to `last` of a part, with what is proposed at each event."""
        start, stop = first * self._layers, last * self._layers
        bounds, rows = part.key_bounds[start : stop + 1], part.row_bounds[start : stop + 1]
        columns, places = part.columns, slice(bounds[0], bounds[-1])
        own_rows = slice(rows[0], rows[-1])
        weights = np.zeros((0, 0), np.float32)
        if self._weights and columns.weights is not None:
            weights = np.require(columns.weights[own_rows], np.float32, ["C", "W"])
        tokens = np.diff(rows).reshape(-1, self._layers)
        phases = columns.phase[rows[: -1 : self._layers]]
        piece = Piece(
            first_pass=part.first_pass + first,
            keys=part.keys[places],
            bounds=bounds - bounds[0],
            rows=rows - rows[0],
            experts=columns.experts[own_rows],
            weights=weights,
            dense_s=self._by_event(tokens, phases, self._dense_s),
            predict_s=self._by_event(tokens, phases, self._predicting_s),
            next_use=self._future.next_use[places] if self._offline and self._future else _NOTHING,
            proposed=proposed[0],
            proposed_bounds=proposed[1],
            cold=cold,
            warm=self._warm,
        )
        counts = np.zeros((last - first, NUM_COUNTS), np.int64)
        times = np.zeros((last - first, NUM_TIMES))
        self._run(self._s, self._f, piece, counts, times)
        self._enter(phases, tokens, counts, times)

    def _by_event(self, tokens: Array, phases: Array, of: Callable[..., list[float]]) -> Array:
        """Return what `of` says of each event, who is asked once per number of tokens and phase.

        The layers of one pass can differ in tokens: some models run the last one for the last token
        of a prompt alone.
        """
        kinds, place = np.unique(tokens * len(PHASES) + phases[:, np.newaxis], return_inverse=True)
        table = [of(*divmod(int(kind), len(PHASES))) for kind in kinds]
        by_kind = np.asarray(table, np.float64)
        return by_kind[place.reshape(tokens.shape), np.arange(self._layers)].ravel()

    def _dense_s(self, tokens: int, phase: int) -> list[float]:
        clock = self._executor.clock
        return [clock.dense_s(layer, tokens) for layer in range(self._layers)]

    def _predicting_s(self, tokens: int, phase: int) -> list[float]:
        depth, last = self._engine.depth, self._layers - 1
        ahead = [min(depth, last - layer) for layer in range(self._layers)]
        if depth and self._engine.algorithms.prefetch.uses_predictor:
            ahead = [target_of(i, self._layers, PHASES[phase]) is not None for i in range(last + 1)]
        return [self._executor.predicting_s(i, int(n), tokens) for i, n in enumerate(ahead)]

    def _enter(self, phases: Array, tokens: Array, counts: Array, times: Array) -> None:
        """Write the passes to the ledger."""
        ledger, top_k = self._engine.ledger, self._engine.geometry.top_k
        columns = zip(
            *(phases.tolist(), tokens[:, 0].tolist(), tokens.sum(1).tolist()),
            *(counts.tolist(), times.tolist()),
            strict=True,
        )
        for phase, num_tokens, served, count, time in columns:
            record = PassRecord(
                len(ledger.passes),
                PHASES[phase],
                num_tokens,
                time[START],
                time[END],
                **dict(zip(COUNTED, count, strict=True)),
                stall_s=time[STALL],
                link_busy_s=time[LINK_BUSY],
                token_requests=served * top_k,
            )
            ledger.passes.append(record)

    def finish(self) -> None:
        """Leave caches, link and clock as the engine would have: its laws can be checked."""
        s, f, engine, executor = self._s, self._f, self._engine, self._executor
        executor.clock.now = float(s.seconds[NOW])
        link, inflight = executor.link, int(s.whole[INFLIGHT])
        link.busy_until, link.busy_s = float(s.seconds[BUSY_UNTIL]), float(s.seconds[BUSY])
        link.bytes_moved, link.transfers = int(s.whole[MOVED]), int(s.whole[TRANSFERS])
        link.inflight = None if inflight < 0 else inflight
        for place, pool in enumerate(engine.pools):
            keys = np.arange(
                s.layers[place, FIRST_LAYER] * self._experts,
                s.layers[place, END_LAYER] * self._experts,
            )
            found = keys[f.keys[keys, RESIDENT] > 0]
            found = found[f.keys[found, LOADED].argsort()]
            since = s.keys[found, SINCE].tolist()
            pool.take_over(dict(zip(found.tolist(), since, strict=True)))
            pool.arriving = {inflight: 0} if inflight in keys else {}
            pool.unused_prefetches = set(keys[s.keys[keys, UNUSED] > 0].tolist())
            pool.used_bytes, pool.peak_bytes = (
                int(s.layers[place, USED]),
                int(s.layers[place, PEAK]),
            )
            pool.loads, pool.evictions = (
                int(s.layers[place, LOADS]),
                int(s.layers[place, EVICTIONS]),
            )
            pool.lifetime_tokens, pool.tokens = int(s.layers[place, LIFETIME]), int(s.whole[TOKENS])
            pool.warmed = int(s.layers[place, WARMED])
