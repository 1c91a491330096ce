"""Serves a layer of many rows at once, each with an engine of its own, where rules decide.

What a row gets is what its engine alone would do: rules decide row by row from arrays
(`records.tokens`), and machine code goes through the rows' tables in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms import costs
from lm_eval_moecache.algorithms.miss.base import MissOverRows, weight_shares
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.algorithms.registry import is_own
from lm_eval_moecache.algorithms.routing.base import RoutingByCost, RoutingOverRows
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import weights_of
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.loop import NOTHING, batch_of_tokens
from lm_eval_moecache.records.arrays import (
    FloatArray,
    IntArray,
    Weigh,
    each_token,
    softmax_weights,
)
from lm_eval_moecache.records.event import DECODE, DROPPED
from lm_eval_moecache.records.jit import Array
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.tokens import NO_STATE, Tokens


def can_serve(engines: Sequence[Engine]) -> bool:
    """Whether the decode steps of these engines, alike but for their state, go together."""
    first = engines[0]
    if not isinstance(first, VirtualEngine) or first.rank is None or first.on_event is not None:
        return False
    rules, prefetch = first.rules, first.rules.prefetch
    asks = type(prefetch).propose_arrays is PrefetchAlgorithm.propose_arrays
    return (
        rules.is_lossy
        and not first.needs_python
        and not (prefetch.is_active and (asks or not is_own(type(prefetch))))
        and _is_over_rows(rules.routing, RoutingOverRows, "select")
        and _is_over_rows(rules.miss, MissOverRows, "resolve")
        and len({engine.loop.is_compiled for engine in engines}) == 1  # type: ignore[attr-defined]
    )


def _is_over_rows(rule: Any, base: type[Any], method: str) -> bool:
    """Whether a rule that may change a selection decides for rows; what others' return is checked,
    row by row."""
    is_written_so = getattr(type(rule), method) is getattr(base, method, None)
    return rule.is_lossless or (is_written_so and is_own(type(rule)))


def serving(engines: Sequence[Engine], last: Together | None) -> Together | None:
    """Begin a decode step of these engines together, where that goes; else return None.

    `last` is what served the last step: it serves this one if the rows are the same.
    """
    if not can_serve(engines):
        return None
    own: Any = engines
    if last is None or last.engines != own or not last.is_current:
        last = Together(own)
    last.begin()
    return last


def _tables_of(engine: VirtualEngine) -> tuple[Sequence[int], Array]:
    """Return where an engine's tables are, and what its routing rule keeps of each layer."""
    return engine.loop.addresses, getattr(engine.rules.routing, "state", NOTHING)


class Together:
    """Decode steps of some rows, each with an engine of its own."""

    def __init__(self, engines: Sequence[VirtualEngine]) -> None:
        self.engines, self._first = engines, engines[0]
        size, geometry = len(engines), self._first.geometry
        self._last = geometry.num_layers - 1
        rules = self._first.rules
        self._routes = isinstance(rules.routing, RoutingOverRows)
        self._resolves = isinstance(rules.miss, MissOverRows)
        self._upgrades = rules.ladder and rules.miss.upgrade
        self._weighs = self._first.eviction.uses_weights
        self._resident, self._absent = np.zeros((2, size, geometry.num_experts), dtype=bool)
        self._experts = np.zeros((geometry.num_layers, 3, size, geometry.top_k), np.int64)
        """Of each layer what routers chose, what is looked up and what is executed."""
        self._chosen_weights = np.zeros(self._experts[:, 0].shape, np.float32)
        self._weights = np.zeros(self._experts[0].shape)
        self._levels = np.zeros(self._weights.shape[1:], np.int64)
        """Of each entry the level that it requires, then that at which it was executed."""
        self._dense_s = np.zeros((geometry.num_layers, size))
        self._predict_s = np.zeros((geometry.num_layers, 3 * size))
        # A layer's step enters the next one, and the last layer's begins the pass.
        self._batches = [
            batch_of_tokens(
                *self._experts.shape[2:],
                experts=self._experts[layer].reshape(-1),
                weights=self._weights.reshape(-1),
                dense_s=self._dense_s[(layer + 1) % geometry.num_layers],
                predict_s=self._predict_s[layer],
            )
            for layer in range(geometry.num_layers)
        ]
        self._tables = [*map(_tables_of, engines)]
        places = [(*tables, kept.ctypes.data) for tables, kept in self._tables]
        self._routed = self._routing() if self._first.loop.is_compiled else ()
        self._rows = core.Rows(
            places=np.array(places, np.int64),
            numbers=np.zeros(size, np.int64),
            demands=np.zeros(self._weights.size, np.int64),
            resident=self._resident.view(np.uint8),
            absent=self._absent.view(np.uint8),
            awaits=int(rules.miss.awaits_late),
            levels=self._levels.reshape(-1),
            upgrades=int(self._upgrades),
        )

    @property
    def is_current(self) -> bool:
        """Whether the engines' tables, and what their rules keep, are where they were."""
        each = zip(map(_tables_of, self.engines), self._tables, strict=True)
        return all(now[0] is then[0] and now[1] is then[1] for now, then in each)

    def _routing(self) -> Sequence[tuple[costs.Routed, costs.Choice]]:
        """Return by what machine code chooses for each layer, all but what the router says; nothing
        where more than a cost decides."""
        rules, routing = self._first.rules, self._first.rules.routing
        if not (isinstance(routing, RoutingByCost) and routing.is_plain()):
            return ()
        found = costs.CHEAPEST.compiled(routing.stated_cost)
        if found is None or rules.ladder or self._weighs or not rules.miss.is_lossless:
            return ()
        flags, weights = self._resident, self._chosen_weights[0]
        given = self._experts[0, 0], weights, flags.astype(np.float32), flags, flags, routing.state
        tokens, scores = Tokens(0, DECODE, (), *given), costs.NO_SCORES
        if routing.uses_scores:
            scores = np.zeros_like(tokens.logits)
        routed = costs.routed(tokens, scores, flags.view(np.uint8))
        return [
            (routed._replace(layer=layer, experts=chosen), costs.Choice(*found))
            for layer, chosen in enumerate(self._experts[:, 0])
        ]

    def begin(self) -> None:
        """Begin a step, as the engines have begun a pass of one token each."""
        self._passes = [engine.record.index for engine in self.engines]
        self._rows.numbers[:] = np.array(self._passes) * (self._last + 1)
        dense_s, predict_s = self._first.seconds_of(DECODE)
        self._dense_s[:] = dense_s[:, None] + [engine.attention_s for engine in self.engines]
        if self._first.depth:
            self._predict_s[:] = predict_s[:, None]
        self._is_changed = False
        self._serve(0, -1, self._batches[-1])

    def end(self) -> None:
        """Enter what the rules have changed into the passes' records; they end next."""
        if not self._is_changed:
            return
        chosen, executed = self._experts[:, 0], self._experts[:, 2]
        is_kept = (chosen[..., None] == executed[..., None, :]).any(axis=-1)
        lost = np.where(is_kept, 0, weight_shares(chosen, self._chosen_weights))
        for shares in lost.sum(axis=-1, dtype=np.float64).tolist():
            for engine, share in zip(self.engines, shares, strict=True):
                engine.record.lost_weight += share

    def run(
        self,
        layer: int,
        experts: IntArray,
        weights: FloatArray,
        logits: FloatArray,
        predicted: Mapping[int, FloatArray],
        weigh: Weigh = softmax_weights,
    ) -> Selection | None:
        """Serve a layer of all rows; return what they execute if a rule changes it for any.

        `experts` and `weights` are [rows, top_k], `logits` and the predictions by layer
        [rows, experts]; `weigh` is the model family's rule for weights.
        """
        self._experts[layer, 0], self._chosen_weights[layer] = experts, weights
        if self._routed:
            return self._run_by_cost(layer, logits, predicted)
        selection, rules = None, self._first.rules
        asked = Tokens(
            *(layer, DECODE, self._passes, experts, weights, logits),
            *(self._resident, self._absent, NO_STATE, predicted, weigh),
        )
        looked_up = executed = asked
        if self._routes:
            selection = self._choose("routing", asked)
            reads = rules.reads_changed_weights
            looked_up = executed = self._changed(asked, selection, reads)
        if self._resolves and (self._upgrades or self._lacks(looked_up)):
            change = self._choose("miss", looked_up)
            if rules.ladder:
                miss: Any = rules.miss
                self._levels[:] = miss.levels(looked_up.experts, looked_up.weights)
            if change is not None:
                selection = change if selection is None else change.after(selection)
                executed = self._changed(looked_up, selection, self._weighs)
        self._is_changed |= selection is not None
        for place, each in enumerate((looked_up, executed), 1):
            self._experts[layer, place] = each.experts
        if self._weighs:
            for place, each in enumerate((asked, looked_up, executed)):
                self._weights[place] = each.weights
        self._serve(core.CLOSE_ROW, layer, self._batch_of(layer, predicted))
        return selection

    def _run_by_cost(
        self, layer: int, logits: FloatArray, predicted: Mapping[int, FloatArray]
    ) -> Selection | None:
        """Serve a layer of all rows whose experts machine code chooses meanwhile."""
        routed = self._routed[layer]
        routing: Any = self._first.rules.routing
        routed[0].logits[:] = logits
        if routing.uses_scores:
            routed[0].scores[:] = routing.scores(logits)
        batch = self._batch_of(layer, predicted)
        if not self._serve(core.CLOSE_ROW | core.ROUTE, layer, batch, routed):
            return None
        self._is_changed = True
        return Selection(self._experts[layer, 2].copy())

    def _batch_of(self, layer: int, predicted: Mapping[int, FloatArray]) -> core.PassBatch:
        """Return a layer's batch, with what prefetchers propose."""
        batch = self._batches[layer]
        if self._first.rules.prefetches:
            bounds = batch.proposed_bounds[-len(self.engines) :]
            if predicted or self._first.answers is not None:
                proposed, bounds[:], levels = self._proposed(predicted)
                return batch._replace(proposed=proposed, proposed_levels=levels)
            bounds[:] = 0
        return batch

    def levels_of(self, layer: int) -> IntArray:
        """Return at which level each row has executed the experts of the layer just served: [rows,
        experts], -1 where it has not."""
        levels = np.full((len(self.engines), self._resident.shape[1] + 1), -1)
        # What was dropped has the last place.
        levels[each_token(levels), self._experts[layer, 2]] = self._levels
        return levels[:, :-1]

    def _serve(
        self,
        what: int,
        layer: int,
        batch: core.PassBatch,
        routed: tuple[costs.Routed, costs.Choice] | None = None,
    ) -> int:
        """Do a step of the event of each row, and enter the next layer (see `core.serve_row`)."""
        if layer < self._last:
            what |= core.ENTER_ROW
        if self._first.loop.is_compiled:
            return self._first.loop.step_rows(batch, what, layer, self._rows, routed)
        batch = core.PassBatch(*batch[:2], *(values.tolist() for values in batch[2:]))
        rows = self._rows._replace(demands=[0] * len(batch.keys))
        for row, engine in enumerate(self.engines):
            state, counts = engine.state, engine.loop.counts
            core.serve_row(state, engine.rank, batch, counts, what, layer, rows, row)
        return 0

    def _choose(self, axis: str, tokens: Tokens) -> Selection | None:
        """Let the rule of an axis choose, with what each row's own keeps of the layer."""
        rules = [getattr(engine.rules, axis) for engine in self.engines]
        state = rules[0].row_state(tokens.layer, 1)
        if len(rules) == 1 or not state.size:
            chosen: Selection | None = rules[0].choose(tokens._replace(state=state))
            return chosen
        kept = [rule.row_state(tokens.layer, 1) for rule in rules]
        state = np.concatenate(kept)
        chosen = rules[0].choose(tokens._replace(state=state))
        for own, changed in zip(kept, state, strict=True):
            own[0] = changed
        return chosen

    def _lacks(self, tokens: Tokens) -> bool:
        """Whether an expert of any row is absent."""
        if self._routes:
            return bool(tokens.is_missing.any())
        # What a router chose is not dropped: half of the time.
        return bool(self._absent[each_token(tokens.experts), tokens.experts].any())

    def _changed(self, tokens: Tokens, selection: Selection | None, weighs: bool) -> Tokens:
        """Return the tokens with a changed selection: its experts, and gate scores if wanted."""
        if selection is None:
            return tokens
        experts, weights = selection.experts, tokens.weights
        if weighs:
            weights = weights_of(tokens, selection)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        return tokens._replace(experts=experts, weights=weights)

    def _proposed(self, predicted: Mapping[int, FloatArray]) -> tuple[Array, Array, Array]:
        """Return what the rows' prefetchers propose: keys, where those of each row end, and at
        which levels, if there are several."""
        rules = [engine.rules.prefetch for engine in self.engines]
        levels, miss = NOTHING, self._first.rules.miss
        if self._first.answers is not None:
            # A ladder's own rules are not answered ahead; under others all is of the best level.
            keys = np.array(next(self._first.answers), np.int64)
            return keys, np.array([len(keys)]), np.zeros_like(keys)
        [first, *others] = predicted.values()
        logits = np.stack([first, *others], axis=1) if others else first[:, None]
        keys, counts = rules[0].propose_rows(rules, [*predicted], logits)
        if self._first.rules.ladder:
            levels = np.zeros(len(keys), np.int64)
            if isinstance(miss, MissOverRows):
                by_expert = miss.predicted_levels(logits.reshape(-1, logits.shape[-1]))
                each = np.arange(len(counts)).repeat(counts)
                levels = by_expert[each, keys % logits.shape[-1]]
        if len(rules) == 1:
            return keys, np.array([len(keys)]), levels
        return keys, counts.reshape(len(rules), -1).sum(axis=-1).cumsum(), levels
