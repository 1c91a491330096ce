"""A cache whose residents lie in numbered slots of one size."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.engine.cache import ExpertCache
from lm_eval_moecache.records.geometry import Geometry


class SlottedCache(ExpertCache):
    """Gives each key a slot for as long as it is resident or arriving.

    Where all experts of its layers fit, an expert's slot is its place among them, so that a layer
    lies in one piece.
    """

    def __init__(
        self,
        capacity_bytes: int,
        eviction: EvictionAlgorithm,
        geometry: Geometry,
        layers: Sequence[int],
    ) -> None:
        super().__init__(capacity_bytes, eviction, geometry)
        self.slots: dict[int, int] = {}
        """Key -> slot, of all that are resident or arriving."""
        self.num_slots = slots_of(capacity_bytes, geometry, layers)
        self._first_key = geometry.key(layers[0], 0)
        self.holds_all = self.num_slots == len(layers) * geometry.num_experts
        self._free = list(range(self.num_slots))[::-1]

    def withdraw(self, key: int) -> None:
        """Give back the bytes of an arriving key whose transfer has not begun."""
        level = self.arriving.pop(key)
        self.used_bytes -= self.size_of(key, level)
        self.loads -= 1
        self._release(key)

    def check_integrity(self) -> None:
        super().check_integrity()
        held = self.resident.keys() | self.arriving.keys()
        assert held == self.slots.keys(), f"slots of {self.slots.keys() ^ held}"
        assert len(set(self.slots.values())) == len(held), "two keys in one slot"

    def _take(self, key: int, level: int) -> None:
        super()._take(key, level)
        self.slots[key] = key - self._first_key if self.holds_all else self._free.pop()

    def _evict(self, key: int) -> None:
        super()._evict(key)
        self._release(key)

    def _release(self, key: int) -> None:
        slot = self.slots.pop(key)
        if not self.holds_all:
            self._free.append(slot)


def slots_of(capacity_bytes: int, geometry: Geometry, layers: Sequence[int]) -> int:
    """Return how many experts of these layers a cache of so many bytes holds.

    Raises ValueError where the layers' experts differ in size: they cannot share slots.
    """
    sizes = {geometry.expert_bytes[layer][0] for layer in layers}
    if len(sizes) > 1:
        raise ValueError(
            f"clock='wall': experts of {sorted(sizes)} bytes cannot share one cache of equal "
            "slots. Allowed for this model: a capacity of 'n/layer', or clock=virtual."
        )
    return min(capacity_bytes // sizes.pop(), len(layers) * geometry.num_experts)
