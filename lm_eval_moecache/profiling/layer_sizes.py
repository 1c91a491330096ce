"""The action `moecache profile layer_sizes`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.sizes import LAYER_SIZES, parse_capacity
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace

Counts = npt.NDArray[np.int64]


def profile_layer_sizes(trace: str, *, capacity: str = "25%", out: str | None = None) -> Report:
    """Solve for cache sizes that differ by layer (AdapMoE), from a routing trace.

    Prints the experts each MoE layer should keep for the fewest expected loads, and the miss rate
    next to that of equal sizes; `--out sizes.json` writes the file that `capacity=sizes.json`
    takes.

    Args:
        trace: a routing trace, as of `trace=DIR`
        capacity: total capacity of all layers
        out: a JSON file to write the sizes to
    """
    routing = load_trace(trace)
    total = parse_capacity(capacity, routing.geometry)
    slots = total.total_bytes // routing.geometry.max_expert_bytes
    curves = miss_curves(routing)
    sizes = best_sizes(curves, slots)
    equal = equal_sizes(len(curves), slots)
    report = {
        LAYER_SIZES: sizes,
        "model": routing.geometry.model,
        "num_experts": routing.geometry.num_experts,
        "capacity": capacity,
        "trace": routing.name,
        "miss_rate": miss_rate(curves, sizes),
        "miss_rate_of_equal_sizes": miss_rate(curves, equal),
    }
    if out:
        write_whole(Path(out), json.dumps(report, indent=1) + "\n")
    return Report(
        report,
        f"experts per layer: {sizes}\nmiss rate with LRU: {report['miss_rate']:.4f}, with equal "
        f"sizes {report['miss_rate_of_equal_sizes']:.4f}",
    )


def miss_curves(trace: Trace) -> Counts:
    """Return each layer's misses with a cache of 0, 1, ... experts: [layers, experts + 1].

    LRU keeps the most recently used ones, whatever the size (Mattson et al. 1970), so one reading
    gives all sizes: a request hits where fewer than `size` others were used since its last use.
    Exact where each event fits its layer's cache; which experts the waves of a larger one leave
    behind depends on their order.
    """
    geometry = trace.geometry
    curves = np.zeros((geometry.num_layers, geometry.num_experts + 1), dtype=np.int64)
    recent: list[list[int]] = [[] for _ in range(geometry.num_layers)]
    bounds = trace.key_bounds.tolist()
    for event, (start, stop) in enumerate(pairwise(bounds)):
        layer = event % geometry.num_layers
        order = recent[layer]
        keys = trace.keys[start:stop].tolist()
        for key in keys:
            # A hit needs room for it and for all that was used after it.
            distance = order.index(key) + 1 if key in order else geometry.num_experts + 1
            curves[layer, :distance] += 1
        for key in keys:
            if key in order:
                order.remove(key)
            order.insert(0, key)
    return curves


def best_sizes(curves: Counts, slots: int) -> list[int]:
    """Divide `slots` experts among the layers, at least one each, for the fewest misses.

    Dynamic programming over layers: the fewest misses of the first layers with s slots are the
    minimum over the last one's share (AdapMoE, Zhong et al. 2024, "adaptive caching"). Its cost of
    a layer assumes uniform use of experts; ours is counted on the trace. Ties go to the earlier
    layer. Cost: O(layers x slots x experts).
    """
    num_layers, num_experts = curves.shape[0], curves.shape[1] - 1
    if slots < num_layers:
        raise ValueError(
            f"capacity: {slots} experts are fewer than the {num_layers} MoE layers, each of which "
            "must keep at least one."
        )
    slots = min(slots, num_layers * num_experts)
    unreachable = np.iinfo(np.int64).max // 2
    best = np.full((num_layers + 1, slots + 1), unreachable, dtype=np.int64)
    best[0, 0] = 0
    last_size = np.zeros((num_layers + 1, slots + 1), dtype=np.int64)
    for layer in range(num_layers):
        for size in range(1, min(num_experts, slots) + 1):
            total = best[layer, : slots + 1 - size] + curves[layer, size]
            better = total < best[layer + 1, size:]
            best[layer + 1, size:][better] = total[better]
            last_size[layer + 1, size:][better] = size
    sizes, slots_left = [0] * num_layers, int(best[num_layers].argmin())
    for layer in range(num_layers, 0, -1):
        sizes[layer - 1] = int(last_size[layer, slots_left])
        slots_left -= sizes[layer - 1]
    return sizes


def equal_sizes(num_layers: int, slots: int) -> list[int]:
    """Divide `slots` as evenly as whole experts allow, the first layers taking the remainder."""
    return [slots // num_layers + (layer < slots % num_layers) for layer in range(num_layers)]


def miss_rate(curves: Counts, sizes: Sequence[int]) -> float:
    """Return misses / requests over all layers, with these cache sizes in experts."""
    largest = curves.shape[1] - 1
    misses = sum(int(curve[min(size, largest)]) for curve, size in zip(curves, sizes, strict=True))
    return misses / int(curves[:, 0].sum())
