"""Serves a layer of a scanned text in machine code, where rules leave that to it.

What a token gets is what `Engine.scan`, in plain Python, gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from lm_eval_moecache.algorithms import costs
from lm_eval_moecache.algorithms.miss.base import weight_shares
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.algorithms.routing.base import (
    RoutingAlgorithm,
    RoutingByCost,
    RoutingOverRows,
)
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.virtual.costs import Costs
from lm_eval_moecache.engine.virtual.loop import (
    COUNTS,
    COUNTS_TYPE,
    NO_ROWS,
    NOTHING,
    Loop,
    Looped,
    batch_of_tokens,
)
from lm_eval_moecache.records.event import DECODE, DROPPED, Event
from lm_eval_moecache.records.jit import as_records
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import NO_STATE, Tokens

SLOWNESS = 10
"""How many times as long plain Python takes for an event of a text as for one of a whole pass."""


class Scanning(Looped, Protocol):
    """An engine, as its scans see it."""

    loop: Loop
    costs: Costs
    attention_s: float
    on_event: Callable[[Event], None] | None

    @property
    def needs_python(self) -> bool: ...

    def predicting_s(self, layer: int, num_predicted: int, num_tokens: int) -> float: ...


def can_scan(engine: Scanning, num_tokens: int) -> bool:
    """Whether machine code serves a text of so many tokens, which may then be made or loaded."""
    if not _is_servable(engine):
        return False
    engine.loop.expect(0, done=SLOWNESS * num_tokens)
    return engine.loop.is_compiled


def _is_servable(engine: Scanning) -> bool:
    rules, routing = engine.rules, engine.rules.routing
    if engine.rank is None or engine.eviction.is_offline or engine.needs_python:
        return False
    if engine.on_event is not None or rules.ladder or not rules.miss.is_lossless:
        return False
    if routing.is_lossless:
        return True
    if engine.eviction.uses_weights or not is_own(type(routing)):
        return False
    if isinstance(routing, RoutingByCost):
        return type(routing).is_plain()
    is_plain = type(routing).on_pass is RoutingAlgorithm.on_pass
    return is_plain and isinstance(routing, RoutingOverRows) and not routing.uses_residents


def scan(
    engine: Scanning, event: Event, records: Sequence[PassRecord], tokens_before: int
) -> Selection | None:
    """Serve one layer of a text for all its tokens (see `Engine.scan`)."""
    geometry, rules, layer = engine.geometry, engine.rules, event.layer
    routing: Any = rules.routing
    size, chosen, selection = len(records), event.experts, None
    none = np.zeros((1, geometry.num_experts), dtype=bool)
    tokens = Tokens(
        *(layer, DECODE, [record.index for record in records], chosen, event.weights),
        *(event.logits, none, none, NO_STATE),
    )
    by_cost = isinstance(routing, RoutingByCost)
    if not (routing.is_lossless or by_cost):
        selection = routing.choose(tokens)
    executed = chosen
    if selection is not None:
        executed = selection.experts
        if selection.keep is not None:
            executed = np.where(selection.keep, executed, DROPPED)
    experts = np.concatenate([chosen, executed, executed]).ravel()
    weights = np.tile(event.weights.ravel(), 3) if engine.eviction.uses_weights else NOTHING
    batch = batch_of_tokens(
        *chosen.shape,
        experts=experts,
        weights=weights,
        dense_s=np.full(size, engine.costs.dense_s(layer, 1) + engine.attention_s),
        predict_s=np.full(3 * size, engine.predicting_s(layer, 0, 1)),
    )
    resident, absent = np.zeros((2, 1, geometry.num_experts), np.uint8)
    rows = core.Rows(
        places=NO_ROWS.places,
        numbers=np.zeros(size, np.int64),
        demands=np.zeros(experts.size, np.int64),
        resident=resident,
        absent=absent,
        awaits=0,
        levels=np.zeros(chosen.size, np.int64),
        upgrades=0,
    )
    routed, counts = costs.nothing_routed(), as_records(records, COUNTS_TYPE)
    if by_cost:
        tokens = tokens._replace(state=routing.state[layer, None])
        given = costs.routed(tokens, routing.scores(tokens.logits), resident)
        found = costs.CHEAPEST.compiled(routing.stated_cost)
        assert found is not None, "a rule of ours that numba cannot compile"
        routed = given, costs.Choice(*found)
    engine.state.run["tokens"] = tokens_before
    first = records[0].index
    batch = engine.loop.as_arrays(batch)
    if engine.loop.step_rows(batch, core.SCAN, layer, rows, routed, first, counts):
        executed = routed[0].chosen
        selection = Selection(executed)
    for name in COUNTS:
        for record, value in zip(records, counts[name].tolist(), strict=True):
            setattr(record, name, value)
    if selection is not None:
        is_kept = (chosen[..., None] == executed[..., None, :]).any(axis=-1)
        lost = np.where(is_kept, 0, weight_shares(chosen, event.weights)).sum(-1, dtype=np.float64)
        for record, share in zip(records, lost.tolist(), strict=True):
            record.lost_weight += share
    return selection
