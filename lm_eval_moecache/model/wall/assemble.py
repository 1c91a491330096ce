"""Puts a loaded model's parts behind the wall clock, and refuses what cannot go there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.executor import WallExecutor
from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.model.device import total_memory
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.model.wall.host import measure_host
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wall.memory import available_host_bytes
from lm_eval_moecache.model.wall.pools import LadderPools, SlotPools, shapes_of
from lm_eval_moecache.model.wall.store import KERNELS, SlotStore
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity

# Ways of loading or of placing that would not leave the experts where the store finds them.
LOADS_OTHERWISE = (
    "autogptq delta device_map gguf_file gptqmodel load_in_4bit load_in_8bit parallelize peft "
    "quantization_config tp_plan"
).split()


def check_wall(
    model: Any,
    geometry: Geometry,
    capacity: Capacity,
    theirs: Mapping[str, Any],
    store: str = "ram",
) -> None:
    """Raise ValueError for what the wall clock cannot do with this model and these arguments."""
    for key in LOADS_OTHERWISE:
        if theirs.get(key):
            raise ValueError(
                f"{key}={theirs[key]!r} does not go with clock='wall', which loads and places the "
                "experts itself, behind one cache on one device. Allowed: one device per process "
                "(`accelerate launch` runs one process, with its own cache, on each), or "
                "clock=virtual, whose cache is emulated wherever the layers lie."
            )
    kernel = theirs.get("experts_implementation") or implementation_of(model)
    if kernel not in KERNELS:
        raise ValueError(
            f"experts_implementation={kernel!r} cannot run from cache slots. Allowed with "
            f"clock='wall': {', '.join(KERNELS)}."
        )
    partitions = capacity.partitions(geometry.num_layers)
    if not geometry.compute_bytes:  # Slots of encoded experts have the size of what lies there.
        for size, layers in zip(capacity.bytes_by_partition, partitions, strict=True):
            slots_of(size, geometry, layers)
    device, slots = str(theirs["device"]), capacity.total_bytes
    own = [p for layer in find_moe_layers(model) for p in layer.experts.parameters()]
    dense = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in own)
    memory = None if device == "cpu" else total_memory(torch.device(device))
    if memory is not None and slots + dense > memory:
        raise ValueError(
            f"capacity: {slots} bytes of experts and {dense} bytes of the model's other weights "
            f"do not fit into the {memory} bytes of {device}. Allowed with clock='wall': at most "
            f"{max(memory - dense, 0)} bytes."
        )
    # The host has to hold experts at every level, and all else on a CPU.
    experts = sum(map(sum, geometry.expert_bytes)) * geometry.num_experts if store == "ram" else 0
    needed = {"experts": experts}
    if device == "cpu":
        needed |= {"slots": slots, "the model's other weights": dense}
    available = available_host_bytes()
    if available is not None and sum(needed.values()) > available:
        parts = " and ".join(f"{size} bytes of {what}" for what, size in needed.items() if size)
        where = "memory" if device == "cpu" else "locked memory"
        other = "store=disk, or more memory" if store == "ram" else "a smaller capacity"
        raise ValueError(
            f"store={store!r}: {parts} have to lie in {where}, but the host has {available} bytes "
            f"to give. Allowed: {other}."
        )


def assemble(
    model: Any, geometry: Geometry, setting: Setting, loader: ExpertLoader
) -> tuple[Engine, SlotStore]:
    """Build slots, engine and store for a model whose experts a loader has taken."""
    layers, device = find_moe_layers(model), model.device
    codecs = loader.codecs or ()
    pools: SlotPools | LadderPools
    if codecs:
        shapes = [[shapes_of(layer.experts, codec) for codec in codecs] for layer in layers]
        pools = LadderPools(shapes, loader.tiers, geometry.num_experts, device)
    else:
        pools = SlotPools(loader.parameters, geometry, setting.capacity, loader.tiers[0], device)
    engine = Engine(geometry, setting, mover=pools)
    store = SlotStore(pools, geometry, str(implementation_of(model)), device.type, codecs)
    prepare_host(engine, store, layers[0].experts, device)
    return engine, store


def prepare_host(
    engine: Engine, store: SlotStore, experts: nn.Module, device: torch.device
) -> None:
    """Let a policy that executes on the host know this machine, by the first layer's experts."""
    executor = engine.executor
    assert isinstance(executor, WallExecutor)
    if executor.host is None:
        return
    store.note_host = executor.note_host
    if executor.host.asks_for_costs:
        elsewhere = store.at(0, engine.waves).elsewhere
        executor.host.costs = measure_host(engine, elsewhere, experts, device)
