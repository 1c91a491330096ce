"""The tables of `engine.core`, made from a run's setting, and one cache as a view of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.features import Now, make_features
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.decide import Rules
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, FIFO, Setting
from lm_eval_moecache.engine.virtual.costs import Costs
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.jit import Table, column, make_table


def make_evictions(geometry: Geometry, setting: Setting) -> list[EvictionAlgorithm]:
    """Return the eviction algorithm of each cache."""
    evictions = []
    for size in setting.capacity.bytes_by_partition:
        eviction = setting.policy.eviction.build(geometry, setting.seed)
        total_bytes = sum(levels[0] for levels in geometry.expert_bytes)
        eviction.capacity_bytes = size
        eviction.num_slots = max(1, size * geometry.num_layers // total_bytes)
        evictions.append(eviction)
    return evictions


def is_ranked(eviction: EvictionAlgorithm) -> bool:
    """Whether an eviction is a rank of features, and keeps no state of its own."""
    return isinstance(eviction, RankedEviction) and type(eviction).is_rank_alone()


def make_state(
    geometry: Geometry,
    setting: Setting,
    rules: Rules,
    evictions: Sequence[EvictionAlgorithm],
    costs: Costs | None,
    outside: Any,
) -> core.State:
    """Return the state of a run before its first pass; `costs` are None on the wall clock."""
    num_layers, num_levels = geometry.num_layers, len(geometry.expert_bytes[0])
    hardware, prefetch, own = setting.hardware, rules.prefetch, not is_ranked(evictions[0])
    run = core.RunState(
        top_k=geometry.top_k,
        num_levels=num_levels,
        prefetches=int(prefetch.is_active),
        after_layer=int(prefetch.is_active and prefetch.after_layer),
        cached_first=int(rules.miss.cached_first),
        lossy=int(rules.is_lossy),
        own=int(own),
    )
    levels = make_table(core.Level, num_layers * num_levels)
    for level, (layer, number) in zip(
        levels, product(range(num_layers), range(num_levels)), strict=True
    ):
        level.nbytes = geometry.expert_bytes[layer][number]
        if costs is not None:
            level.move_s = level.nbytes / hardware.lane_rate
            level.flop_s, level.read_s = costs.expert_parts_s[layer][number]
    if costs is not None:
        run.latency_s, run.wait_overhead_s = hardware.link_latency_s, hardware.wait_overhead_s
        run.expert_overhead_s = costs.expert_overhead_s
        run.load_overhead_s = hardware.load_overhead_s_per_byte
        run.fifo = int(setting.link == FIFO)
        run.hosts = int(bool(rules.miss.host_rule))
        run.lanes = int(not setting.is_one_server)
        run.piecewise = int(setting.execute == AS_THEY_ARRIVE)
    eviction, num_slots = evictions[0], [each.num_slots for each in evictions]
    if isinstance(eviction, RankedEviction) and not own:
        features = eviction.make_features(num_slots)
    else:
        features = make_features(Now(num_layers, geometry.num_experts), num_slots)
    sizes, partitions = setting.capacity.bytes_by_partition, setting.capacity.partitions(num_layers)
    return core.State(
        *features,
        slots=[
            core.Slot(home=home) for home in range(num_layers) for _ in range(geometry.num_experts)
        ],
        levels=levels,
        layer_states=make_table(core.LayerState, num_layers),
        queues=make_table(core.Queue, num_layers + 1),
        caches=[
            core.CacheState(first_layer=layers.start, end_layer=layers.stop, capacity=size)
            for size, layers in zip(sizes, partitions, strict=True)
        ],
        run=[run],
        messages=(),
        outside=outside,
    )


def read(table: Table, index: int, name: str) -> Any:
    """Return one field of one entry, whichever form the table has."""
    if isinstance(table, np.ndarray):
        return table[name][index].item()
    return getattr(table[index], name)


def read_some(table: Table, keys: Sequence[int], name: str) -> list[Any]:
    """Return one field of some entries."""
    if isinstance(table, np.ndarray):
        values: list[Any] = table[name][list(keys)].tolist()
        return values
    return [getattr(table[key], name) for key in keys]


def write(table: Table, index: int, name: str, value: float) -> None:
    """Set one field of one entry, whichever form the table has."""
    if isinstance(table, np.ndarray):
        table[name][index] = value
    else:
        setattr(table[index], name, value)


class HasState(Protocol):
    """An engine, whose tables change their form when the loop is compiled."""

    state: core.State


class _Field:
    """A number that the tables hold of a cache."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cache: ExpertCache, owner: type) -> int:
        return int(read(cache.state.caches, cache.index, self._name))


class ExpertCache:
    """One cache, as a view of the tables.

    A key is absent, arriving (its bytes are reserved, its weights not yet usable) or resident.
    Arriving and resident bytes together never exceed the capacity. Weights are immutable, so an
    eviction costs no transfer.
    """

    def __init__(self, engine: HasState, index: int, eviction: EvictionAlgorithm) -> None:
        self._engine, self.index, self.eviction = engine, index, eviction
        num_experts = read(self.state.now, 0, "num_experts")
        self.keys = range(self._first_layer * num_experts, self._end_layer * num_experts)
        """All keys that it may hold."""
        self.num_experts: int = num_experts

    @property
    def state(self) -> core.State:
        return self._engine.state

    capacity_bytes, used_bytes, peak_bytes = _Field("capacity"), _Field("used"), _Field("peak")
    loads, warmed = _Field("loads"), _Field("warmed")
    evictions, replaced = _Field("evictions"), _Field("replaced")
    lifetime_tokens = _Field("lifetime")
    _first_layer, _end_layer = _Field("first_layer"), _Field("end_layer")

    @property
    def resident(self) -> dict[int, int]:
        """Resident key -> its precision level, in order of loading."""
        levels, arrivals = self._columns("level", "arrival")
        keys = self._where(column(self.state.experts, "resident"))
        return {key: int(levels[key]) for key in sorted(keys, key=lambda key: arrivals[key])}

    @property
    def arriving(self) -> dict[int, int]:
        """Key of a prefetch in flight -> its precision level."""
        levels, arriving = self._columns("level", "arriving")
        return {key: int(levels[key]) for key in self._where(arriving)}

    def _columns(self, *names: str) -> list[Any]:
        return [column(self.state.slots, name) for name in names]

    def _where(self, flags: Any) -> list[int]:
        places = np.flatnonzero(flags[self.keys.start : self.keys.stop])
        keys: list[int] = (places + self.keys.start).tolist()
        return keys

    def size_of(self, key: int, level: int = 0) -> int:
        """Return the bytes of an expert at a precision level."""
        num_levels = read(self.state.run, 0, "num_levels")
        layer = key // self.num_experts
        return int(read(self.state.levels, layer * num_levels + level, "nbytes"))

    def warm_keys(self, hottest: Iterable[int]) -> list[int]:
        """Return those of these keys that fit into the empty cache, hottest last.

        Keys too large for the space left are skipped. Hottest last, so that rules that go by order
        of arrival favour the hottest, too.
        """
        room, warmed = self.capacity_bytes, list[int]()
        for key in hottest:
            if key in self.keys and self.size_of(key) <= room:
                warmed.append(key)
                room -= self.size_of(key)
        return warmed[::-1]

    def check_integrity(self) -> None:
        """Assert the conservation laws: bytes add up, and loads match residents and departures."""
        resident, arriving = self.resident, self.arriving
        held_bytes = sum(self.size_of(k, level) for k, level in (resident | arriving).items())
        assert held_bytes == self.used_bytes <= self.capacity_bytes, (
            f"bytes held {held_bytes}, counted {self.used_bytes}, capacity {self.capacity_bytes}"
        )
        settled = self.loads + self.warmed - self.evictions - self.replaced
        assert settled == len(resident) + len(arriving), (
            f"loads {self.loads} + warmed {self.warmed} - evictions {self.evictions} - "
            f"replaced {self.replaced} != residents {len(resident)} + arriving {len(arriving)}"
        )
