"""Choices of experts by loops that numba compiles, over functions of records that rules state.

A rule states what an expert costs, say, as a function of two records. The loop around it is called
by address: by `engine.kernel` for each event of many passes, or from Python for one event. Where
numba cannot compile a rule's function it is called in plain Python, and chooses the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.memory import (
    DOUBLES,
    FLAGS,
    FLOATS,
    INTS,
    address_of,
    make_record,
    numbers,
)


@dataclass
class Asked:
    """What a loop is told before each event: the begin of its own record."""

    layer: int = 0
    row: int = 0
    """Of several runs side by side, the one whose tokens they are."""
    num_experts: int = 0
    """Of a layer."""
    top_k: int = 0


@dataclass
class Answer:
    """What a rule's function has returned."""

    first: float = 0.0
    second: float = 0.0


def sort_experts(experts: int, count: int, scores: int) -> None:
    """Sort the experts [count] at an address by their `scores` [experts], largest first.

    Ties go to the smaller expert. Shell's sort: machine code has no memory of its own.
    """
    order, values, gap = numbers(experts, INTS), numbers(scores, FLOATS), count
    while gap > 1:
        gap = max(5 * gap // 11, 1)
        for start in range(gap, count):
            expert, place = order[start], start
            own = values[expert]
            while place >= gap:
                other = order[place - gap]
                if values[other] > own or (values[other] == own and other < expert):
                    break
                order[place] = other
                place -= gap
            order[place] = expert


class Loop:
    """A loop over one event's tokens, with its record in memory.

    The loop is a function `entry` of a module, which takes the record, the first token, and the
    last one's successor; it returns how many entries it has changed, or keys it has found.
    """

    def __init__(
        self, module: ModuleType, entry: str, kind: type[Any], geometry: Geometry, **given: Any
    ) -> None:
        self._code, self._entry = module, entry
        sizes = {"num_experts": geometry.num_experts, "top_k": geometry.top_k}
        self.record = make_record(kind, **sizes, **given)
        self._kept: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        """Name of a field -> the array that it points to as it was given."""

    @cached_property
    def function(self) -> Callable[[int, int, int], int]:
        from lm_eval_moecache.records.machine_code import compiled  # imports numba

        modules = sys.modules[__name__], self._code
        made: Callable[[int, int, int], int] = compiled(modules, self._entry)
        return made

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the function is, and its record."""
        return address_of(self.function), address_of(self.record)

    def ask(self, rule: Callable[..., Any], **records: type[Any]) -> None:
        """Let the loop ask a rule's function with these records, by their names in its own."""
        from lm_eval_moecache.records.machine_code import bridge  # imports numba

        made = {name: make_record(kind) for name, kind in records.items()}
        self.give_records(**made, answer=make_record(Answer))
        self.record.cost = bridge(rule, *records.values(), Answer)

    def give_records(self, **records: Any) -> None:
        for name, record in records.items():
            self._kept[name] = record
            setattr(self.record, name, address_of(record))

    def give(self, **arrays: Any) -> None:
        """Have fields of the record point to arrays; those without entries are as if not given."""
        for name, array in arrays.items():
            if self._given.get(name) is array:
                continue
            flat = array.view(FLAGS) if array.dtype == np.bool_ else array
            kind = flat.dtype if flat.dtype in (FLAGS, FLOATS, DOUBLES) else INTS
            whole = self._kept[name] = np.ascontiguousarray(flat, kind)
            # What had to be copied is copied again, as its numbers may change.
            self._given[name] = array if whole is flat else None
            setattr(self.record, name, address_of(whole) if whole.size else 0)

    def run(self, event: Event) -> int:
        """Choose for an event; return the sum of the answers for its rows."""
        from lm_eval_moecache.records.machine_code import raise_kept  # imports numba

        total, start, self.record.layer = 0, 0, event.layer
        for row, size in enumerate(event.sizes):
            self.record.row = row
            total += self.function(address_of(self.record), start, start + size)
            start += size
        raise_kept()
        return total
