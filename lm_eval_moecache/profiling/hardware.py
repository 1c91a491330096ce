"""Measure the machine this runs on and write it down as a hardware profile.

The host is the processor that this runs on: what `miss=host` computes absent experts with.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.setting import MOST_READS, TOGETHER
from lm_eval_moecache.engine.virtual.link import DENSE_KERNELS, EXPERT_KERNELS
from lm_eval_moecache.profiling._texts import say
from lm_eval_moecache.profiling._timing import typical_s
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.numbers import finite, read_count
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    import torch

    from lm_eval_moecache.profiling._fit import Measured

_SMALL_BYTES = 4096
_LAYERS = 8
_TOP_K = 2
ON_DEMAND = "on_demand"
_CPU_EDGE = 1024
_SMALL_EDGE = 256
_PRODUCT_S = 0.25
MOST_EDGE = 65536
"""Of the measured product: beyond it one takes minutes on any device."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile's file: NAME.yaml")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, xpu:1 ...")
    parser.add_argument("--dtype", type=str, default="bfloat16", help="compute dtype")
    parser.add_argument("--size", type=str, default="256MiB", help="bytes of one measured copy")
    parser.add_argument(
        "--matmul",
        type=int,
        default=2048,
        help="edge of the measured matrix product (smaller if it is slow)",
    )
    parser.add_argument(
        "--pretrained",
        type=str,
        help="decode a model of this shape on the wall clock and measure its overheads",
    )
    text = "policy whose bookkeeping --pretrained measures"
    parser.add_argument("--policy", type=str, default=ON_DEMAND, help=text)
    parser.add_argument("--bandwidth", type=str, help="throttled link bandwidth for --pretrained")
    parser.add_argument(
        "--from",
        type=str,
        nargs="+",
        default=[],
        metavar="FILE",
        help="TRACE MEASURED [TRACE MEASURED ...]: fit the profile to any device's measurements",
    )
    parser.add_argument("--base", type=str | None, help="--from: the profile to begin with")
    parser.add_argument("--capacity", type=str | None, help="--from: cache capacity")
    parser.add_argument("--reads", type=str, default="1", help="--from: reads an expert, per pair")
    parser.add_argument("--tokens", type=str, default=":", help="--from: FIRST:LAST to fit on")
    parser.add_argument("--fit", type=str | None, help="--from: figures to fit, by commas")
    text = "--from: the engine's policy"
    parser.add_argument("--policy_of", type=str, default="on_demand", help=text)
    parser.add_argument("--eviction", type=str, default="lru", help="--from: the engine's eviction")
    text = "--from: the engine's execution order"
    parser.add_argument("--execute", type=str, default=TOGETHER, help=text)


def run(arguments: Namespace) -> int:
    """Measure and write; what was measured is said in `source`, field by field."""
    path = Path(arguments.out)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"out={arguments.out!r} must end in .yaml.")
    if not 1 <= arguments.matmul <= MOST_EDGE:
        raise ValueError(f"matmul={arguments.matmul} must be 1 or more and at most {MOST_EDGE}.")
    if getattr(arguments, "from"):
        return _run_fit(path, arguments)
    nbytes = parse_bytes(arguments.size, "size")
    of_model = {"bandwidth": arguments.bandwidth, "policy": arguments.policy}
    for key, value in of_model.items() if not arguments.pretrained else ():
        if value not in (None, ON_DEMAND):
            raise ValueError(f"{key}={value!r} has no effect without pretrained=.")
    rate = parse_bandwidth(arguments.bandwidth) if arguments.bandwidth else None
    load_policy(arguments.policy)
    try:
        profile = measure(path.stem, arguments.device, arguments.dtype, nbytes, arguments.matmul)
        if arguments.pretrained:
            profile = _on_wall(profile, arguments, rate)
    except RuntimeError as error:  # torch's word for memory that is not there, among others
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"size={arguments.size!r}, matmul={arguments.matmul}: cannot be measured here: {reason}"
        ) from error
    fields = dataclasses.asdict(profile)
    write_whole(path, _as_yaml(fields))
    say(fields, [_as_yaml(fields).rstrip("\n")], arguments.json)
    return 0


def _as_yaml(fields: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(fields, sort_keys=False, width=100))


def _run_fit(path: Path, arguments: Namespace) -> int:
    """Fit to measured tables; write the profile, and say how certain each figure is."""
    from lm_eval_moecache.analysis.validation import compare, foretell, same_tokens
    from lm_eval_moecache.profiling import _fit

    runs, base = _measured_runs(arguments)
    names = _fit.DEFAULT if arguments.fit is None else tuple(arguments.fit.split(","))
    fitted = _fit.fit(runs, base, names)
    where = f"{len(runs)} runs ({', '.join(run.name for run in runs)}), tokens {arguments.tokens}"
    sources = dict(base.sources)
    for name, (low, high) in fitted.intervals.items():
        sources[name] = f"fitted on {where}; 95% within {low:.3g} to {high:.3g}"
    if fitted.hardware.load_overhead_s_per_byte != base.load_overhead_s_per_byte:
        sources[_fit.BY_COLUMN] = f"measured on {where}: mgmt_ms over read_bytes"
    profile = dataclasses.replace(fitted.hardware, name=path.stem, source=sources)
    fields = {k: v for k, v in dataclasses.asdict(profile).items() if v is not None}
    write_whole(path, _as_yaml(fields))
    nearness = {}
    for run in runs:
        ours = foretell(run.trace, dataclasses.replace(run.setting, hardware=profile))
        nearness[run.name] = compare(*same_tokens(ours, run.series, run.tokens))
    report = {
        "figures": {name: getattr(profile, name) for name in names},
        "intervals": {name: list(pair) for name, pair in fitted.intervals.items()},
        "cannot_tell_apart": [list(pair) for pair in fitted.alike],
        "says_nothing_of": fitted.unknown,
        "runs": nearness,
    }
    found = finite(report)
    say(found, [_as_yaml(found).rstrip("\n")], arguments.json)
    return 0


def _measured_runs(arguments: Namespace) -> tuple[list[Measured], Hardware]:
    from lm_eval_moecache.analysis.validation import (
        foretell,
        read_measured,
        read_tokens,
        same_tokens,
        setting_of,
    )
    from lm_eval_moecache.profiling._fit import Measured
    from lm_eval_moecache.trace.importers import load_trace

    files = getattr(arguments, "from")
    if len(files) % 2:
        raise ValueError(f"from={files!r} must be pairs: TRACE MEASURED [TRACE MEASURED ...].")
    for key in ("base", "capacity"):
        if getattr(arguments, key) is None:
            raise ValueError(f"--from needs --{key} with it.")
    given = arguments.reads.split(",")
    reads = [read_count("reads", each, least=1, most=MOST_READS) for each in given]
    pairs = list(zip(files[::2], files[1::2], strict=True))
    reads = reads * len(pairs) if len(reads) == 1 else reads
    if len(reads) != len(pairs):
        raise ValueError(f"reads={arguments.reads!r} must be one number or one for each pair.")
    base, tokens, runs = load_hardware(arguments.base), read_tokens(arguments.tokens), []
    engine = SimpleNamespace(
        policy=arguments.policy_of,
        eviction=arguments.eviction,
        capacity=arguments.capacity,
        execute=arguments.execute,
    )
    for (trace_file, table), each in zip(pairs, reads, strict=True):
        trace = load_trace(trace_file)
        setting, series = setting_of(trace, base, engine, each), read_measured(Path(table), {})
        same_tokens(foretell(trace, setting), series, tokens)
        name = Path(trace_file).name.split(".")[0]
        runs.append(Measured(name=name, trace=trace, setting=setting, series=series, tokens=tokens))
    return runs, base


def _on_wall(profile: Hardware, arguments: Namespace, rate: float | None) -> Hardware:
    from lm_eval_moecache.model.wall.loading import ExpertLoader
    from lm_eval_moecache.profiling._wall import measure_on_wall, model_like

    device = _device(arguments.device)
    model = model_like(arguments.pretrained, _dtype(arguments.dtype), device)
    loader = ExpertLoader("ram", None, model)
    loader.take_experts(model, device)
    return measure_on_wall(profile, model, loader, arguments.policy, rate)


def measure(name: str, device_name: str, dtype_name: str, nbytes: int, edge: int) -> Hardware:
    """Measure a device. On a CPU, the link is a copy from one place in memory to another."""
    # Only this action needs torch, and only when it runs.
    import torch

    from lm_eval_moecache.model.device import CPU, locked_copy, total_memory

    dtype, device = _dtype(dtype_name), _device(device_name)
    memory_bytes = int(total_memory(device) or total_memory(CPU) or 0)
    if nbytes < 16 * _SMALL_BYTES:
        raise ValueError(f"size={nbytes} bytes is too small to tell bandwidth from latency.")
    if nbytes > memory_bytes:
        raise ValueError(f"size={nbytes} bytes is more than the {memory_bytes} bytes of {device}.")

    def copy_s(count: int) -> float:
        source = torch.ones(count, dtype=torch.uint8)
        source = source if device.type == "cpu" else locked_copy(source)
        target = torch.empty(count, dtype=torch.uint8, device=device)
        return typical_s(lambda: target.copy_(source, non_blocking=True), device)

    device_edge = _edge_in_time(device, dtype, edge)
    flops = 2 * device_edge**3 / _matmul_s(device, dtype, device_edge)
    weights = _weights(device, dtype, nbytes)
    memory = weights.nbytes / typical_s(_products_with(weights), device)
    large_s, small_s = copy_s(nbytes), copy_s(_SMALL_BYTES)
    layer_s = _launches_s(device, dtype, memory)
    num_kernels = DENSE_KERNELS + EXPERT_KERNELS
    host, host_source = _measure_host(nbytes, edge)
    where = _describe(device)
    how = f"measured on {where} with torch {torch.__version__}: "
    matrices = f"{len(weights)} matrices of {' x '.join(map(str, weights[0].shape))}"
    return Hardware(
        name=name,
        peak_flops=flops,
        memory_bytes_per_s=memory,
        link_bytes_per_s=(nbytes - _SMALL_BYTES) / max(large_s - small_s, 1e-9),
        link_latency_s=small_s,
        kernel_overhead_s=layer_s / num_kernels,
        memory_bytes=float(memory_bytes),
        **host,
        source={
            "peak_flops": f"{how}{_cube(device_edge)} product in {dtype_name}",
            "memory_bytes_per_s": f"{how}products of one row with {matrices}",
            "link_bytes_per_s": f"{how}copy of {nbytes} bytes to it from host memory",
            "link_latency_s": f"{how}copy of {_SMALL_BYTES} bytes to it from host memory",
            "kernel_overhead_s": f"{how}{layer_s:.3g} s a layer beyond reading, over the "
            f"{num_kernels} kernels that the clock counts",
            "memory_bytes": f"reported by {where}",
            **host_source,
        },
    )


def _measure_host(nbytes: int, edge: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the processor reaches at an expert's work, and where each figure comes from.

    With all its threads, at what it multiplies fastest: float32. Half precisions are products of
    float32 on most processors, at a fraction of the speed that engines with kernels of their own
    reach.
    """
    import torch

    cpu = torch.device("cpu")
    weights = _weights(cpu, torch.float32, nbytes)
    read_s = typical_s(_products_with(weights), cpu)
    how = f"measured on {_describe(cpu)} with torch {torch.__version__}: "
    rows = f"products of one row with {len(weights)} float32 matrices"
    figures = {
        "host_flops": 2 * edge**3 / _matmul_s(cpu, torch.float32, edge),
        "host_memory_bytes_per_s": weights.nbytes / read_s,
    }
    source = {
        "host_flops": f"{how}{_cube(edge)} product in float32",
        "host_memory_bytes_per_s": f"{how}{rows} of {_CPU_EDGE} x {_CPU_EDGE}, each read once",
    }
    return figures, source


def _dtype(dtype_name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype_name!r} is not known. Allowed: bfloat16, float16, float32.")
    return dtype


def _device(name: str) -> torch.device:
    import torch

    from lm_eval_moecache.model.device import best_device

    try:
        device = torch.device(best_device() if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name!r} cannot be used: {error}") from error
    return device


def _describe(device: torch.device) -> str:
    from lm_eval_moecache.model.device import name_of

    return f"{platform.machine()} {name_of(device)}" if device.type == "cpu" else name_of(device)


def _cube(edge: int) -> str:
    return f"{edge} x {edge} x {edge}"


def _edge_in_time(device: torch.device, dtype: torch.dtype, edge: int) -> int:
    """Halve the edge until a product takes a quarter of a second at most.

    A CPU without instructions for half precision would take a minute for the usual one.
    """
    seconds = _matmul_s(device, dtype, min(edge, _SMALL_EDGE))
    while edge > _SMALL_EDGE and seconds * (edge / _SMALL_EDGE) ** 3 > _PRODUCT_S:
        edge //= 2
    return edge


def _matmul_s(device: torch.device, dtype: torch.dtype, edge: int) -> float:
    import torch

    # Transposed, as a model's layers multiply: for half precisions, CPUs without instructions for
    # them take up to nine times as long for the plain product.
    left = torch.randn(edge, edge, device=device, dtype=dtype)
    return typical_s(lambda: left @ left.t(), device)


def _weights(device: torch.device, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    import torch

    # On a GPU, one row's product with a matrix has to take longer than its launch.
    edge = _CPU_EDGE if device.type == "cpu" else 8192
    count = max(1, nbytes // (edge * edge * dtype.itemsize))
    return torch.full((count, edge, edge), 0.01, device=device, dtype=dtype)


def _products_with(weights: torch.Tensor) -> Callable[[], object]:
    """Read weights as a decode step does: each matrix once, for one row."""
    row = weights[0, :1].clone()
    return lambda: [row @ matrix.t() for matrix in weights]


def _launches_s(device: torch.device, dtype: torch.dtype, bytes_per_s: float) -> float:
    """Time a decode step of a small model, less the time its weights take to be read, per layer.

    What is left is what transformers takes to launch a layer's kernels among real memory traffic,
    and what a profile of this machine stands for; the shipped ones stand for engines that fuse.
    """
    import torch
    import transformers

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
