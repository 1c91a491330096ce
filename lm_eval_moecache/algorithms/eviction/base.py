"""The eviction axis: events in, one key out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Sequence
from inspect import unwrap
from typing import Any, ClassVar, Literal

from lm_eval_moecache.algorithms.features import Rank
from lm_eval_moecache.algorithms.parameters import Algorithm
from lm_eval_moecache.records.event import Event


class EvictionAlgorithm(Algorithm):
    """Chooses the victim; sizes, pins and residency are the cache's alone.

    One instance serves one cache (with a capacity of `n/layer`, one layer). An algorithm must be
    deterministic in its constructor's arguments and the calls it receives; ties go to the smaller
    key. It is a `RankedEviction`, or one that `StatefulEviction` calls.
    """

    axis: ClassVar[str] = "eviction"
    compares_layers: ClassVar[bool] = False
    """Whether it only chooses between layers, which a cache of one layer (`n/layer`) has not."""

    capacity_bytes: int = 0
    """Bytes of the cache it serves, which sets it before the first call."""
    num_slots: int = 0
    """Experts of the model's mean size, at the best level, that the cache has room for: what ARC,
    2Q and S3-FIFO divide. At least 1; the cache sets it before the first call."""


class RankedEviction(EvictionAlgorithm):
    """An eviction that ranks residents by their features.

    A subclass sets `rank`, a plain function in the subset of Python that numba compiles (see
    `features.Rank`), or returns another one depending on its parameters. The engine has the
    features in its tables and asks for nothing else.
    Cost: O(layers + residents of a layer) per victim.
    """

    rank: Any
    """A `Rank`, which says who leaves: the lowest."""
    recency: ClassVar[Literal["", "use", "loading"]] = ""
    """Whether the rank is the order of use or that of loading, in which residents are kept: their
    first one leaves, at once."""
    ages: ClassVar[bool] = False
    """Whether the order within a layer changes with every event, used or not."""
    moves: ClassVar[bool] = True
    """Whether a rank can change with the layer being served."""
    only_best: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    forecasts: ClassVar[bool] = False
    growth = parameter = keep = 0.0
    """See `features.Now`."""

    @property
    def plain_rank(self) -> Rank:
        """The rank function itself, without wrappers around the algorithm's methods."""
        found: Rank = unwrap(self.rank)
        return found


class StatefulEviction(EvictionAlgorithm):
    """An eviction with a state of its own, which hears of all that the cache does.

    The cache guarantees the order `on_insert` -> any number of `on_event` / `on_predicted` ->
    `on_evict` for each key, and `on_pass` before the first event of each pass. A resident that is
    loaded again at a better precision has not left: there are no calls for it.
    """

    @abstractmethod
    def on_insert(self, key: int, prefetched: bool) -> None:
        """Note that a key became resident; `prefetched` means that no event has needed it yet."""

    def on_event(self, event: Event) -> None:
        """Note the use of `event.keys`, in order of need, after the event was executed.

        After an event larger than the cache, some of them are no longer resident.
        """
        return

    def on_executed(self, layer: int, keys: Sequence[int]) -> None:
        """Note that these keys of the running event have been executed, with more to come.

        Called between the waves of an event larger than the cache: from here on these keys may be
        evicted. `on_event` follows for all of the event's keys. Most algorithms can ignore it.
        """
        return

    def on_predicted(self, key: int) -> None:
        """Note that a prefetcher wants a resident key."""
        return

    @abstractmethod
    def on_evict(self, key: int) -> None:
        """Forget a key: the cache has evicted it."""

    def on_miss(self, key: int) -> None:
        """Note that room is about to be made for an absent key, as ghost lists need to know.

        Called before each call of `victim` on its behalf, so possibly several times.
        """
        return

    @abstractmethod
    def victim(self, pinned: Container[int], layer: int) -> int | None:
        """Return the resident key to evict while `layer` is being served, or None.

        Never a pinned key; None only if all resident keys are pinned. State does not change until
        `on_evict`.
        """


class HitRule(StatefulEviction):
    """Base of the textbook rules, which distinguish a hit from the use that loaded the expert.

    The engine reports every use, including the one that caused a demand load (`on_event` follows
    `on_insert`); textbook rules count only hits. The first use of a key loaded by a prefetch or
    `warm=` is a hit. A rule implements `admit`, `hit`, `forget` and `victim`; `victim` may record
    the side effects of its choice, which take effect in `forget` of that key.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loading: set[int] = set()
        """Keys that a demand has just loaded: their next use is the demand itself."""

    def on_pass(self, pass_index: int) -> None:
        self._loading.clear()

    def on_insert(self, key: int, prefetched: bool) -> None:
        if not prefetched:
            self._loading.add(key)
        self.admit(key)

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            if key in self._loading:
                self._loading.remove(key)
            else:
                self.hit(key)

    def on_evict(self, key: int) -> None:
        self._loading.discard(key)
        self.forget(key)

    @abstractmethod
    def admit(self, key: int) -> None:
        """Note that a key became resident."""

    @abstractmethod
    def hit(self, key: int) -> None:
        """Note a hit on a key, which may have left again if its event was larger than the cache."""

    @abstractmethod
    def forget(self, key: int) -> None:
        """Note that a key was evicted, chosen by `victim` or not."""


class SecondChance(HitRule):
    """Base of the rules whose hand passes over residents that were hit, and clears their bit.

    A rule implements `in_order`, and `forget`, where what `victim` has passed takes effect.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hit: dict[int, bool] = {}
        """Resident key -> its bit, set by a hit."""
        self._passed: tuple[int, list[int]] = (-1, [])
        """The last answer of `victim`, and whom the hand passes on its way there."""

    @abstractmethod
    def in_order(self) -> Iterable[int]:
        """Return the residents, the next under the hand first."""

    def admit(self, key: int) -> None:
        self._hit[key] = False

    def hit(self, key: int) -> None:
        if key in self._hit:
            self._hit[key] = True

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        passed: list[int] = []
        for key in self.in_order():
            if key in pinned:
                continue
            if not self._hit[key]:
                self._passed = (key, passed)
                return key
            passed.append(key)
        # All were hit: the hand returns to the first.
        self._passed = (passed[0] if passed else -1, passed)
        return passed[0] if passed else None


class GhostQueue:
    """Evicted keys, oldest first, up to a size; a key that is missed again is removed.

    `recall` may be called several times for a key before it is loaded. O(1) per call.
    """

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}
        self._recalled = -1

    def recall(self, key: int) -> None:
        """Note that a key is about to be loaded: if it is in the queue, remove and remember it."""
        if key in self._keys:
            del self._keys[key]
            self._recalled = key

    def admit(self, key: int) -> bool:
        """Return whether a key that has just been loaded was in the queue."""
        self.recall(key)
        was_here, self._recalled = self._recalled == key, -1
        return was_here

    def add(self, key: int, size: int) -> None:
        self._keys[key] = None
        while len(self._keys) > size:
            del self._keys[next(iter(self._keys))]
