"""The miss axis: absent experts in, what to load and what to execute out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.core.artefact import Artefact
from lm_eval_moecache.core.records import (
    DROPPED,
    BoolArray,
    Event,
    Fetch,
    Geometry,
    IntArray,
    Selection,
)


@dataclass(frozen=True, slots=True)
class Resolution:
    """What to do about the absent experts of one event.

    `fetch` lists what is loaded, in the order it is asked of the link; `selection` replaces the
    experts to execute, and is None where all of them are executed as asked.
    """

    fetch: Sequence[Fetch]
    selection: Selection | None = None


class MissAlgorithm(ABC):
    """Decides for each absent expert whether it is loaded (and how well), replaced or dropped.

    `Event.experts` are always there, heaviest first; what routing has dropped is DROPPED in them.
    In an event of several tokens each token is judged alone, by what was resident when the event
    began: an expert may be loaded for one token and replaced for another.
    """

    source: ClassVar[str]
    """The paper and section it implements."""
    draws: ClassVar[bool] = False
    """Whether its choices depend on the seed."""
    is_lossless: ClassVar[bool] = False
    """Whether every absent expert is loaded at full precision, so that results cannot change."""
    uses_logits: ClassVar[bool] = False
    """Whether `Event.weights` and `Event.logits` are needed."""
    cached_first: ClassVar[bool] = False
    """Whether the resident experts of an event are executed while the absent ones are loaded."""
    artefact_kind: ClassVar[str | None] = None
    """The kind of artefact (`buddies`, `predictor`) that its parameter `profile` names, if any."""
    artefact: Artefact | None = None
    """The artefact it was built with: the wrapped model checks that it is the model's own."""
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Axis -> the only algorithms there that go with this one; `pairs_because` says why."""
    pairs_because: ClassVar[str] = ""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed

    @abstractmethod
    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        """Say what becomes of the `absent` keys (in order of need), or None to load them all.

        Every absent key is either in `fetch` or no longer in the selection. `resident` holds the
        keys that are near now. A selection returned has DROPPED where the event has it.
        """


Cost = Callable[[IntArray, IntArray], npt.NDArray[np.floating[Any]]]
"""(tokens [n], the expert each of them misses [n]) -> what each substitute costs [n, experts]."""


def absent_entries(experts: IntArray, near: BoolArray) -> BoolArray:
    """Mark the [tokens, top_k] entries whose expert has to come from afar; `near` is [experts]."""
    return np.asarray((experts != DROPPED) & ~near[experts])


def still_needed(
    event: Event, absent: Sequence[int], experts: IntArray, keep: BoolArray | None, num_experts: int
) -> list[Fetch]:
    """Return full-precision fetches of the absent keys that some token still executes."""
    live = experts != DROPPED if keep is None else (experts != DROPPED) & keep
    wanted = np.zeros(num_experts, dtype=bool)
    wanted[experts[live]] = True
    base = event.layer * num_experts
    return [Fetch(key) for key in absent if wanted[key - base]]


def substitute(experts: IntArray, near: BoolArray, cost: Cost) -> IntArray:
    """Return [tokens, top_k] experts with the absent ones replaced by near ones where allowed.

    A token never gets an expert twice. Its absent experts choose in turn, heaviest first, the
    cheapest near expert that the token has not; infinity forbids, ties go to the smaller index.
    """
    chosen: IntArray = experts.copy()
    free = np.broadcast_to(near, (len(experts), len(near))).copy()
    rows, columns = (experts != DROPPED).nonzero()
    free[rows, experts[rows, columns]] = False
    missing = absent_entries(experts, near)
    for column in range(experts.shape[1]):
        tokens = missing[:, column].nonzero()[0]
        prices = np.where(free[tokens], cost(tokens, experts[tokens, column]), np.inf)
        best = prices.argmin(axis=-1)
        found = np.isfinite(prices[np.arange(len(tokens)), best])
        tokens, best = tokens[found], best[found]
        chosen[tokens, column] = best
        free[tokens, best] = False
    return chosen


def resolve_substitution(
    event: Event,
    absent: Sequence[int],
    near: BoolArray,
    cost: Cost,
    *,
    fallback: Literal["fetch", "drop"],
    weight: Literal["own", "missing"],
) -> Resolution | None:
    """Replace what can be and fetch or drop the rest; `weight` says whose a substitute has."""
    assert event.experts is not None
    chosen = substitute(event.experts, near, cost)
    keep = ~absent_entries(chosen, near) if fallback == "drop" else None
    if keep is None and np.array_equal(chosen, event.experts):
        return None
    weigh_as = event.experts if weight == "missing" else None
    selection = Selection(chosen, keep, weigh_as=weigh_as)
    return Resolution(still_needed(event, absent, chosen, keep, len(near)), selection)
