"""Caches of numbered slots, either all of one size or each of its expert's size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from lm_eval_moecache.engine.memory import Cache, Memory
from lm_eval_moecache.records.geometry import Geometry


class PlacedCache(Cache):
    """A cache that gives each key a slot while it is resident or arriving."""

    def __init__(self, memory: Memory, index: int) -> None:
        super().__init__(memory, index)
        self.slots: dict[int, int] = {}
        """Key -> slot, of all resident and arriving keys."""

    def place(self, key: int, level: int) -> None:
        """Give a key a slot at a level; its bytes are already taken."""
        self.slots[key] = self._place(key, level)

    def vacate(self, key: int) -> None:
        """Take a key's slot from it."""
        self._vacate(self.slots.pop(key))

    def take_dropped(self) -> Sequence[int]:
        """Return the slots given up since the last call, whose memory can be freed."""
        return ()

    @abstractmethod
    def trial_slots(self, count: int) -> Sequence[int]:
        """Return slots for trial transfers while the cache is empty; they stay free."""

    def check_integrity(self) -> None:
        super().check_integrity()
        keys = self.resident.keys() | self.arriving.keys()
        assert keys == self.slots.keys(), f"slots of {self.slots.keys() ^ keys}"
        assert len(set(self.slots.values())) == len(keys), "two keys in one slot"

    @abstractmethod
    def _place(self, key: int, level: int) -> int:
        """Return a free slot for a key at a level; its bytes are already taken."""

    @abstractmethod
    def _vacate(self, slot: int) -> None:
        """Make a slot free."""


class SlottedCache(PlacedCache):
    """Slots of one size, made once.

    Where all experts of its layers fit, an expert's slot is its place among them, so that a layer
    is contiguous.
    """

    def __init__(
        self, memory: Memory, index: int, geometry: Geometry, layers: Sequence[int]
    ) -> None:
        super().__init__(memory, index)
        self.num_slots = slots_of(self.capacity_bytes, geometry, layers)
        self._first_key = geometry.key(layers[0], 0)
        self.holds_all = self.num_slots == len(layers) * geometry.num_experts
        self._free = list(range(self.num_slots))[::-1]

    def trial_slots(self, count: int) -> Sequence[int]:
        return range(count)

    def _place(self, key: int, level: int) -> int:
        return key - self._first_key if self.holds_all else self._free.pop()

    def _vacate(self, slot: int) -> None:
        if not self.holds_all:
            self._free.append(slot)


class LeveledCache(PlacedCache):
    """Slots as large as their expert at its level, made when none of that size is free.

    The bytes of all slots, free ones included, never exceed the capacity: to make room for a new
    one, free slots of other sizes are given up, longest free first.
    """

    def __init__(self, memory: Memory, index: int, names: Iterator[int]) -> None:
        """`names` numbers the slots; the caches of a run share it, so that slots are unique."""
        super().__init__(memory, index)
        self._names = names
        self._sizes_of: dict[int, tuple[int, int]] = {}
        """Slot -> (bytes, level)."""
        self._free: dict[int, None] = {}
        """Free slots, in the order in which they became free."""
        self._made_bytes = 0
        self._dropped: list[int] = []

    def take_dropped(self) -> Sequence[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def trial_slots(self, count: int) -> Sequence[int]:
        slots = [next(self._names) for _ in range(count)]
        self._dropped += slots
        return slots

    def check_integrity(self) -> None:
        super().check_integrity()
        total = sum(nbytes for nbytes, _ in self._sizes_of.values())
        assert total == self._made_bytes <= self.capacity_bytes, (
            f"slots of {total} bytes, counted {self._made_bytes}, capacity {self.capacity_bytes}"
        )
        assert self._free.keys().isdisjoint(self.slots.values()), "a slot in use is free"

    def _place(self, key: int, level: int) -> int:
        slot_kind = (self.size_of(key, level), level)
        for slot in self._free:
            if self._sizes_of[slot] == slot_kind:
                del self._free[slot]
                return slot
        while self._made_bytes + slot_kind[0] > self.capacity_bytes:
            oldest = next(iter(self._free))
            del self._free[oldest]
            self._made_bytes -= self._sizes_of.pop(oldest)[0]
            self._dropped.append(oldest)
        slot = next(self._names)
        self._sizes_of[slot] = slot_kind
        self._made_bytes += slot_kind[0]
        return slot

    def _vacate(self, slot: int) -> None:
        self._free[slot] = None


def slots_of(capacity_bytes: int, geometry: Geometry, layers: Sequence[int]) -> int:
    """Return how many experts of these layers fit into `capacity_bytes`.

    Raises ValueError where the layers' experts differ in size: they cannot share slots.
    """
    sizes = {geometry.expert_bytes[layer][0] for layer in layers}
    if len(sizes) > 1:
        raise ValueError(
            f"clock='wall': experts of {sorted(sizes)} bytes cannot share one cache of equal "
            "slots. Allowed for this model: a capacity of 'n/layer', or clock=virtual."
        )
    return min(capacity_bytes // sizes.pop(), len(layers) * geometry.num_experts)
