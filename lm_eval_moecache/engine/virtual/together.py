"""Serves a layer of many rows at once, each with an engine of its own, where rules decide.

What a row gets is what its engine alone would do: rules decide row by row from arrays
(`records.tokens`), and machine code goes through the rows' tables in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissOverRows, weight_shares
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import weights_of
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.loop import NO_WEIGHTS, NOTHING
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.event import DECODE, DROPPED
from lm_eval_moecache.records.jit import Array
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import Tokens

_COUNTED: Mapping[str, Any] = {
    **dict.fromkeys(("avoided", "substituted", "dropped", "unfaithful", "weighed_tokens"), int),
    "lost_weight": float,
}
"""What is counted of the rules' changes, under the names of `PassRecord`."""


def can_serve(engines: Sequence[Engine]) -> bool:
    """Whether the decode steps of these engines, alike but for their state, go together."""
    first = engines[0]
    if not isinstance(first, VirtualEngine) or first.rank is None or first.on_event is not None:
        return False
    rules, prefetch = first.rules, first.rules.prefetch
    asks = type(prefetch).propose_arrays is PrefetchAlgorithm.propose_arrays
    return (
        rules.is_lossy
        and not (rules.ladder or first.needs_python)
        and not (prefetch.is_active and (asks or not is_own(type(prefetch))))
        and (rules.routing.is_lossless or type(rules.routing).select is RoutingOverRows.select)
        and (rules.miss.is_lossless or type(rules.miss).resolve is MissOverRows.resolve)
        and len({engine.loop.is_compiled for engine in engines}) == 1  # type: ignore[attr-defined]
    )


class Together:
    """A decode step of some rows, whose engines have begun a pass of one token each."""

    def __init__(self, engines: Sequence[VirtualEngine]) -> None:
        self._engines, self._first = engines, engines[0]
        size, geometry = len(engines), self._first.geometry
        self._num_experts = geometry.num_experts
        self._passes = [engine.record.index for engine in engines]
        self._numbers = np.array(self._passes) * geometry.num_layers
        self._attention_s = np.array([engine.attention_s for engine in engines])
        self._places: Array = np.array([engine.loop.addresses for engine in engines])
        self._rows = np.arange(size + 1)
        self._no_demands = np.zeros(size + 1, np.int64)
        self._found = np.zeros((size, geometry.num_experts), np.uint8)
        self._is_earlier = np.tri(geometry.top_k, k=-1, dtype=bool)
        self._counts = {name: np.zeros(size, kind) for name, kind in _COUNTED.items()}

    def end(self) -> None:
        """Enter what the rules have changed into the passes' records; they end next."""
        for name, values in self._counts.items():
            if values.any():
                for engine, value in zip(self._engines, values.tolist(), strict=True):
                    record = engine.record
                    setattr(record, name, getattr(record, name) + value)

    def run(
        self,
        layer: int,
        experts: IntArray,
        weights: FloatArray,
        logits: FloatArray,
        predicted: Mapping[int, FloatArray],
    ) -> Selection | None:
        """Serve a layer of all rows; return what they execute if a rule changes it for any.

        `experts` and `weights` are [rows, top_k], `logits` and the predictions by layer
        [rows, experts].
        """
        first, rules, routing = self._first, self._first.rules, self._first.rules.routing
        dense_s = first.costs.dense_s(layer, 1) + self._attention_s
        nothing = self._batch(layer, experts[:, :0], NO_WEIGHTS, dense_s)
        self._step(core.ENTER | core.FIND, nothing, layer)
        resident = self._found == core.RESIDENT
        asked = Tokens(
            *(layer, DECODE, self._passes, experts, weights, logits),
            *(resident, ~resident, np.zeros((len(experts), 0))),
        )
        looked_up, selection = asked, None
        if isinstance(routing, RoutingOverRows):
            selection = self._choose("routing", asked)
            looked_up = self._changed(asked, selection)
        absent, executed = looked_up.is_missing, looked_up
        if isinstance(rules.miss, MissOverRows):
            if rules.miss.awaits_late:
                pending = self._found == core.PENDING
                looked_up = looked_up._replace(absent=~(resident | pending))
            change = self._choose("miss", looked_up) if looked_up.is_missing.any() else None
            if change is not None:
                moved = (change.experts != looked_up.experts) & (looked_up.experts != DROPPED)
                self._counts["substituted"] += moved.sum(axis=-1)
                selection = change if selection is None else change.after(selection)
                executed = self._changed(looked_up, selection)
        self._count(asked, selection, absent, executed.experts)
        what = core.LOOK_UP | core.CLOSE
        if executed is not looked_up:
            batch = self._batch(layer, looked_up.experts, looked_up.weights, dense_s)
            self._step(core.LOOK_UP, batch, layer)
            what = core.DEMAND | core.CLOSE
            lost = absent & ~_is_in(looked_up.experts, executed.experts)
            self._counts["avoided"] += lost.sum(axis=-1)
            absent &= ~lost
        batch = self._batch(layer, executed.experts, executed.weights, dense_s, predicted)
        self._step(what, batch, layer, looked_up.experts, absent)
        return selection

    def _choose(self, axis: str, tokens: Tokens) -> Selection | None:
        """Let the rule of an axis choose, with what each row's own keeps of the layer."""
        rules = [getattr(engine.rules, axis) for engine in self._engines]
        if not rules[0].num_kept:
            chosen: Selection | None = rules[0].choose(tokens)
            return chosen
        state = np.stack([rule.state[tokens.layer] for rule in rules])
        chosen = rules[0].choose(tokens._replace(state=state))
        for rule, own in zip(rules, state, strict=True):
            rule.state[tokens.layer] = own
        return chosen

    def _changed(self, tokens: Tokens, selection: Selection | None) -> Tokens:
        """Return the tokens with a changed selection: its experts and gate scores."""
        if selection is None:
            return tokens
        experts, weights = selection.experts, tokens.weights
        if self._first.rules.reads_changed_weights:
            weights = weights_of(tokens, selection)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        return tokens._replace(experts=experts, weights=weights)

    def _count(
        self,
        asked: Tokens,
        selection: Selection | None,
        absent: BoolArray,
        executed: IntArray,
    ) -> None:
        """Count what the rules change for each row."""
        counts, is_weighed = self._counts, absent.any(axis=-1)
        if selection is not None:
            chosen, keep = selection.experts, selection.keep
            keep = np.ones(chosen.shape, dtype=bool) if keep is None else keep
            counts["dropped"] += (~keep).sum(axis=-1)
            counts["unfaithful"] += (keep & ~_is_in(chosen, asked.experts)).sum(axis=-1)
            lost = np.where(_is_in(asked.experts, executed), 0, weight_shares(asked))
            counts["lost_weight"] += lost.sum(axis=-1, dtype=np.float64)
            is_weighed |= (chosen != asked.experts).any(axis=-1) | ~keep.all(axis=-1)
        counts["weighed_tokens"] += is_weighed

    def _batch(
        self,
        layer: int,
        experts: IntArray,
        weights: Array,
        dense_s: Array,
        predicted: Mapping[int, FloatArray] | None = None,
    ) -> core.PassBatch:
        """Return a batch of one event a row."""
        first, is_key = self._first, experts != DROPPED
        if experts.shape[1]:
            same = experts[:, :, None] == experts[:, None, :]
            is_key &= ~(same & self._is_earlier).any(axis=-1)
        proposed, bounds, predict_s = NOTHING, self._no_demands, 0.0
        if predicted is not None:
            predict_s = first.predicting_s(layer, len(predicted), 1)
            if first.rules.prefetches:
                proposed, bounds = self._proposed(predicted)
        flat: Array = NO_WEIGHTS
        if first.eviction.uses_weights:
            flat = weights.ravel().astype(np.float64)
        return core.PassBatch(
            first_pass=0,
            keys=experts[is_key] + layer * self._num_experts,
            bounds=_bounds(is_key.sum(axis=-1)),
            rows=self._rows,
            experts=np.ascontiguousarray(experts).ravel(),
            weights=flat,
            dense_s=dense_s,
            predict_s=np.full(len(experts), predict_s),
            next_use=NOTHING,
            proposed=proposed,
            proposed_bounds=bounds,
            proposed_levels=NOTHING,
            num_passes=1,
            warm=NOTHING,
        )

    def _proposed(self, predicted: Mapping[int, FloatArray]) -> tuple[Array, Array]:
        """Return what the rows' prefetchers propose: keys, and their bounds by row."""
        size, targets = len(self._engines), [*predicted]
        if not targets:
            return NOTHING, self._no_demands
        logits = np.stack([*predicted.values()], axis=1)
        if not self._first.rules.prefetch.remembers:
            flat = logits.reshape(-1, self._num_experts)
            found: Any = self._first.rules.prefetch.propose_arrays(targets * size, flat)
            keys, counts = found
            return keys, _bounds(counts.reshape(size, -1).sum(axis=-1))
        own = zip(self._engines, logits, strict=True)
        told: Any = [engine.rules.prefetch.propose_arrays(targets, row) for engine, row in own]
        counts = np.array([len(keys) for keys, _ in told])
        return np.concatenate([keys for keys, _ in told]), _bounds(counts)

    def _step(
        self,
        what: int,
        batch: core.PassBatch,
        layer: int,
        experts: IntArray = NOTHING,
        is_demanded: Array = NOTHING,
    ) -> None:
        """Do a step of the event of each row (see `core.step`), with what they demand."""
        demands, bounds = NOTHING, self._no_demands
        if what & core.DEMAND:
            demands = experts[is_demanded] + layer * self._num_experts
            bounds = _bounds(is_demanded.sum(axis=-1))
        numbers = self._numbers + layer
        if self._first.loop.is_compiled:
            rows = core.Rows(self._places, numbers, bounds, self._found)
            self._first.loop.step_rows(batch, what, layer, demands, rows)
            return
        lists = core.PassBatch(*batch[:2], *(values.tolist() for values in batch[2:]))
        own = zip(self._engines, numbers.tolist(), pairwise(bounds.tolist()), strict=True)
        keys, levels = demands.tolist(), [0] * len(demands)
        for row, (engine, number, ends) in enumerate(own):
            event, own_keys = core.event_of(lists, row, number, layer), core.Keys(keys, *ends)
            counts = engine.loop.counts
            core.act(engine.state, engine.rank, event, counts, what, own_keys, levels)
            if what & core.FIND:
                core.find(engine.state, layer, self._found[row])


def _bounds(counts: IntArray) -> IntArray:
    return np.concatenate([[0], counts.cumsum()])


def _is_in(experts: IntArray, others: IntArray) -> BoolArray:
    """Return which of each row's experts [rows, top_k] are among these others of the row."""
    return np.asarray((experts[:, :, None] == others[:, None, :]).any(axis=-1))
