"""Replays every shipped composition, and every answer to a miss, on recorded runs of `tiny`.

Usage: python benchmarks/policy_space.py [--traces DIR]. A few minutes of one core. Writes
`cells.json.gz` of results/policy_space and results/miss_answers; cells that are there are kept, and
runs that are recorded in DIR are not recorded again.

Lossy compositions are replayed open loop: each is given the text that the unmodified model wrote.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, load_policy, policy_names
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting, check_host
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.records.use import UseProfile
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.trace.detail import Detail
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import placement, use_of

TASKS = {"tiny_gsm8k": 2, "tiny_mmlu": 2}
"""Task -> documents that are recorded."""
LADDER = "bf16:int8:int4"
DEVICES = {
    "a100-5GBps": "Qwen3-30B-A3B",
    "rtx-4090": "DeepSeek-V2-Lite",
    "phone-12gb": "Qwen1.5-MoE-A2.7B",
}
"""Device -> the model whose layers `tiny`'s are charged as."""
CAPACITIES = ("5%", "10%", "25%", "50%")
FIGURES = (
    *("tok_per_s", "hit_rate", "miss_rate", "decode_miss_rate", "collision_miss_rate"),
    *("stall_ms_per_token", "bytes_per_token", "link_utilization", "routing_fidelity"),
    *("dropped_share", "substituted_share", "low_precision_share", "host_share"),
)
PLACED = "placed"
"""Answers with it begin with the most used experts near: what a host computes never comes near."""
ANSWERS: dict[str, dict[str, Any]] = {
    "fetch": {"miss": "fetch"},
    "host, always": {"miss": "host", "miss.rule": "always"},
    "host, first": {"miss": "host", "miss.rule": "first"},
    "host, balanced": {"miss": "host", "miss.rule": "balanced"},
    "host, always, placed": {"miss": "host", "miss.rule": "always"},
    "host, first, placed": {"miss": "host", "miss.rule": "first"},
    "host, balanced, placed": {"miss": "host", "miss.rule": "balanced"},
    "drop, 4 kept": {"miss": "drop", "miss.h": 4},
    "drop, 2 kept": {"miss": "drop", "miss.h": 2},
    "int4": {"miss": "fetch_lowest"},
    "buddy": {"miss": "buddy"},
}
LINKS_GB = (1, 2, 4, 8, 16, 32, 64)
HOSTS_GB = (12.5, 25, 50, 100, 200, 400)
HOST_FLOP_PER_BYTE = 20
"""A host's arithmetic beside its memory, as the shipped profiles' processors have it (10 to 23)."""

Cell = dict[str, Any]


def plain(policy: Policy) -> bool:
    """Whether a trace can stand for the run: drafts have no place in one."""
    return not policy.prefetch.algorithm.needs_draft


def kind_of(policy: Policy) -> str:
    """Name the recording that a policy is replayed on."""
    if policy.miss.algorithm.uses_ladder:
        return "ladder"
    return "predictor" if policy.routing.name == "commit" else "plain"


def record(folder: Path) -> dict[str, Trace]:
    """Record what is not there yet, and load all."""
    found = {}
    everybody = tuple((load_policy(name).prefetch, 0) for name in policy_names())
    onlookers = {str(p.as_dict()): (p, s) for p, s in everybody if looks_on(p.algorithm)}
    wanted: dict[str, tuple[dict[str, Any], Detail]] = {
        "plain": ({"policy": "on_demand"}, Detail(onlookers=tuple(onlookers.values()))),
        "predictor": ({"policy": "commitmoe_prefetch"}, Detail()),
        "ladder": ({"policy": "on_demand", "precision": LADDER}, Detail()),
    }
    for name, (given, detail) in wanted.items():
        own = folder / name
        if not any(own.glob("*.parquet")):
            run_live(given, detail, own)
        [path] = own.glob("*.parquet")
        found[name] = load_trace(str(path), logits=True, predicted=True)
    return found


def looks_on(algorithm: Any) -> bool:
    return bool(algorithm.is_active and not algorithm.needs_draft and not algorithm.is_offline)


def run_live(given: Mapping[str, Any], detail: Detail, folder: Path) -> None:
    """Run the tasks once and keep what replays have to see."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lm_eval_moecache.harness.lm import MoECacheLM
    from lm_eval_moecache.records.paths import task_configs_dir

    folder.mkdir(parents=True, exist_ok=True)
    lm = MoECacheLM(pretrained="tiny", capacity="50%", **given)
    lm.install(replace(lm.moecache, trace=str(folder), detail=detail))
    manager = TaskManager(include_path=str(task_configs_dir()), include_defaults=False)
    samples = {task: list(range(limit)) for task, limit in TASKS.items()}
    simple_evaluate(
        model=lm, tasks=list(TASKS), samples=samples, task_manager=manager, bootstrap_iters=0
    )


def space() -> Iterator[Cell]:
    for policy in policy_names():
        for hardware, model in DEVICES.items():
            for capacity in CAPACITIES:
                yield {
                    "policy": policy,
                    "hardware": hardware,
                    "emulate": model,
                    "capacity": capacity,
                }


def answers() -> Iterator[Cell]:
    for answer in ANSWERS:
        for link in LINKS_GB:
            for host in HOSTS_GB if answer.startswith("host") else HOSTS_GB[:1]:
                yield {"answer": answer, "link_gb": link, "host_gb": host}


def measure_policy(traces: Mapping[str, Trace], cell: Cell) -> Cell:
    policy, hardware = load_policy(cell["policy"]), load_hardware(cell["hardware"])
    if not plain(policy):
        return {"refused": "drafts while it prefetches: --model moecache-spec"}
    if policy.miss.algorithm.uses_host:
        try:
            check_host(hardware)
        except ValueError:
            return {"refused": "its experts lie in flash: no host computes them"}
    trace = traces[kind_of(policy)]
    return measure(trace, policy, cell["capacity"], hardware, cell["emulate"])


def measure_answer(traces: Mapping[str, Trace], cell: Cell) -> Cell:
    """Measure one answer under LRU without prefetch, so that what is absent is the same for all."""
    policy = load_policy("on_demand", ANSWERS[cell["answer"]])
    machine = replace(
        load_hardware("a100-5GBps"),
        link_bytes_per_s=cell["link_gb"] * 1e9,
        host_memory_bytes_per_s=cell["host_gb"] * 1e9,
        host_flops=HOST_FLOP_PER_BYTE * cell["host_gb"] * 1e9,
    )
    trace = traces["ladder"]
    warm = use_of(trace) if cell["answer"].endswith(PLACED) else None
    return measure(trace, policy, "25%", machine, "Qwen3-30B-A3B", warm)


def measure(
    trace: Trace,
    policy: Policy,
    capacity: str,
    hardware: Hardware,
    emulate: str,
    warm: UseProfile | None = None,
) -> Cell:
    model = load_real_model(emulate)
    geometry = model.emulated_by(trace.geometry)
    size = parse_capacity(capacity, geometry, per_layer=policy.per_layer)
    warm = placement(policy, warm, trace.geometry)
    setting = Setting(policy=policy, capacity=size, hardware=hardware, emulate=model, warm=warm)
    engine = replay(trace, setting)
    engine.check_integrity()
    metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
    regime = regime_of(geometry, size.total_bytes, hardware)
    return {
        "open_loop": not policy.is_lossless,
        "ttft_ms": metrics["ttft_ms"]["mean"],
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "cycles": regime.cycles,
        **{name: metrics[name] for name in FIGURES if name in metrics},
    }


def load(file: Path) -> list[Cell]:
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else []


def save(file: Path, runs: list[Cell]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(run, sort_keys=True) for run in runs) + "\n]\n"
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--traces", type=Path, default=Path("policy_space_traces"))
    arguments = parser.parse_args()
    traces = record(arguments.traces)
    work = (("miss_answers", answers, measure_answer), ("policy_space", space, measure_policy))
    for name, cells, measure_one in work:
        file = arguments.results / name / "cells.json.gz"
        runs = load(file)
        done = {json.dumps(run["cell"], sort_keys=True) for run in runs}
        for cell in cells():
            if json.dumps(cell, sort_keys=True) not in done:
                runs.append({"cell": cell, **measure_one(traces, cell)})
                if len(runs) % 20 == 0:
                    save(file, runs)
                    sys.stderr.write(f"{name}: {len(runs)} cells\n")
        save(file, runs)


if __name__ == "__main__":
    main()
