"""Passes that need nothing from Python in between, served many at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.virtual.costs import attention_s
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.loop import NO_WEIGHTS, NOTHING, records_of
from lm_eval_moecache.records.event import PHASES, Event
from lm_eval_moecache.records.jit import Array
from lm_eval_moecache.trace.trace import Trace


def replay_passes(
    engine: VirtualEngine,
    part: Trace,
    first: int,
    last: int,
    proposed: tuple[Array, Array],
    events: Iterator[Event] | None,
) -> None:
    """Serve passes `first` to `last` (excluded) of a part; record them in the engine's ledger.

    `proposed` holds the prefetcher's keys and their bounds by event; `events` are those of the
    passes, if the engine `needs_events`.
    """
    columns, num_layers = part.columns, engine.geometry.num_layers
    start, stop = first * num_layers, last * num_layers
    bounds, rows = part.key_bounds[start : stop + 1], part.row_bounds[start : stop + 1]
    places, own_rows = slice(bounds[0], bounds[-1]), slice(rows[0], rows[-1])
    weights: Array = NO_WEIGHTS
    next_use: Array = NOTHING
    if engine.eviction.uses_weights and columns.weights is not None:
        weights = columns.weights[own_rows].ravel()
    if engine.eviction.is_offline and engine.future is not None:
        next_use = engine.future.next_use[places]
    tokens = np.diff(rows).reshape(-1, num_layers)
    phases = columns.phase[rows[:-1:num_layers]]
    # Computed once per number of tokens and phase. The layers of a pass can differ in tokens: some
    # models run the last layer for a prompt's last token only.
    kind_of = tokens * len(PHASES) + phases[:, np.newaxis]
    kinds = np.flatnonzero(np.bincount(kind_of.ravel()))
    decoded_kinds = (divmod(int(kind), len(PHASES)) for kind in kinds)
    by_kind = np.array([engine.seconds(count, PHASES[phase]) for count, phase in decoded_kinds])
    by_event = by_kind[np.searchsorted(kinds, kind_of), :, np.arange(num_layers)]
    dense_s, predict_s = by_event.reshape(-1, 2).T
    if engine.wants_positions:
        attention = _attention_s(engine, part, phases, first, last)
        dense_s = dense_s + np.repeat(attention, num_layers)
    batch = core.PassBatch(
        first_pass=part.first_pass + first,
        keys=part.keys[places],
        bounds=bounds - bounds[0],
        rows=rows - rows[0],
        experts=columns.experts[own_rows].ravel(),
        weights=weights,
        dense_s=dense_s,
        predict_s=predict_s,
        next_use=next_use,
        proposed=proposed[0],
        proposed_bounds=proposed[1],
        proposed_levels=NOTHING,
        num_passes=last - first,
        warm=NOTHING,
    )
    counts = engine.serve_passes(batch, events)
    passes = engine.ledger.passes
    names = [PHASES[phase] for phase in phases]
    passes += records_of(counts, len(passes), names, tokens[:, 0].tolist())


def _attention_s(
    engine: VirtualEngine, part: Trace, phases: Array, first: int, last: int
) -> list[float]:
    """Return each pass's seconds of one layer's attention to the context."""
    setting, num_layers, attention = engine.setting, engine.geometry.num_layers, list[float]()
    assert setting.emulate is not None, "attention to the context of no known model"
    for number, phase in zip(range(first, last), phases.tolist(), strict=True):
        rows = slice(part.row_bounds[number * num_layers], part.row_bounds[number * num_layers + 1])
        positions = part.columns.token[rows].astype(np.int64)
        attention.append(attention_s(setting.emulate, setting.hardware, PHASES[phase], positions))
    return attention
