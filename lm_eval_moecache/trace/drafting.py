"""What a draft model did before the passes that verify its tokens, as a trace keeps it.

Shapes: F forwards of the draft before one pass, B layers of the draft, C of them that foretell a
layer of the model, N experts kept of each such prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.draft import NO_TARGET, Draft
from lm_eval_moecache.trace.columns import Ints, misfit

TOKENS, EXPERTS, RANKED = DRAFT_COLUMNS = ("draft_tokens", "draft_experts", "draft_ranked")
"""Columns of lists that stand in a pass' first row: tokens of each forward [F]; different experts
that each layer of the draft needed [F, B]; the model's experts, likeliest first [F, C, N]."""


class Drafting(NamedTuple):
    """The forwards of a draft before one pass; its lists are flat."""

    tokens: Sequence[int] = ()
    experts: Sequence[int] = ()
    ranked: Sequence[int] = ()


NO_DRAFTING = Drafting()


class DraftNotes:
    """Takes down what a draft stage is told, until the pass begins that it belongs to.

    A prediction is kept as the order of its `ranked` likeliest experts: what a prefetcher sees
    that looks at nothing else (`DraftStagePrefetch.by_order`).
    """

    def __init__(self, ranked: int) -> None:
        self.ranked = ranked
        self.begin()

    def begin(self) -> None:
        """Begin with the drafting for another pass."""
        self._tokens: list[int] = []
        self._experts: list[int] = []
        self._order: list[int] = []

    def dense(self, layer: int, num_tokens: int) -> None:
        if layer == 0:
            self._tokens.append(num_tokens)

    def predict(self, logits: FloatArray) -> None:
        """Take the [1, experts] logits of a gate, in the order of the draft's layers."""
        self._order += np.argsort(-logits[0], kind="stable")[: self.ranked].tolist()

    def experts(self, num_experts: int) -> None:
        self._experts.append(num_experts)

    def take(self) -> Drafting:
        """Return what has been noted since `begin`, once."""
        noted = Drafting(self._tokens, self._experts, self._order)
        self.begin()
        return noted


class Lists(NamedTuple):
    """A list for each pass: pass p's is `values[bounds[p]:bounds[p + 1]]`."""

    values: Ints
    bounds: IntArray

    def at(self, index: int) -> Ints:
        return self.values[self.bounds[index] : self.bounds[index + 1]]

    def pass_of(self, place: int) -> str:
        """Name the pass that a value belongs to."""
        return f"pass {int(np.searchsorted(self.bounds, place, side='right')) - 1}"

    def check(self, name: str, column: str, sizes: IntArray, least: int, most: int) -> None:
        """Check how many values each pass has, and that they lie within these bounds."""
        found = np.diff(self.bounds)
        if (found != sizes).any():
            index = int((found != sizes).argmax())
            problem = f"has {found[index]} values, must have {sizes[index]}"
            raise misfit(name, f"pass {index}", column, problem)
        bad = (self.values < least) | (self.values > most)
        if bad.any():
            place = int(bad.argmax())
            problem = f"holds {self.values[place]}, must lie in {least}..{most}"
            raise misfit(name, self.pass_of(place), column, problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """All drafting of a recorded run. `draft` is None where drafts came from the prompt."""

    draft: Draft | None = None
    ranked: int = 0
    """Experts kept of each prediction, likeliest first."""
    tokens: Lists | None = None
    experts: Lists | None = None
    ranks: Lists | None = None
    settled: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Pass -> tokens that were drafted for it, and how many it accepted."""

    @property
    def foretold(self) -> tuple[int, ...]:
        """The model's layers that each forward of the draft foretells."""
        targets = () if self.draft is None or not self.ranked else self.draft.targets
        return tuple(target for target in targets if target != NO_TARGET)

    def output_tokens(self, passes: Iterable[int]) -> int:
        """Return how many tokens passes of a generation gave: their own, and accepted drafts."""
        return sum(1 + self.settled.get(index, (0, 0))[1] for index in passes)

    def check(self, name: str, num_experts: int) -> None:
        """Check that the lists of each pass fit together; ValueError names pass and column."""
        if self.draft is None:
            return
        assert self.tokens is not None and self.experts is not None and self.ranks is not None
        forwards = np.diff(self.tokens.bounds)
        own, width = self.draft.geometry, len(self.foretold) * self.ranked
        self.tokens.check(name, TOKENS, forwards, 1, np.iinfo(np.int32).max)
        self.experts.check(name, EXPERTS, forwards * own.num_layers, 1, own.num_experts)
        self.ranks.check(name, RANKED, forwards * width, 0, num_experts - 1)
        if width:
            ordered = np.sort(self.ranks.values.reshape(-1, self.ranked), axis=-1)
            twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
            if twice.any():
                place = self.ranks.pass_of(int(twice.argmax()) * self.ranked)
                raise misfit(name, place, RANKED, "names an expert twice")
