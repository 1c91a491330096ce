"""A run's memory: the records of `engine.kernel`, made from a run's setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms import features
from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, RankedEviction
from lm_eval_moecache.algorithms.learned.predictor import costs as predictor_costs
from lm_eval_moecache.engine.costs import Costs
from lm_eval_moecache.engine.kernel import cache, clock, event, lanes, link, ranking, serve, state
from lm_eval_moecache.engine.rules import Rules
from lm_eval_moecache.engine.setting import AS_THEY_ARRIVE, FIFO, Setting
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.memory import address_of, make_record, make_table

MODULES: tuple[ModuleType, ...] = (state, clock, ranking, cache, link, lanes, event, serve)
_TABLES = {
    "experts": state.Expert,
    "slots": state.Slot,
    "forecast_rows": features.Forecast,
    "layers": state.Layer,
    "levels": state.Level,
    "caches": state.Cache,
}


class Memory:
    """The tables of one run, which stay where they are."""

    experts: Any
    slots: Any
    forecast_rows: Any
    layers: Any
    levels: Any
    caches: Any

    def __init__(self, run: Any, tables: dict[str, Any]) -> None:
        self.run = run
        self._tables = tables
        vars(self).update(tables)
        num_experts, requests = run.num_experts, run.num_experts * run.reads
        self.scratch = {
            **{name: np.zeros(num_experts, np.int64) for name in ("keys", "spare", "demands")},
            "arrivals": np.zeros(requests),
            "requests": np.zeros(3 * requests),
        }
        self._point()

    def _point(self) -> None:
        self.run.address = address_of(self.run)
        for name, array in {**self._tables, **self.scratch}.items():
            setattr(self.run, name, address_of(array))

    def copy(self) -> Memory:
        """Return the same state elsewhere in memory."""
        run = type(self.run).from_buffer_copy(self.run)
        return Memory(run, {name: table.copy() for name, table in self._tables.items()})

    def restore(self, first: Memory) -> None:
        """Return to an earlier state."""
        for name, table in self._tables.items():
            table[:] = first._tables[name]
        for field, _ in self.run._fields_:
            setattr(self.run, field, getattr(first.run, field))
        self._point()


def make_memory(
    geometry: Geometry,
    setting: Setting,
    rules: Rules,
    evictions: Sequence[EvictionAlgorithm],
    costs: Costs | None,
    depth: int,
) -> Memory:
    """Return the memory of a run before its first pass; gates predict `depth` layers ahead.

    Without costs nothing is charged.
    """
    num_layers, num_levels = geometry.num_layers, len(geometry.expert_bytes[0])
    hardware, prefetch, miss = setting.hardware, rules.prefetch, rules.miss
    eviction, stateful = evictions[0], not isinstance(evictions[0], RankedEviction)
    run = make_record(
        state.Run,
        num_layers=num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        num_levels=num_levels,
        latency_s=hardware.link_latency_s,
        wait_overhead_s=hardware.wait_overhead_s,
        expert_overhead_s=0.0 if costs is None else costs.expert_overhead_s,
        load_overhead_s=0.0 if costs is None else hardware.load_overhead_s_per_byte,
        peak_flops=hardware.peak_flops,
        lane_rate=hardware.lane_rate,
        link_rate=hardware.link_rate,
        hidden_size=geometry.hidden_size,
        element_bytes=geometry.element_bytes,
        fifo=int(setting.link == FIFO),
        prefetches=int(prefetch.is_active),
        after_layer=int(prefetch.is_active and prefetch.after_layer),
        cached_first=int(miss.cached_first),
        stateful=int(stateful),
        notifies=int(stateful),
        predictor=int(prefetch.uses_predictor),
        lanes=0 if setting.is_one_server else hardware.link_lanes,
        reads=setting.reads_per_expert,
        piecewise=int(setting.execute == AS_THEY_ARRIVE),
        host=("", "always", "first", "balanced").index(miss.host_rule),
        uploads=miss.uploads,
    )
    if isinstance(eviction, RankedEviction):
        rank_by(run, eviction)
    partitions = setting.capacity.partitions(num_layers)
    tables = make_tables(run, len(partitions))
    layers, held = tables["layers"], tables["caches"]
    for number, (layer_range, size) in enumerate(
        zip(partitions, setting.capacity.bytes_by_partition, strict=True)
    ):
        layers["cache"][list(layer_range)] = number
        layers["slots"][list(layer_range)] = evictions[number].num_slots
        held[number]["first_layer"], held[number]["end_layer"] = layer_range.start, layer_range.stop
        held[number]["capacity"] = size
    for layer, number in product(range(num_layers), range(num_levels)):
        level = tables["levels"][layer * num_levels + number]
        level["size_bytes"] = geometry.expert_bytes[layer][number]
        level["move_s"] = geometry.expert_bytes[layer][number] / hardware.lane_rate
    if costs is not None:
        _write_costs(tables, geometry, costs, rules, depth)
    return Memory(run, tables)


def rank_by(run: Any, eviction: RankedEviction) -> None:
    """Let a run rank residents by a rule."""
    from lm_eval_moecache.records.machine_code import bridge  # imports numba

    for name in ("ages", "moves", "forecasts", "only_best", "by_token"):
        setattr(run, name, int(getattr(eviction, name)))
    run.weighs, run.offline = int(eviction.uses_weights), int(eviction.is_offline)
    run.growth, run.parameter, run.keep = eviction.growth, eviction.parameter, eviction.keep
    run.recency = ("", "use", "loading").index(eviction.recency) or int(run.forecasts)
    run.rank = bridge(eviction.plain_rank, state.Expert, state.Layer, features.Now)


def make_tables(run: Any, num_caches: int) -> dict[str, Any]:
    """Return a run's tables, with nothing in them but what follows from their sizes."""
    num_keys = run.num_layers * run.num_experts
    sizes = {
        "experts": num_keys,
        "slots": num_keys,
        "forecast_rows": num_keys if run.forecasts else 1,
        "layers": run.num_layers + 1,
        "levels": run.num_layers * run.num_levels,
        "caches": num_caches,
    }
    tables = {name: make_table(kind, sizes[name]) for name, kind in _TABLES.items()}
    tables["slots"]["home"] = np.arange(num_keys) // run.num_experts
    tables["layers"]["index"] = np.arange(run.num_layers + 1)
    return tables


def _write_costs(
    tables: dict[str, Any], geometry: Geometry, costs: Costs, rules: Rules, depth: int
) -> None:
    layers, num_levels = tables["layers"], len(geometry.expert_bytes[0])
    on_host = costs.on_host() if rules.miss.host_rule else None
    for layer, number in product(range(geometry.num_layers), range(num_levels)):
        level = tables["levels"][layer * num_levels + number]
        level["flop_s"], level["read_s"] = costs.expert_parts_s[layer][number]
        if on_host is not None:
            level["host_flop_s"], level["host_read_s"] = on_host.expert_parts_s[layer][number]
    for layer, (flop_s, read_s, overhead_s) in enumerate(costs.dense_parts_s):
        layers[layer]["flop_s"], layers[layer]["read_s"] = flop_s, read_s
        layers[layer]["overhead_s"] = overhead_s
    artifact = rules.prefetch.artifact if rules.prefetch.uses_predictor else None
    for layer in range(geometry.num_layers):
        # FLOP a token, seconds of reading, of launches.
        predicting = 0.0, 0.0, costs.gates_s(min(depth, geometry.num_layers - 1 - layer))
        if artifact is not None:
            predicting = costs.network_parts(predictor_costs(artifact)[layer])
        for name, value in zip(("flop", "read_s", "overhead_s"), predicting, strict=True):
            layers[layer][f"predict_{name}"] = value


class Cache:
    """One cache, as a view of a run's memory.

    A key is absent, arriving (its bytes are reserved, its weights not yet usable) or resident.
    Arriving and resident bytes together never exceed the capacity. Weights are immutable, so an
    eviction costs no transfer.
    """

    def __init__(self, memory: Memory, index: int) -> None:
        self._memory, self._record = memory, memory.caches[index]
        num_experts = memory.run.num_experts
        self.keys = range(
            int(self._record["first_layer"]) * num_experts,
            int(self._record["end_layer"]) * num_experts,
        )
        """All keys that it may hold."""

    def __getitem__(self, name: str) -> int:
        """Return a field of `kernel.state.Cache`."""
        return int(self._record[name])

    @property
    def capacity_bytes(self) -> int:
        return self["capacity"]

    @property
    def resident(self) -> dict[int, int]:
        """Resident key -> its precision level, in order of loading."""
        slots = self._memory.slots
        keys = self._where(self._memory.experts["resident"])
        arrivals = slots["arrival"]
        return {key: int(slots["level"][key]) for key in sorted(keys, key=arrivals.__getitem__)}

    @property
    def arriving(self) -> dict[int, int]:
        """Key of a prefetch in flight -> its precision level."""
        slots = self._memory.slots
        return {key: int(slots["level"][key]) for key in self._where(slots["arriving"])}

    def _where(self, flags: Any) -> list[int]:
        places = np.flatnonzero(flags[self.keys.start : self.keys.stop])
        keys: list[int] = (places + self.keys.start).tolist()
        return keys

    def size_of(self, key: int, level: int = 0) -> int:
        """Return the bytes of an expert at a precision level."""
        run = self._memory.run
        return int(
            self._memory.levels["size_bytes"][key // run.num_experts * run.num_levels + level]
        )

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
        resident, arriving, used = self.resident, self.arriving, self["used"]
        held_bytes = sum(self.size_of(k, level) for k, level in (resident | arriving).items())
        assert held_bytes == used <= self.capacity_bytes, (
            f"bytes held {held_bytes}, counted {used}, capacity {self.capacity_bytes}"
        )
        settled = self["loads"] + self["warmed"] - self["evictions"] - self["replaced"]
        assert settled == len(resident) + len(arriving), (
            f"loads {self['loads']} + warmed {self['warmed']} - evictions {self['evictions']} - "
            f"replaced {self['replaced']} != residents {len(resident)} + arriving {len(arriving)}"
        )


def door(name: str = "serve") -> Any:
    """Return `serve`, which takes the address of a call, or `visit` for the wall clock."""
    from lm_eval_moecache.records.machine_code import compiled  # imports numba

    return compiled(MODULES, name)
