"""What the kernel asks Python for: victims of stateful evictions, and to read what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.engine.kernel import cache
from lm_eval_moecache.engine.memory import Memory
from lm_eval_moecache.engine.rules import Misfit, Rules, shown
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.memory import address_of, callback

_MESSAGES = 4096
_SPANS = 1024
_NAMES = (
    *("on_pass", "keys", "on_insert", "on_insert", "on_predicted", "on_miss", "on_evict"),
    *("on_executed", "on_executed", "on_event"),
)
"""What a message calls, by its number; those of a wall engine are its own."""
_OF_KEYS = (cache.DEMANDED, cache.PREFETCHED, cache.HINTED, cache.MISSED, cache.EVICTED)
SPANS = ("dense", "wait", "stall", "wake", "experts", "transfer", "loads", "host")
"""By number, the names of `clock.SPANS`."""
AddSpan = Callable[[str, float, float, int, int], object]
"""Takes a span's kind, start and end, its layer or bytes, and how many tokens or experts, or a
prefetch's key."""


class Callbacks:
    """Answers a run's machine code, which leaves messages to evictions and spans of a timeline."""

    def __init__(self, memory: Memory, evictions: Sequence[Any], rules: Rules) -> None:
        self._memory, self.evictions, self._rules = memory, evictions, rules
        num_layers = memory.run.num_layers
        self.by_layer = evictions if len(evictions) > 1 else [*evictions] * num_layers
        self.event_at: Callable[[int], Event] = lambda place: self._event
        """Returns the event at a place of the batch in progress, as executed."""
        self.scanned_layer: int | None = None
        """The layer of the text that is scanned: its tokens are passes of that layer alone."""
        self.error: BaseException | None = None
        """What an eviction raised while machine code ran."""
        self._event: Any = None
        self._executed: list[int] = []
        """Keys that were executed in the wave in progress."""
        self._pinned_mark, self._pinned = -1, frozenset[int]()
        self._answer: Any = None
        self._add_span: AddSpan = lambda *span: None
        if memory.run.notifies:
            self._messages = np.zeros(_MESSAGES, np.int64)
            self._notify = self._readers()
            memory.run.messages, memory.run.max_messages = address_of(self._messages), _MESSAGES
            self._listen()

    def _listen(self) -> None:
        self._answer = callback(self._checked)
        self._memory.run.ask = address_of(self._answer)

    def record_spans(self, add_span: AddSpan) -> None:
        """Call `add_span` with all that clock, link and host do."""
        run, self._add_span = self._memory.run, add_span
        self._spans = np.zeros((_SPANS, 5))
        run.spans, run.max_spans = address_of(self._spans), _SPANS
        self._listen()

    def _readers(self) -> Sequence[Callable[[int], object]]:
        """Return what is done with each kind of message (see `cache.PASS`), by its number."""
        num_experts = self._memory.run.num_experts
        if not self._memory.run.stateful:
            return [lambda number: None] * len(_NAMES)

        def of(name: str, *more: Any) -> Callable[[int], object]:
            if len(self.evictions) > 1:
                return lambda key: getattr(self.by_layer[key // num_experts], name)(key, *more)
            method = getattr(self.evictions[0], name)
            return (lambda key: method(key, *more)) if more else method

        return (
            self._begin_pass,
            self._begin_event,
            of("on_insert", False),
            of("on_insert", True),
            *map(of, ("on_predicted", "on_miss", "on_evict")),
            lambda key: self._executed.append(key),
            self._end_wave,
            self._note,
        )

    def _begin_pass(self, number: int) -> None:
        layer = self.scanned_layer
        for eviction in self.evictions if layer is None else [self.by_layer[layer]]:
            eviction.on_pass(number)

    def _begin_event(self, place: int) -> None:
        self._event = self.event_at(place)

    def _end_wave(self, layer: int) -> None:
        executed, self._executed = self._executed, []
        self.by_layer[layer].on_executed(layer, executed)

    def _note(self, layer: int) -> None:
        self._executed = []
        self.by_layer[layer].on_event(self._event)

    def _checked(self, what: int, mark: int, _: int) -> int:
        """Do what machine code asks for: find a victim of a cache or what else `what` says.

        Machine code cannot be ended by an exception. It is kept in `error`, and what is still asked
        is answered with any resident.
        """
        experts, num_experts = self._memory.experts, self._memory.run.num_experts
        try:
            if self.error is None:
                self._read()
                if what < 0:
                    return 0
                return self._victim(what, mark)
        except BaseException as error:
            self.error = error
        self._memory.run.num_messages = self._memory.run.num_spans = 0
        if what < 0:
            return 0
        first, end = (self._memory.caches[name][what] for name in ("first_layer", "end_layer"))
        own = slice(first * num_experts, end * num_experts)
        free = (experts["resident"][own] > 0) & (experts["pinned"][own] != mark)
        return int(free.argmax()) + own.start if free.any() else -1

    def _victim(self, number: int, mark: int) -> int:
        """Return the key that a cache's eviction chooses outside those pinned by `mark`, or -1."""
        if mark != self._pinned_mark:
            keys = [] if self._event is None else list(self._event.keys)
            marks = self._memory.experts["pinned"][keys].tolist()
            self._pinned_mark = mark
            self._pinned = frozenset(k for k, at in zip(keys, marks, strict=True) if at == mark)
        layer = int(self._memory.run.layer)
        with self._rules.naming("eviction", "victim", layer):
            found = self.evictions[number].victim(self._pinned, layer)
            if found is None:
                return -1
            expected, most = "Expected: a resident key, or None.", len(self._memory.experts)
            if not isinstance(found, int | np.integer) or found not in range(most):
                raise Misfit(f"{shown(found)}. {expected}")
            if found in self._pinned:
                raise Misfit(f"the pinned key {found}. {expected}")
            if not self._memory.experts["resident"][found]:
                raise Misfit(f"the key {found}, which is not resident. {expected}")
        return int(found)

    def _read(self) -> None:
        run = self._memory.run
        if run.num_spans:
            spans, run.num_spans = self._spans[: run.num_spans].tolist(), 0
            for kind, start_s, end_s, what, number in spans:
                self._add_span(SPANS[int(kind)], start_s, end_s, int(what), int(number))
        if run.num_messages:
            messages, run.num_messages = self._messages[: run.num_messages].tolist(), 0
            kind = number = 0
            try:
                for kind, number in zip(messages[::2], messages[1::2], strict=True):
                    self._notify[kind](number)
            except Exception as error:
                layer = number // run.num_experts if kind in _OF_KEYS else number
                if kind >= len(_NAMES):
                    raise
                with self._rules.naming("eviction", _NAMES[kind], layer if kind else None):
                    raise error

    def finish(self) -> None:
        """Read what is left once machine code has ended; raise what an eviction has raised."""
        if self.error is None:
            if self._memory.run.num_messages or self._memory.run.num_spans:
                self._read()
            return
        error, self.error = self.error, None
        raise error
