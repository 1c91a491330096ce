"""Loads a model for the wall clock with its experts in a tier, so that nothing is held twice.

Experts that a checkpoint has in execution layout are read from its files in place. Models and
arguments that the wall clock does not support are refused before.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.engine import HostCosts, WallEngine
from lm_eval_moecache.engine.wall.slots import slots_of
from lm_eval_moecache.model.checkpoint import Source, can_leave_out, leaving_out, sources_of
from lm_eval_moecache.model.device import (
    available_host_bytes,
    device_of,
    timed,
    total_memory,
)
from lm_eval_moecache.model.moe_layers import MoELayer, find_moe_layers
from lm_eval_moecache.model.precision.codecs import (
    AsStored,
    Codec,
    expert_bytes,
    expert_matrices,
    expert_parameters,
    part_of,
    plain_parameters,
    shape_without_memory,
)
from lm_eval_moecache.model.precision.loading import (
    EncodedExpertStore,
    encoding,
    store_layer,
    take,
)
from lm_eval_moecache.model.store import GroupedCall, implementation_of, up_name
from lm_eval_moecache.model.wall.pools import (
    DeviceMover,
    DiskTier,
    LadderPools,
    OnDisk,
    RamTier,
    SlotPools,
    Stored,
    Tier,
    joined,
    tensors_in,
)
from lm_eval_moecache.model.wall.store import KERNELS, SlotStore
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import Capacity

PREFIX = "experts-"
"""Prefix of a temporary folder, deleted once the files of its experts are open."""


class ExpertLoader:
    """Takes the experts out of a model while transformers loads and converts it.

    All other weights go to the device. `ram`: experts are read into host memory. `disk`: they stay
    in the checkpoint if it has them in execution layout (in one tensor or in several); otherwise
    they are written once to files under `folder`, layer by layer, for later loads of the same
    weights. With `codecs` experts are encoded while loading, and both stores hold them encoded,
    level by level.
    """

    def __init__(
        self,
        store: str,
        folder: str | None,
        skeleton: nn.Module,
        codecs: Sequence[Codec] | None = None,
        encoded_store: EncodedExpertStore | None = None,
        files: Sequence[Path] = (),
        identity: str = "",
    ) -> None:
        """`files`: the checkpoint's safetensors files, if any; `identity`: of the weights in them.

        Without an identity, experts on disk are written anew at each load.
        """
        self.codecs, self._encoded_store = codecs, encoded_store
        self._store = store
        self._folder = Path(folder or Path.home() / ".cache" / "lm-eval-moecache")
        self._skeleton = skeleton
        self._identity = identity
        self._files: EncodedExpertStore | None = None
        self._in_place: list[dict[str, OnDisk]] | None = None
        if store == "disk" and codecs is None:
            self._in_place = find_in_place(skeleton, files)
        self.tiers: list[Tier] = []
        """Level -> the tier of its experts."""
        self.parameters: list[dict[str, Tensor]]
        """Layer -> parameter name -> a tensor of its shape and type."""
        self.load_stats: dict[str, Any] = {}
        """`seconds` of loading."""

    arguments: ClassVar[Mapping[str, Any]] = {"device_map": {"": "cpu"}, "max_memory": None}
    """Placement arguments of `from_pretrained`: the device gets its part later."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure a load, `take_experts` included; its errors name the store."""
        start_s = time.perf_counter()
        try:
            with ExitStack() as stack:
                layers = find_moe_layers(self._skeleton)
                if self._in_place is not None:
                    stack.enter_context(leaving_out(names_of(layers)))
                elif self._store == "disk":
                    self._write(stack, layers)
                elif self.codecs is not None:
                    stack.enter_context(encoding(layers, self.codecs, self._encoded_store))
                yield
        except (OSError, SafetensorError, RuntimeError) as error:
            writes = self._store == "disk" and self._in_place is None
            raise ValueError(
                f"store={self._store!r}: the model cannot be loaded: {error}"
                + (f" (files are written to {self._folder})" if writes else "")
            ) from error
        self.load_stats = {"seconds": time.perf_counter() - start_s}

    def take_experts(self, model: nn.Module, device: torch.device) -> None:
        """Move a loaded model's experts into the tiers; shapes without memory stay behind.

        All other weights go to the device; the memory that it copies from is page-locked.
        """
        layers = find_moe_layers(model)
        if self._in_place is not None:
            self.tiers = [DiskTier(self._in_place)]
        elif self._store == "disk":
            self.tiers = self._written(layers)
        elif self.codecs is not None:
            plain = [plain_parameters(layer.experts) for layer in layers]
            levels = zip(*take(layers, self.codecs, self._encoded_store), strict=True)
            self.tiers = [
                RamTier([encoded | row for encoded, row in zip(level, plain, strict=True)])
                for level in levels
            ]
        else:
            self.tiers = [RamTier([expert_parameters(layer.experts) for layer in layers])]
        if device.type != "cpu":
            for layer in layers:
                for name, tensor in expert_parameters(layer.experts).items():
                    setattr(layer.experts, name, shape_without_memory(tensor, device))
            model.to(device)
            for tier in self.tiers:
                if isinstance(tier, RamTier):
                    tier.pin()
        self.parameters = [expert_parameters(layer.experts) for layer in layers]

    def copy_of(self, layer: int) -> dict[str, Tensor]:
        """Return a copy of a layer's experts [experts, ...] in host memory, as they are stored."""
        copies = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in self.parameters[layer].items()}
        for expert in range(len(next(iter(copies.values())))):
            target = {name: stacked[expert] for name, stacked in copies.items()}
            self.tiers[0].fill(layer, expert, target)
        return copies

    def _write(self, stack: ExitStack, layers: Sequence[MoELayer]) -> None:
        """Write experts to files while they are loaded, unless the files exist."""
        dtype = next(iter(expert_parameters(layers[0].experts).values())).dtype
        codecs = self.codecs or [AsStored(dtype)]
        if not self._identity:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(prefix=PREFIX, dir=self._folder)
            self._folder = Path(stack.enter_context(scratch))
        elif self._encoded_store is not None:
            self._folder = self._encoded_store.parent
        needed = sum(sum(expert_bytes(x.experts, codecs)) * x.num_experts for x in layers)
        self._files = EncodedExpertStore(self._folder, self._identity, dtype, codecs, needed)
        stack.enter_context(encoding(layers, codecs, self._files, release=True))

    def _written(self, layers: Sequence[MoELayer]) -> list[Tier]:
        """Return each level's files as a tier; parameters but matrices stay in host memory."""
        assert self._files is not None
        levels = range(1 if self.codecs is None else len(self.codecs))
        rows: list[list[dict[str, OnDisk]]] = [[] for _ in levels]
        small: list[dict[str, Tensor]] = []
        for index, layer in enumerate(layers):
            store_layer(index, layer, self._files)
            small.append(plain_parameters(layer.experts))
            for level in levels:
                tensors = tensors_in(self._files.file(level, index))
                if self.codecs is None:
                    matrices = expert_matrices(layer.experts)
                    tensors = {name: tensors[part_of(name, 0)] for name in matrices}
                rows[level].append({name: entry.by_expert for name, entry in tensors.items()})
        return [DiskTier(entry, small) for entry in rows]


def names_of(layers: Sequence[MoELayer]) -> set[str]:
    """Return the names in the model of all layers' per-expert parameters."""
    return {f"{layer.path}.{n}" for layer in layers for n in expert_parameters(layer.experts)}


def find_in_place(skeleton: Any, files: Sequence[Path]) -> list[dict[str, OnDisk]] | None:
    """Return the spans of each layer's experts in these files, with the dtype and order they have.

    None where any would have to be converted: another dtype, a transposition, a quantised model, no
    safetensors.
    """
    if not files or not can_leave_out() or hasattr(skeleton.config, "quantization_config"):
        return None
    tensors = {key: tensor for file in files for key, tensor in tensors_in(file).items()}
    layers = find_moe_layers(skeleton)
    sources = sources_of(skeleton, names_of(layers), tensors)
    layer_spans: list[dict[str, OnDisk]] = []
    for layer in layers:
        layer_spans.append({})
        for name, parameter in expert_parameters(layer.experts).items():
            place = _place(sources.get(f"{layer.path}.{name}"), parameter, tensors)
            if place is None:
                return None
            layer_spans[-1][name] = place
    return layer_spans


def _place(
    source: Source | None, parameter: Tensor, tensors: Mapping[str, Stored]
) -> OnDisk | None:
    if source is None or source.groups is None:
        return None
    groups = [[tensors[key] for key in group] for group in source.groups]
    if any(part.dtype != parameter.dtype for group in groups for part in group):
        return None
    tensor = groups[0][0]
    if len(groups) == len(groups[0]) == 1 and tensor.shape == tuple(parameter.shape):
        return tensor.by_expert
    num_experts, rows, *trailing = parameter.shape
    if any(len(group) != num_experts for group in groups):
        return None
    experts = list(zip(*groups, strict=True))
    fits = all(
        sum(part.shape[0] for part in parts) == rows
        and all(part.shape[1:] == tuple(trailing) for part in parts)
        for parts in experts
    )
    return [joined(parts) for parts in experts] if fits else None


# Ways of loading or placing that would put experts where the store does not find them.
LOADS_OTHERWISE = (
    "autogptq delta device_map gguf_file gptqmodel load_in_4bit load_in_8bit parallelize peft "
    "quantization_config tp_plan"
).split()


def check_wall(
    model: Any,
    geometry: Geometry,
    capacity: Capacity,
    hflm_args: Mapping[str, Any],
    store: str = "ram",
) -> None:
    """Raise ValueError for what the wall clock cannot do with this model and these arguments."""
    for key in LOADS_OTHERWISE:
        if hflm_args.get(key):
            raise ValueError(
                f"{key}={hflm_args[key]!r} cannot be combined with clock='wall', which loads and "
                "places the experts itself, behind one cache on one device. Allowed: one device "
                "per process (`accelerate launch` runs one process, with its own cache, on each), "
                "or clock=virtual, whose cache is emulated wherever the layers lie."
            )
    kernel = hflm_args.get("experts_implementation") or implementation_of(model)
    if kernel not in KERNELS:
        raise ValueError(
            f"experts_implementation={kernel!r} cannot run from cache slots. Allowed with "
            f"clock='wall': {', '.join(KERNELS)}."
        )
    partitions = capacity.partitions(geometry.num_layers)
    if not geometry.compute_bytes:  # Slots of encoded experts have their experts' size.
        for size, layers in zip(capacity.bytes_by_partition, partitions, strict=True):
            slots_of(size, geometry, layers)
    device, slots = str(hflm_args["device"]), capacity.total_bytes
    expert_weights = [p for layer in find_moe_layers(model) for p in layer.experts.parameters()]
    dense = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in expert_weights)
    memory = None if device == "cpu" else total_memory(torch.device(device))
    if memory is not None and slots + dense > memory:
        raise ValueError(
            f"capacity: {slots} bytes of experts and {dense} bytes of the model's other weights "
            f"do not fit into the {memory} bytes of {device}. Allowed with clock='wall': at most "
            f"{max(memory - dense, 0)} bytes."
        )
    # The host holds experts at every level and, where it is the device, all other weights.
    stored = sum(map(sum, geometry.expert_bytes)) * geometry.num_experts if store == "ram" else 0
    needed = {"experts": stored}
    if device == "cpu":
        needed |= {"slots": slots, "the model's other weights": dense}
    available = available_host_bytes()
    if sum(needed.values()) > available:
        parts = " and ".join(f"{size} bytes of {item}" for item, size in needed.items() if size)
        kind = "memory" if device == "cpu" else "locked memory"
        remedy = "store=disk, or more memory" if store == "ram" else "a smaller capacity"
        raise ValueError(
            f"store={store!r}: {parts} have to lie in {kind}, but the host has {available} bytes "
            f"to give. Allowed: {remedy}."
        )


def assemble(
    model: Any, geometry: Geometry, setting: Setting, loader: ExpertLoader
) -> tuple[WallEngine, SlotStore]:
    """Build slots, engine and store for a model whose experts a loader has taken."""
    experts, device = [layer.experts for layer in find_moe_layers(model)], device_of(model)
    pools: DeviceMover
    if loader.codecs:
        pools = LadderPools(experts, loader.codecs, loader.tiers, device)
    else:
        pools = SlotPools(loader.parameters, geometry, setting.capacity, loader.tiers[0], device)
    engine = WallEngine(geometry, setting, pools)
    store = SlotStore(pools, geometry, str(implementation_of(model)), device.type)
    store.note_host = engine.note_host
    if engine.asks_for_host_costs:
        engine.set_host_costs(measure_host(engine, pools, experts[0], device))
    return engine, store


FEW, MANY = 1, 32
"""Numbers of tokens of the two measurements that fit a line."""
TRIALS = 5


@torch.no_grad()
def measure_host(
    engine: WallEngine, pools: DeviceMover, module: nn.Module, device: torch.device
) -> HostCosts:
    """Measure one expert of the first layer on the host, on the device, and over the link."""
    up = getattr(module, up_name(module))
    hidden_size, width = up.shape[1:] if module.is_transposed else up.shape[:0:-1]

    def ones(*shape: int, on: Any = device) -> torch.Tensor:
        return torch.ones(shape, dtype=up.dtype, device=on)

    def fastest_s(work: Callable[[], object]) -> float:
        return min(timed(work, device, TRIALS))

    def on_host_s(tokens: int) -> float:
        hidden_TD, index = ones(tokens, hidden_size, on="cpu"), torch.zeros((tokens, 1)).long()

        def once() -> None:
            call = GroupedCall(module, hidden_TD, index, torch.ones((tokens, 1)), len(up))
            call.run([(0, 0)], pools.elsewhere(module, 0, [0]))

        return fastest_s(once)

    def on_device_s(tokens: int) -> float:
        """Of the two products alone: a kernel's other work is the same for every expert."""
        inner = width // 2 if module.has_gate else width
        hidden_TD, up_DH = ones(tokens, hidden_size), ones(hidden_size, width)
        down_HD = ones(inner, hidden_size)
        return fastest_s(lambda: (hidden_TD @ up_DH)[:, :inner] @ down_HD)

    def line(seconds: Callable[[int], float]) -> tuple[float, float]:
        """Return a call's fixed seconds, and its seconds per token."""
        few_s, many_s = seconds(FEW), seconds(MANY)
        each_s = max(many_s - few_s, 0.0) / (MANY - FEW)
        return max(few_s - FEW * each_s, 0.0), each_s

    host_fixed, host_each = line(on_host_s)
    device_fixed, device_each = line(on_device_s)
    return HostCosts(
        host_fixed_s=host_fixed,
        host_each_s=host_each,
        device_fixed_s=device_fixed,
        device_each_s=device_each,
        load_s=engine.time_load(1),
        way_s=0.0 if device.type == "cpu" else fastest_s(ones(1, hidden_size).cpu),
    )
