"""Measures this machine: its products and copies, and a decode step's parts on the wall clock.

For the latter a model decodes twice under one policy, with room for all experts and with room for
some: the first run times a layer, its bookkeeping and the rest of a pass, the second adds the cost
of a wait for the link.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from scipy import optimize
from torch import nn

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.costs import (
    DENSE_KERNELS,
    EXPERT_KERNELS,
    GATE_KERNELS,
    Costs,
)
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.device import (
    CPU,
    best_device,
    device_of,
    locked_copy,
    name_of,
    timed,
    total_memory,
)
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.model.store import Matrices
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wall.pools import SlotPools
from lm_eval_moecache.model.wall.store import SlotStore
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import parse_capacity

_REPEATS = 7
_SMALL_BYTES = 4096
_LAYERS = 8
_TOP_K = 2
_CPU_EDGE = 1024
_SMALL_EDGE = 256
_PRODUCT_S = 0.25


def typical_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of several runs: the machine's speed in ordinary use."""
    return statistics.median(timed(work, device, _REPEATS))


def measure(name: str, device_name: str, dtype_name: str, nbytes: int, edge: int) -> Hardware:
    """Measure a device. On a CPU, the link is a copy within memory."""
    dtype, device = _dtype(dtype_name), _device(device_name)
    memory_bytes = int(total_memory(device) or total_memory(CPU) or 0)
    if nbytes < 16 * _SMALL_BYTES:
        raise ValueError(f"size={nbytes} bytes is too small to separate bandwidth from latency.")
    if nbytes > memory_bytes:
        raise ValueError(f"size={nbytes} bytes is more than the {memory_bytes} bytes of {device}.")

    def copy_s(count: int) -> float:
        source = torch.ones(count, dtype=torch.uint8)
        source = source if device.type == "cpu" else locked_copy(source)
        target = torch.empty(count, dtype=torch.uint8, device=device)
        return typical_s(lambda: target.copy_(source, non_blocking=True), device)

    device_edge = _edge_in_time(device, dtype, edge)
    weights = _weights(device, dtype, nbytes)
    memory = weights.nbytes / typical_s(_products_with(weights), device)
    large_s, small_s = copy_s(nbytes), copy_s(_SMALL_BYTES)
    layer_s = _launches_s(device, dtype, memory)
    num_kernels = DENSE_KERNELS + EXPERT_KERNELS
    description = _describe(device)
    how = f"measured on {description} with torch {torch.__version__}: "
    matrices = f"{len(weights)} matrices of {' x '.join(map(str, weights[0].shape))}"
    measurements = {
        "peak_flops": (
            2 * device_edge**3 / _matmul_s(device, dtype, device_edge),
            f"{how}{_cube(device_edge)} product in {dtype_name}",
        ),
        "memory_bytes_per_s": (memory, f"{how}products of one row with {matrices}"),
        "link_bytes_per_s": (
            (nbytes - _SMALL_BYTES) / max(large_s - small_s, 1e-9),
            f"{how}copy of {nbytes} bytes to it from host memory",
        ),
        "link_latency_s": (small_s, f"{how}copy of {_SMALL_BYTES} bytes to it from host memory"),
        "kernel_overhead_s": (
            layer_s / num_kernels,
            f"{how}{layer_s:.3g} s a layer beyond reading, over the {num_kernels} kernels that the "
            "clock counts",
        ),
        "memory_bytes": (float(memory_bytes), f"reported by {description}"),
        **_measure_host(nbytes, edge),
    }
    figures: dict[str, Any] = {key: value for key, (value, _) in measurements.items()}
    source = {key: text for key, (_, text) in measurements.items()}
    if is_processor := device.type == "cpu":
        source["is_processor"] = f"measured on {description}"
    return Hardware(name=name, source=source, is_processor=is_processor, **figures)


def _measure_host(nbytes: int, edge: int) -> dict[str, tuple[float, str]]:
    """Return the processor's rates for an expert's work, each with its source.

    With all its threads, in float32, which it multiplies fastest. Most processors compute half
    precisions as float32 products, at a fraction of the speed of engines with their own kernels.
    """
    cpu = torch.device("cpu")
    weights = _weights(cpu, torch.float32, nbytes)
    read_s = typical_s(_products_with(weights), cpu)
    how = f"measured on {_describe(cpu)} with torch {torch.__version__}: "
    rows = f"products of one row with {len(weights)} float32 matrices"
    flops = 2 * edge**3 / _matmul_s(cpu, torch.float32, edge)
    reading = f"{how}{rows} of {_CPU_EDGE} x {_CPU_EDGE}, each read once"
    return {
        "host_flops": (flops, f"{how}{_cube(edge)} product in float32"),
        "host_memory_bytes_per_s": (weights.nbytes / read_s, reading),
    }


def _dtype(dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype_name!r} is not known. Allowed: bfloat16, float16, float32.")
    return dtype


def _device(name: str) -> torch.device:
    try:
        device = torch.device(best_device() if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name!r} cannot be used: {error}") from error
    return device


def _describe(device: torch.device) -> str:
    return f"{platform.machine()} {name_of(device)}" if device.type == "cpu" else name_of(device)


def _cube(edge: int) -> str:
    return f"{edge} x {edge} x {edge}"


def _edge_in_time(device: torch.device, dtype: torch.dtype, edge: int) -> int:
    """Halve the edge until a product takes at most a quarter of a second.

    A CPU without instructions for half precision would take a minute for the usual one.
    """
    seconds = _matmul_s(device, dtype, min(edge, _SMALL_EDGE))
    while edge > _SMALL_EDGE and seconds * (edge / _SMALL_EDGE) ** 3 > _PRODUCT_S:
        edge //= 2
    return edge


def _matmul_s(device: torch.device, dtype: torch.dtype, edge: int) -> float:
    # Transposed, as a model's layers multiply: for half precisions, CPUs without instructions for
    # them take up to nine times as long for the plain product.
    left = torch.randn(edge, edge, device=device, dtype=dtype)
    return typical_s(lambda: left @ left.t(), device)


def _weights(device: torch.device, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    # On a GPU, one row's product with a matrix has to take longer than its launch.
    edge = _CPU_EDGE if device.type == "cpu" else 8192
    count = max(1, nbytes // (edge * edge * dtype.itemsize))
    return torch.full((count, edge, edge), 0.01, device=device, dtype=dtype)


def _products_with(weights: torch.Tensor) -> Callable[[], object]:
    """Read weights as a decode step does: each matrix once, for one row."""
    row = weights[0, :1].clone()
    return lambda: [row @ matrix.t() for matrix in weights]


def _launches_s(device: torch.device, dtype: torch.dtype, bytes_per_s: float) -> float:
    """Return the seconds per layer of a small model's decode step, less those of reading weights.

    The rest is the time transformers takes to launch a layer's kernels amid real memory traffic. A
    profile of this machine includes it; the shipped profiles are of engines that fuse kernels.
    """
    config = transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=768,
        intermediate_size=512,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_experts=8,
        num_experts_per_tok=_TOP_K,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    layer = model.model.layers[0]
    experts = sum(p.nbytes for p in layer.mlp.experts.parameters())
    dense = sum(p.nbytes for p in layer.parameters()) - experts
    read_s = (dense + experts * _TOP_K / config.num_experts) / bytes_per_s
    steps = [torch.full((1, 1), token, device=device) for token in range(2, 18)]
    with torch.no_grad():
        # Different tokens choose different experts: nothing stays in a processor's caches.
        step_s = typical_s(lambda: [model(step) for step in steps], device) / len(steps)
    return max(float(step_s / _LAYERS - read_s), 0.0)


_FLOPS_RANGE = math.log(100.0)
"""How far a prefill's rate may lie from the large product's, as a logarithm."""
ROUNDS = 3
"""How often both runs are repeated, in turn: machines change their speed."""
MOST_LAYERS = 4
"""Layers of the model that stands in for a larger one: they fit a laptop's memory."""
ALL, SOME = "100%", "40%"
"""Capacities: with the first, every expert is resident from the beginning."""
_PROMPT, _TOKENS = 64, 8
NOBODYS = Hardware(
    name="wall",
    peak_flops=1.0,
    memory_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    link_latency_s=0.0,
    kernel_overhead_s=0.0,
    memory_bytes=1.0,
)
"""Placeholder hardware of a run on the wall clock, which charges nothing by it."""


Values = npt.NDArray[np.float64]


class Step(NamedTuple):
    """One decode step. Of L layers, the first L - 1 are timed one by one."""

    total_s: float
    layers_s: Sequence[float] | Values
    """From the end of a layer's router to the end of the next one's [L - 1]."""
    bookkeeping_s: Sequence[float] | Values
    """In the hooks of the L routers [L]."""
    demanded_s: Sequence[float] | Values
    """Transfer time of the experts demanded within each of `layers_s` [L - 1]."""


class Parts(NamedTuple):
    """A decode step's parts, in seconds."""

    layer_s: float
    """One layer with its bookkeeping, without waits."""
    bookkeeping_s: float
    outside_s: float
    """The rest of a pass besides its layers."""
    wait_s: float
    """The extra time of a layer that waited, besides its experts' transfer time."""


def parts_of(hot: Sequence[Step], cold: Sequence[Step]) -> Parts:
    """Return the parts of decode steps, from `hot` ones without misses and `cold` ones.

    Medians are per layer, so that layers need not be alike.
    """
    hot_layers_s = np.median([step.layers_s for step in hot], axis=0)
    hooks_s = np.median([step.bookkeeping_s for step in hot], axis=0)
    extra_s = np.array([np.subtract(s.layers_s, s.demanded_s) - hot_layers_s for s in cold])
    waits_s = extra_s[np.array([step.demanded_s for step in cold]) > 0]
    layer_s, total_s = float(hot_layers_s.mean()), statistics.median(step.total_s for step in hot)
    return Parts(
        layer_s,
        float(hooks_s.mean()),
        max(total_s - layer_s * len(hooks_s), 0.0),
        max(float(np.median(waits_s)), 0.0) if len(waits_s) else 0.0,
    )


def profile_of(hardware: Hardware, parts: Parts, geometry: Geometry, gates: float) -> Hardware:
    """Return a profile by which the virtual clock charges a decode step as it was measured.

    `gates` is the mean number of gates that a layer's bookkeeping queries for predictions: the
    clock charges them separately. Where reading takes longer than the whole, overheads are 0.
    """
    rate, num_layers = hardware.memory_bytes_per_s, geometry.num_layers
    layer_dense = min(geometry.dense_bytes)
    token_experts = statistics.mean(levels[0] for levels in geometry.expert_bytes) * geometry.top_k
    rest_s = parts.layer_s - parts.bookkeeping_s - (layer_dense + token_experts) / rate
    kernel_s = max(rest_s, 0.0) / (DENSE_KERNELS + EXPERT_KERNELS)
    outside_s = parts.outside_s - (sum(geometry.dense_bytes) - num_layers * layer_dense) / rate
    return dataclasses.replace(
        hardware,
        kernel_overhead_s=kernel_s,
        layer_overhead_s=max(parts.bookkeeping_s - gates * GATE_KERNELS * kernel_s, 0.0),
        pass_overhead_s=max(outside_s, 0.0),
        wait_overhead_s=parts.wait_s,
    )


def prefill_s(hardware: Hardware, geometry: Geometry, tokens: int, requests: int) -> float:
    """Return the seconds that the clock charges for a prefill whose experts are all resident.

    `requests` counts the experts of all layers' events; each layer is charged their mean.
    """
    costs, seconds = Costs(hardware, geometry), 0.0
    experts, assignments = round(requests / geometry.num_layers), tokens * geometry.top_k
    for layer in range(geometry.num_layers):
        seconds += costs.dense_s(layer, tokens)
        seconds += costs.experts_s(layer, experts, assignments)
    return seconds


def with_prefill_rate(
    hardware: Hardware, geometry: Geometry, tokens: int, requests: int, measured_s: float
) -> Hardware:
    """Return the profile with the FLOP/s at which the clock charges a prefill what it took.

    The few rows that each expert gets run at another rate than the large product of `measure`: on
    a CPU without instructions for half precisions faster than it. Unchanged where overheads and
    reading alone take as long as was measured, as nothing waited for arithmetic then.
    """

    def excess_s(log_flops: float) -> float:
        profile = dataclasses.replace(hardware, peak_flops=math.exp(log_flops))
        return prefill_s(profile, geometry, tokens, requests) - measured_s

    guess = math.log(hardware.peak_flops)
    low, high = guess - _FLOPS_RANGE, guess + _FLOPS_RANGE
    if excess_s(high) >= 0 or excess_s(low) <= 0:
        return hardware
    log_flops = float(optimize.brentq(excess_s, low, high))
    return dataclasses.replace(hardware, peak_flops=math.exp(log_flops))


def model_like(pretrained: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the first layers of a model of this shape with random weights, loading none.

    Its routers choose different experts for each token. Raises ValueError where there is no such
    model, and OSError where its configuration cannot be read.
    """
    config = copy.deepcopy(transformers.AutoConfig.from_pretrained(model_path(pretrained)))
    text = config.get_text_config()
    total, text.num_hidden_layers = text.num_hidden_layers, min(text.num_hidden_layers, MOST_LAYERS)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, value[: text.num_hidden_layers])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in find_moe_layers(model):
        nn.init.normal_(next(layer.router.parameters()), std=0.5)
    return model.to(device).eval().requires_grad_(False)


def measure_on_wall(
    hardware: Hardware,
    model: Any,
    loader: ExpertLoader,
    policy: str,
    bytes_per_s: float | None = None,
) -> Hardware:
    """Replace a profile's rates by those of decoding this model on this machine's wall clock.

    The loader has taken the model's experts already. `bytes_per_s` throttles the link. Replaced:
    kernel, layer, pass and wait overheads, the link, the FLOP/s of a prefill, and on a CPU the
    memory rate, all measured on the model's own matrices. Raises ValueError for a model of one MoE
    layer.
    """
    geometry = describe(model, find_moe_layers(model), "calibration")
    if geometry.num_layers < 2:
        raise ValueError(
            "pretrained: the time of a layer cannot be measured on a model with one MoE layer."
        )
    hot, cold, rates, prefills = [], [], [], []
    for _ in range(ROUNDS):
        steps, engine, rate = _decode(model, loader, geometry, policy, ALL, None)
        hot += steps
        rates.append(rate)
        prefills.append([p for p in engine.ledger.passes if p.phase == PREFILL][-1])
        steps, engine, _ = _decode(model, loader, geometry, policy, SOME, bytes_per_s)
        cold += steps
    # The later layers' gates that the prefetcher queries; one with a predictor queries none.
    queried = 0 if engine.rules.prefetch.uses_predictor else engine.depth
    profile = profile_of(
        dataclasses.replace(
            hardware,
            memory_bytes_per_s=statistics.median(rates) or hardware.memory_bytes_per_s,
            link_bytes_per_s=bytes_per_s or engine.link.bytes_moved / engine.link.busy_s,
            link_latency_s=0.0,
        ),
        parts_of(hot, cold),
        geometry,
        statistics.mean(min(queried, later) for later in range(geometry.num_layers)),
    )
    prefill = sorted(prefills, key=lambda p: p.duration_s)[ROUNDS // 2]
    profile = with_prefill_rate(profile, geometry, _PROMPT, prefill.requests, prefill.duration_s)
    how = f"measured on the wall clock with policy {policy}: "
    throttled = f"given: the link is slowed down to {bytes_per_s} bytes/s"
    sources = {
        **hardware.sources,
        "peak_flops": f"{how}a prefill of {_PROMPT} tokens less its reading and overheads",
        "memory_bytes_per_s": f"{how}products of one row with the experts of the model",
        "link_bytes_per_s": throttled if bytes_per_s else f"{how}experts over the time they moved",
        "link_latency_s": f"{how}one expert after another, the rate holds what each costs",
        "kernel_overhead_s": f"{how}a layer less its bookkeeping and reading, over its kernels",
        "layer_overhead_s": f"{how}the hooks of a layer's router, predicting gates apart",
        "pass_overhead_s": f"{how}a decode step less its layers",
        "wait_overhead_s": f"{how}layers that waited, less the moving, against those that did not",
    }
    return dataclasses.replace(profile, source=sources)


def decoding(
    pretrained: str,
    device_name: str,
    dtype_name: str,
    hardware: Hardware,
    policy: str,
    bytes_per_s: float | None,
) -> Hardware:
    """Return `measure_on_wall` for a model of this shape, on a device and at a dtype by name."""
    device = _device(device_name)
    model = model_like(pretrained, _dtype(dtype_name), device)
    loader = ExpertLoader("ram", None, model)
    loader.take_experts(model, device)
    return measure_on_wall(hardware, model, loader, policy, bytes_per_s)


def _decode(
    model: Any,
    loader: ExpertLoader,
    geometry: Geometry,
    policy: str,
    capacity: str,
    bytes_per_s: float | None,
) -> tuple[list[Step], WallEngine, float]:
    """Decode two random texts, the first to warm up; return the steps of the second.

    With them the engine, and the rate in bytes/s at which slots are read if they hold all experts.
    """
    layers = find_moe_layers(model)
    setting = Setting(
        policy=load_policy(policy),
        capacity=parse_capacity(capacity, geometry),
        hardware=NOBODYS,
        throttle_bytes_per_s=bytes_per_s,
    )
    pools = SlotPools(
        loader.parameters, geometry, setting.capacity, loader.tiers[0], device_of(model)
    )
    engine = WallEngine(geometry, setting, pools)
    link = engine.link
    if capacity == ALL:
        engine.fill(np.arange(geometry.num_layers * geometry.num_experts)[::-1].copy())
    store = SlotStore(pools, geometry, "grouped_mm", device_of(model).type)
    router_marks: list[tuple[float, float]] = []
    ended_s: list[float] = []
    routers, generator = [layer.router for layer in layers], torch.Generator().manual_seed(11)

    def begin(layer: int, args: Any, output: Any) -> None:
        router_marks.append((time.perf_counter(), link.demanded_s))

    with ExitStack() as hooks, torch.no_grad():
        # Times are taken at the end of each router, before the engine's hooks and after.
        hooks.enter_context(watched(routers, begin))
        hooks.callback(WrappedModel(model, layers, engine, store).unwrap)
        hooks.enter_context(watched(routers, lambda *_: ended_s.append(time.perf_counter())))
        rate = _read_rate(Matrices(layers[0].experts, pools.of_layer(0))) if capacity == ALL else 0
        for _ in range(2):
            vocab_size, steps = model.get_input_embeddings().num_embeddings, list[Step]()
            prompt = torch.randint(vocab_size, (1, _PROMPT), generator=generator)
            output = model(prompt.to(device_of(model)), use_cache=True)
            with model._optimize_model_for_decode():
                for _ in range(_TOKENS):
                    router_marks.clear()
                    ended_s.clear()
                    token, past = output.logits[:, -1:].argmax(-1), output.past_key_values
                    output = model(token, past_key_values=past, use_cache=True)
                    record = engine.ledger.passes[-1]
                    assert record.phase == DECODE
                    begun_s, demanded_s = np.transpose(router_marks)
                    spans = np.diff(begun_s), np.subtract(ended_s, begun_s), np.diff(demanded_s)
                    steps.append(Step(record.duration_s, *spans))
    return steps, engine, rate


def _read_rate(held: Matrices) -> float:
    """Return the bytes/s at which one row's products read these slots; 0 on a device (launches).

    Slots of all experts, each read once: only a small model's stay in a processor's caches.
    """
    weights = [*held.up, *held.down]
    if weights[0].device.type != "cpu":
        return 0.0
    rows = {matrix.shape[0]: matrix.new_full((1, matrix.shape[0]), 0.01) for matrix in weights}
    read_s = typical_s(lambda: [rows[m.shape[0]] @ m for m in weights], torch.device("cpu"))
    return sum(matrix.nbytes for matrix in weights) / read_s
