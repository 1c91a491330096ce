"""Runs of one setting side by side, a row each: what their rules are asked, and what is served.

Each row has a memory of its own, and what it gets is what it would get alone. Where all that rules
decide is known or left to loops, a call serves any number of layers and passes. Else a layer is
entered, the rules choose for all rows from arrays, and the layer is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.choosing import Loop
from lm_eval_moecache.algorithms.miss.base import SubstitutingMiss
from lm_eval_moecache.algorithms.parameters import OverRows
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
from lm_eval_moecache.engine.kernel.serve import BEGIN, CLOSE, END, ENTER, SCAN
from lm_eval_moecache.engine.kernel.state import COUNTS, Call
from lm_eval_moecache.engine.memory import door
from lm_eval_moecache.records.arrays import (
    FloatArray,
    IntArray,
    Weigh,
    each_token,
    softmax,
    softmax_weights,
)
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import (
    DECODE,
    DROPPED,
    Event,
)
from lm_eval_moecache.records.ledger import COUNTED, PassRecord
from lm_eval_moecache.records.memory import address_of, make_record
from lm_eval_moecache.records.selection import Selection

Proposed = tuple[IntArray, IntArray]
"""Keys to prefetch, and where those of each event begin and end [events + 1]."""


class Rows:
    """Some engines of one setting, each of which has its part of a pass."""

    def __init__(self, engines: Sequence[Any]) -> None:
        """`engines` are those of `engine.engine`."""
        self.engines, self._first = engines, engines[0]
        size, num_experts = len(engines), self._first.geometry.num_experts
        self._num_experts = num_experts
        self.passes = np.zeros(size, np.int64)
        """The number of each row's pass in its engine."""
        self.counts = np.zeros(size, COUNTS)  # type: ignore[call-overload]
        """What the rows have counted in the pass in progress."""
        self._resident, self._absent = np.zeros((2, size, num_experts), dtype=bool)
        self._serve, self._call = door(), make_record(Call, num_rows=size)
        self._place, self._kept = address_of(self._call), dict[str, Any]()
        self._give(
            rows=np.array([engine.memory.run.address for engine in engines]),
            first_passes=self.passes,
        )
        self.restart()
        self.levels: IntArray | None = None
        """Of each entry of the layer just closed, the level at which it was executed, if there are
        several."""
        self.executed: IntArray = np.zeros((0, 0), np.int64)
        """The experts [tokens, top_k] executed by that layer, below 0 where dropped."""

    def restart(self) -> None:
        """Ask the rules that the engines have now."""
        self._rules = rules = self._first.rules
        self._call.awaits = int(rules.miss.awaits_late)
        self.by_loop = rules.choose_by_loop(self._first.eviction)
        self._proposes_by_loop = rules.proposes_by_loop
        reads = rules.miss, self._first.eviction, rules.prefetch
        self._reads_weights = any(rule.uses_logits or rule.uses_weights for rule in reads)

    def _give(self, **arrays: Any) -> None:
        """Have fields of the call point to arrays, which must have the kernel's types."""
        for name, array in arrays.items():
            self._kept[name] = array
            setattr(self._call, name, address_of(array))

    def _do(self, what: int, first_layer: int, end_layer: int) -> None:
        call = self._call
        call.what, call.first_layer, call.end_layer = what, first_layer, end_layer
        self._serve(self._place)
        for engine in self.engines:
            engine.callbacks.finish()

    def _begin_call(
        self,
        phase: str,
        counts: Any,
        bounds: IntArray | None,
        attention_s: Any,
        num_passes: int = 1,
    ) -> None:
        """Set the call for passes of a phase, whose figures are by row and pass."""
        rules, call = self._rules, self._call
        self.phase, call.num_passes = phase, num_passes
        self._routes, self._resolves = rules.routes(phase), rules.resolves(phase)
        call.last_predicts = int(phase == DECODE)
        call.upgrades = int(not self._resolves or rules.miss.upgrade)
        call.attention_s = call.resident = call.absent = 0
        call.route = call.replace = call.propose = call.next_use = 0
        call.experts = call.weights = call.levels = call.proposed = call.proposed_levels = 0
        self.passes[:] = [engine.num_passes for engine in self.engines]
        self._give(counts=counts)
        self._give_bounds(bounds)
        if attention_s is not None:
            self._give(attention_s=np.ascontiguousarray(attention_s, np.float64))
        if self._routes or self._resolves:
            self._give(resident=self._resident, absent=self._absent)

    def _give_bounds(self, bounds: IntArray | None) -> None:
        """Give the kernel the bounds of events; None: a token an event."""
        self._call.bounds = 0
        if bounds is not None:
            self._give(bounds=bounds)

    # Layer by layer.

    def begin(
        self,
        phase: str,
        tokens: Sequence[int],
        attention_s: Sequence[float] | None = None,
        *,
        is_noted: bool = False,
    ) -> None:
        """Begin a pass of so many tokens of each row; `is_noted` if drafting has begun it."""
        self.counts[:] = 0
        self._begin_call(phase, self.counts, np.cumsum([0, *tokens]), attention_s)
        self._note_pass()
        if not is_noted:
            self._do(BEGIN, 0, 0)
            return
        for engine, count in zip(self.engines, tokens, strict=True):
            engine.memory.run.tokens += count

    def _note_pass(self) -> None:
        for engine, number in zip(self.engines, self.passes.tolist(), strict=True):
            engine.rules.begin_pass(number)

    def begin_token(self, number: int, counts: Any) -> None:
        """Begin a token of a scanned text, a pass of this number, whose counts are added to."""
        self._begin_call(DECODE, counts, None, None)
        self.passes[:] = number
        self._note_pass()
        self._do(BEGIN | SCAN, 0, 0)

    def end_token(self) -> None:
        """End it."""
        self._do(END | SCAN, 0, 0)

    def finish(self, tokens: Sequence[int]) -> None:
        """End a pass of so many tokens of each row, and enter it into their ledgers."""
        self._do(END, 0, 0)
        for row, (engine, count) in enumerate(zip(self.engines, tokens, strict=True)):
            own = self.counts[row : row + 1]
            engine.ledger.enter(records_of(own, engine.num_passes, self.phase, [count]))

    def choose(
        self, batch: Batch, weigh: Weigh = softmax_weights, proposed: IntArray | None = None
    ) -> Selection | None:
        """Serve a layer of all rows; return what they execute if a rule changes it for any.

        `weigh` is the model family's rule for weights. What is `proposed` of a single row is known
        already.
        """
        layer, bounds = batch.first_layer, batch.bounds
        self._give_bounds(bounds)
        if self.by_loop:
            known = None if proposed is None else (proposed, np.array([0, len(proposed)]))
            self._serve_decided(batch, ENTER | CLOSE, known)
            return self.changed(batch.experts)
        places: Any = range(len(batch.experts) + 1) if bounds is None else bounds.tolist()
        event = Event(
            *(layer, self.phase, self.passes.tolist(), self._num_experts, batch.experts),
            *(batch.weights, batch.logits, places, self._resident, self._absent),
            predicted=batch.predicted_at(),
            weigh=weigh,
        )
        self._do(ENTER, layer, layer + 1)
        looked_up, executed, selection, levels = self._decided(event)
        self._give_choice(event, looked_up.experts, executed.experts)
        self.levels = levels
        if levels is not None:
            self._give(levels=levels)
        self._give_proposals(executed, proposed)
        self._give_seen(executed, lambda: self._first.next_uses([executed]))
        self._listen(executed.row)
        self._do(CLOSE, layer, layer + 1)
        return selection

    def _decided(self, event: Event) -> tuple[Event, Event, Selection | None, IntArray | None]:
        """Let the rules choose; return the event as looked up and as executed, and its levels.

        With it comes what they have changed; None where the router's own is executed.
        """
        looked_up = executed = event
        selection, levels, rules = None, None, self._rules
        if self._routes:
            selection = self._ask("routing", event)
            looked_up = executed = self._changed(event, selection)
        if rules.ladder:
            levels = np.zeros(event.experts.shape, np.int64)
        if self._resolves and (rules.miss.upgrade or looked_up.is_missing.any()):
            change = self._ask("miss", looked_up)
            if change is not None:
                selection = change if selection is None else change.after(selection)
                executed = self._changed(looked_up, selection)
            if levels is not None:
                levels = rules.required_levels(looked_up, executed)
        return looked_up, executed, selection, levels

    def _ask(self, axis: str, event: Event) -> Selection | None:
        """Let the rule of an axis choose: for all rows at once if it can."""
        rules = [getattr(engine.rules, axis) for engine in self.engines]
        if isinstance(rules[0], OverRows):
            whole: Selection | None = self._rules.choose(axis, rules[0], event._replace(own=rules))
            return whole
        parts = []
        for row, rule in enumerate(rules):
            own = event.row(row)
            parts.append((len(own.experts), self._rules.choose(axis, rule, own)))
        return Selection.join(event.experts, parts)

    def _changed(self, event: Event, selection: Selection | None) -> Event:
        """Return the event with a changed selection: its experts and their gate scores."""
        if selection is None:
            return event
        experts, weights = selection.experts, event.weights
        if self._reads_weights:
            weights = weights_of(event, selection)
        if selection.keep is not None:
            experts = np.where(selection.keep, experts, DROPPED)
        return event._replace(experts=experts, weights=weights)

    def _give_choice(self, event: Event | Batch, looked_up: IntArray, executed: IntArray) -> None:
        """Give the kernel what the router chose, and what was made of it."""
        top_k = self._first.geometry.top_k
        assert executed.shape[-1] == top_k, f"{executed.shape[-1]} experts a token, not {top_k}"
        self.executed = _ints(executed)
        self._give(executed=self.executed)
        self._give(looked_up=self.executed if looked_up is executed else _ints(looked_up))
        if self._routes or self._resolves:
            self._give(experts=_ints(event.experts))
            if len(event.weights):
                self._give(weights=np.ascontiguousarray(event.weights, np.float32))

    def _give_proposals(self, event: Event, known: IntArray | None) -> None:
        """Give it what the prefetchers propose at an event: keys, their bounds and levels."""
        rules, call = self._rules, self._call
        call.proposed = call.proposed_levels = 0
        if not rules.prefetches or (rules.prefetch.predicts_pass and known is None):
            return
        keys: list[Any] = [known]
        levels = list[IntArray]()
        if known is None:
            events = [event.row(row) for row in range(len(self.engines))]
            asked = [engine.rules.prefetch for engine in self.engines]
            keys = [rules.propose(*each) for each in zip(asked, events, strict=True)]
            if rules.ladder and self._resolves:
                levels = [rules.levels_of(*each) for each in zip(events, keys, strict=True)]
        bounds = np.cumsum([0, *map(len, keys)])
        self._give(proposed=_ints(np.concatenate(keys)), proposed_bounds=bounds)
        if levels:
            self._give(proposed_levels=np.concatenate(levels))

    def _give_seen(self, event: Event | Batch, next_use: Callable[[], IntArray]) -> None:
        """Give it what evictions look at; for offline ones, when keys are needed next."""
        eviction = self._first.eviction
        if eviction.uses_weights:
            self._give(seen_weights=np.ascontiguousarray(event.weights, np.float32))
        if eviction.is_offline:
            self._give(next_use=_ints(next_use()))

    def _listen(self, event_at: Callable[[int], Event]) -> None:
        """Let evictions with a state of their own get the events of the batch by their places."""
        if self._first.memory.run.stateful:
            for engine in self.engines:
                engine.callbacks.event_at = event_at

    # By loops.

    def serve(
        self,
        batch: Batch,
        proposed: Proposed | None = None,
        next_use: IntArray | None = None,
        scanned: Any = None,
    ) -> Any:
        """Serve whole passes of all rows; return the counts [rows, passes].

        `scanned` are those of a text's tokens, to which one layer of it adds.
        """
        size, num_passes = len(self.engines), batch.num_passes
        counts: Any = scanned
        if scanned is None:
            counts = np.zeros((size, num_passes), COUNTS)
        seconds = None
        if batch.positions is not None:
            told = [self._first.attention_s(batch.phase, each) for each in batch.positions]
            seconds = np.reshape(told, (num_passes, size)).T
        self._begin_call(batch.phase, counts, batch.bounds, seconds, num_passes)
        what = BEGIN | ENTER | CLOSE | END
        self._serve_decided(batch, what if scanned is None else what | SCAN, proposed, next_use)
        return counts

    def _serve_decided(
        self,
        batch: Batch,
        what: int,
        proposed: Proposed | None = None,
        next_use: IntArray | None = None,
    ) -> None:
        """Serve events in one call: all that is decided of them is known, or left to loops."""
        budget = None
        if self._resolves and not self._routes:
            budget = np.zeros(len(batch.experts), np.int64)
            for own, event in self._by_layer(batch):
                with self._rules.naming("miss", "budget", event.layer):
                    budget[own] = self._rules.miss.budget(event)
        self._give_choices(batch, budget)
        if proposed is None and self._proposes_by_loop:
            self._give_predictions(batch)
        elif self._rules.prefetches and (
            proposed is not None or not self._rules.prefetch.predicts_pass
        ):
            keys, bounds = proposed or self._proposals_of(batch, bool(what & BEGIN))
            self._give(proposed=_ints(keys), proposed_bounds=_ints(bounds))
        events = (self._event_at(batch, place) for place in range(batch.num_events))
        self._give_seen(
            batch, lambda: self._first.next_uses(events) if next_use is None else next_use
        )
        self._listen(lambda place: self._event_at(batch, place))
        self._do(what, batch.first_layer, batch.first_layer + batch.num_layers)

    def _event_at(self, batch: Batch, place: int) -> Event:
        """Return an event of a batch, as executed."""
        own, size = batch.tokens_at(place), len(self.engines)
        index, layer = divmod(place // size, batch.num_layers)
        return Event(
            layer + batch.first_layer,
            batch.phase,
            [int(self.passes[place % size]) + index],
            self._num_experts,
            self.executed[own],
            batch.weights[own],
            batch.logits[own],
            predicted=batch.predicted_at(place),
        )

    def _by_layer(self, batch: Batch) -> Iterator[tuple[Any, Event]]:
        """Yield the tokens of each layer: their places, and an event of all."""
        own: Any = slice(None)
        for layer in range(batch.num_layers):
            if batch.num_layers > 1:
                layers = np.arange(batch.num_events) // batch.num_rows % batch.num_layers
                own = np.flatnonzero(np.repeat(layers == layer, batch.sizes))
            given = batch.experts[own], batch.weights[own], batch.logits[own]
            number = layer + batch.first_layer
            yield own, Event(number, batch.phase, [0], self._num_experts, *given)

    def _proposals_of(self, batch: Batch, is_whole: bool) -> Proposed:
        """Return what the prefetchers propose at the events of a layer, or of whole passes."""
        size, keys = len(self.engines), list[IntArray]()
        for place in range(batch.num_events):
            rules, event = self.engines[place % size].rules, self._event_at(batch, place)
            if is_whole and place // size % batch.num_layers == 0:
                rules.prefetch.on_pass(event.pass_index)
            keys.append(rules.propose(rules.prefetch, event))
        return np.concatenate(keys), np.cumsum([0, *map(len, keys)])

    def changed(self, experts: IntArray) -> Selection | None:
        """Return what loops have made of the router's choice; None where that is executed."""
        if not self._call.changes:
            return None
        miss: Any = self._rules.miss
        return miss.changed(self.executed, experts) if self._resolves else Selection(self.executed)

    def _give_choices(self, batch: Batch, budget: IntArray | None) -> None:
        """Let the kernel ask the loop of routing or of misses, for any events with these tokens.

        `budget` is what the miss rule allows each token [tokens].
        """
        routing, miss, call = self._rules.routing, self._rules.miss, self._call
        looked_up = executed = batch.experts
        if self._routes or self._resolves:
            executed = np.empty(batch.experts.shape, np.int64)
        call.changes = 0
        if self._routes:
            assert isinstance(routing, RoutingByCost), "routing without a loop"
            looked_up, own = executed, [engine.rules.routing for engine in self.engines]
            loop: Loop = routing.give(batch, own, resident=self._resident, chosen=executed)
            call.route, call.routing = loop.addresses
        elif self._resolves:
            assert isinstance(miss, SubstitutingMiss), "misses without a loop"
            assert budget is not None, "misses without a budget"
            flags = {"resident": self._resident, "absent": self._absent}
            loop = miss.give(batch, budget, chosen=executed, **flags)
            call.replace, call.replacing = loop.addresses
        self._give_choice(batch, looked_up, executed)

    def _give_predictions(self, batch: Batch) -> None:
        """Let it ask the prefetcher's loop, with predictions by event."""
        rule: Any = self._rules.prefetch
        is_alone = len(batch.experts) == batch.num_events
        own = [engine.rules.prefetch for engine in self.engines]
        rule.give(own, batch.predicted.reshape(-1, self._num_experts), is_alone)
        self._give(predictions=batch.prediction_bounds)
        self._call.propose, self._call.proposing = rule.loop.addresses


def _ints(array: Any) -> IntArray:
    return np.ascontiguousarray(array, np.int64)


def weights_of(event: Event, selection: Selection) -> FloatArray:
    """Return the gate scores of a changed selection's experts, [tokens, top_k]."""
    experts, weights = selection.experts, event.weights
    if not (len(weights) and len(event.logits)):
        return weights
    scores, executed = softmax(event.logits), event.experts != DROPPED
    scores[executed.nonzero()[0], event.experts[executed]] = weights[executed]
    weights = scores[each_token(experts), experts]
    if selection.weights is None:
        return weights
    return np.where(np.isnan(selection.weights), weights, selection.weights)


def records_of(counts: Any, first: int, phase: str, tokens: Sequence[int]) -> list[PassRecord]:
    """Return the records of served passes, numbered from `first`, from their counts."""
    names = (*COUNTED, "start_s", "end_s")
    if len(counts) == 1:
        values = dict(zip(names, counts.tolist()[0], strict=True))
        return [PassRecord(index=first, phase=phase, num_tokens=tokens[0], **values)]
    served = zip(tokens, counts["start_s"].tolist(), strict=True)
    records = [PassRecord(index, phase, *each) for index, each in enumerate(served, first)]
    for name in names:
        # Most counts are 0 in most runs.
        if counts[name].any():
            for record, value in zip(records, counts[name].tolist(), strict=True):
                setattr(record, name, value)
    return records
