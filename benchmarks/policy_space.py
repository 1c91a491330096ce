"""Replays every shipped composition, and every answer to a miss, on recorded runs of `tiny`.

Usage: python benchmarks/policy_space.py [--traces DIR]. A few minutes of one core. Writes
`cells.json.gz`, `table.md` and the plot of results/policy_space and results/miss_answers; cells
that are there are kept, and runs that are recorded in DIR are not recorded again.

Lossy compositions are replayed open loop: each is given the text that the unmodified model wrote.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grid import RESULTS, Run, fill, sections, table

from lm_eval_moecache.algorithms.policy import Policy, load_policy, policy_names
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting, check_host
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.records.use import UseProfile
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.mpl_style import look, new_figure, save
from lm_eval_moecache.report.results import load_runs
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
BASE = "on_demand"
PLACED = ", placed"
"""Answers with it begin with the most used experts near: what a host computes never comes near."""
LOSSLESS = ("fetch", "host, always", "host, first", "host, balanced")
ANSWERS: dict[str, dict[str, Any]] = {
    "fetch": {"miss": "fetch"},
    **{
        f"host, {rule}{placed}": {"miss": "host", "miss.rule": rule}
        for placed in ("", PLACED)
        for rule in ("always", "first", "balanced")
    },
    "drop, 4 kept": {"miss": "drop", "miss.h": 4},
    "drop, 2 kept": {"miss": "drop", "miss.h": 2},
    "int4": {"miss": "fetch_lowest"},
    "buddy": {"miss": "buddy"},
}
LINKS_GB = (1, 2, 4, 8, 16, 32, 64)
HOSTS_GB = (12.5, 25, 50, 100, 200, 400)
HOST_FLOP_PER_BYTE = 20
"""A host's arithmetic beside its memory, as the shipped profiles' processors have it (10 to 23)."""
HOST_GB = 100
"""Where all answers are drawn over the link."""
Best = dict[tuple[float, float], tuple[str, float]]
"""(link, host) -> the fastest lossless answer, and its gain over fetching."""


def record(folder: Path) -> dict[str, Trace]:
    """Record what is not there yet, and load all."""
    prefetchers = [load_policy(name).prefetch for name in policy_names()]
    shadows = {str(p.as_dict()): (p, 0) for p in prefetchers if can_propose(p.algorithm)}
    wanted: dict[str, tuple[dict[str, Any], Detail]] = {
        "plain": ({"policy": BASE}, Detail(onlookers=tuple(shadows.values()))),
        "predictor": ({"policy": "commitmoe_prefetch"}, Detail()),
        "ladder": ({"policy": BASE, "precision": LADDER}, Detail()),
    }
    traces = {}
    for name, (arguments, detail) in wanted.items():
        own = folder / name
        if not any(own.glob("*.parquet")):
            run_live(arguments, detail, own)
        [path] = own.glob("*.parquet")
        traces[name] = load_trace(str(path), logits=True, predicted=True)
    return traces


def can_propose(algorithm: Any) -> bool:
    return bool(algorithm.is_active and not algorithm.needs_draft and not algorithm.is_offline)


def run_live(arguments: Mapping[str, Any], detail: Detail, folder: Path) -> None:
    """Run the tasks once and keep what replays have to see."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lm_eval_moecache.harness.lm import MoECacheLM
    from lm_eval_moecache.records.paths import task_configs_dir

    folder.mkdir(parents=True, exist_ok=True)
    lm = MoECacheLM(pretrained="tiny", capacity="50%", **arguments)
    lm.install(lm.moecache.with_changes(trace=str(folder), detail=detail))
    manager = TaskManager(include_path=str(task_configs_dir()), include_defaults=False)
    samples = {task: list(range(limit)) for task, limit in TASKS.items()}
    simple_evaluate(
        model=lm, tasks=list(TASKS), samples=samples, task_manager=manager, bootstrap_iters=0
    )


def space() -> Iterator[tuple[Run, None]]:
    for policy in policy_names():
        for hardware, model in DEVICES.items():
            for capacity in CAPACITIES:
                cell = {"policy": policy, "hardware": hardware, "emulate": model}
                yield {**cell, "capacity": capacity}, None


def answers() -> Iterator[tuple[Run, None]]:
    for answer in ANSWERS:
        for link in LINKS_GB:
            for host in HOSTS_GB if answer.startswith("host") else HOSTS_GB[:1]:
                yield {"answer": answer, "link_gb": link, "host_gb": host}, None


def measure_policy(traces: Mapping[str, Trace], cell: Run, _: None) -> Run:
    policy, hardware = load_policy(cell["policy"]), load_hardware(cell["hardware"])
    if policy.prefetch.algorithm.needs_draft:
        return {"refused": "drafts while it prefetches: --model moecache-spec"}
    if policy.miss.algorithm.uses_host:
        try:
            check_host(hardware)
        except ValueError:
            return {"refused": "its experts lie in flash: no host computes them"}
    kind = "predictor" if policy.routing.name == "commit" else "plain"
    trace = traces["ladder" if policy.miss.algorithm.uses_ladder else kind]
    return measure(trace, policy, cell["capacity"], hardware, cell["emulate"])


def measure_answer(traces: Mapping[str, Trace], cell: Run, _: None) -> Run:
    """Measure one answer under LRU without prefetch, so that what is absent is the same for all."""
    policy = load_policy(BASE, ANSWERS[cell["answer"]])
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
) -> Run:
    model = load_real_model(emulate)
    geometry = model.emulated_by(trace.geometry)
    size = parse_capacity(capacity, geometry, per_layer=policy.per_layer)
    warm = placement(policy, warm, trace.geometry)
    setting = Setting(policy=policy, capacity=size, hardware=hardware, emulate=model, warm=warm)
    engine = replay(trace, setting)
    engine.check_integrity()
    metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
    return {
        "open_loop": not policy.is_lossless,
        "ttft_ms": metrics["ttft_ms"]["mean"],
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "cycles": regime_of(geometry, size.total_bytes, hardware).cycles,
        **{name: metrics[name] for name in FIGURES if name in metrics},
    }


class Space:
    """The cells of every composition, by device, composition and capacity."""

    def __init__(self, runs: Sequence[Run]) -> None:
        keys = [r["cell"] for r in runs]
        self.at = {
            (c["hardware"], c["policy"], c["capacity"]): r for c, r in zip(keys, runs, strict=True)
        }
        self.devices = list(dict.fromkeys((c["hardware"], c["emulate"]) for c in keys))
        names = dict.fromkeys(c["policy"] for c in keys)
        self.ranked = sorted(names, key=lambda name: (-self._mean_gain(name), name))

    def of(self, hardware: str, policy: str) -> list[Run]:
        return [self.at[hardware, policy, capacity] for capacity in CAPACITIES]

    def gains(self, hardware: str, policy: str) -> list[float | None]:
        """Return the speed over `on_demand`'s at each capacity; None where it is refused."""
        pairs = zip(self.of(hardware, policy), self.of(hardware, BASE), strict=True)
        return [
            None if "refused" in run else run["tok_per_s"] / base["tok_per_s"]
            for run, base in pairs
        ]

    def _mean_gain(self, policy: str) -> float:
        gains = [g for hardware, _ in self.devices for g in self.gains(hardware, policy) if g]
        return sum(map(math.log, gains)) / len(gains) if gains else -math.inf


def render_space(runs: Sequence[Run]) -> str:
    grid, parts = Space(runs), []
    headers = [
        *("Policy", *(f"{c} tok/s" for c in CAPACITIES), *(f"{c} miss" for c in CAPACITIES)),
        *("Router's own at 25%", "Left out at 25%"),
    ]
    for hardware, model in grid.devices:
        rows = []
        for policy in grid.ranked:
            own = grid.of(hardware, policy)
            if "refused" in own[0]:
                rows.append([policy, own[0]["refused"], *[""] * 9])
                continue
            speeds = [
                f"{run['tok_per_s']:.1f} (x{gain:.2f})"
                for run, gain in zip(own, grid.gains(hardware, policy), strict=True)
            ]
            misses = [f"{100 * r['miss_rate']:.0f}%" for r in own]
            lossy = [own[2]["routing_fidelity"], own[2]["dropped_share"]]
            shares = [f"{100 * s:.0f}%" for s in lossy] if own[2]["open_loop"] else ["", ""]
            rows.append([policy, *speeds, *misses, *shares])
        base = zip(CAPACITIES, grid.of(hardware, BASE), strict=True)
        cycles = ", ".join(f"{capacity} = {run['cycles']:.2f}" for capacity, run in base)
        parts.append((f"{hardware}, {model}", f"Cycles: {cycles}.\n\n{table(headers, rows)}"))
    return sections(parts)


def draw_space(runs: Sequence[Run], folder: Path) -> None:
    """One map a device: speed over on_demand's, by policy and capacity."""
    grid = Space(runs)
    shown = [p for p in grid.ranked if any(any(grid.gains(h, p)) for h, _ in grid.devices)]
    lossy = {run["cell"]["policy"] for run in runs if run.get("open_loop")}
    labels = [f"{policy} *" if policy in lossy else policy for policy in shown]
    figure, panels = new_figure(1, len(grid.devices))
    figure.set_size_inches(4 + 3.2 * len(panels), 1.2 + 0.24 * len(shown))
    for place, ((hardware, model), axes) in enumerate(zip(grid.devices, panels, strict=True)):
        rows = [grid.gains(hardware, policy) for policy in shown]
        values = [[math.nan if gain is None else math.log2(gain) for gain in row] for row in rows]
        image = axes.imshow(values, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        axes.set_title(f"{hardware}\n{model}")
        axes.set_xticks(range(len(CAPACITIES)), CAPACITIES)
        axes.set_yticks(range(len(shown)), labels if not place else [""] * len(shown))
        axes.grid(False)
        for y, row in enumerate(rows):
            for x, gain in enumerate(row):
                color = "k" if gain is None or abs(math.log2(gain)) <= 1.2 else "w"
                text = "-" if gain is None else f"{gain:.2f}"
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    bar = figure.colorbar(image, ax=panels, ticks=[-2, -1, 0, 1, 2], shrink=0.5)
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label(f"tok/s over {BASE}")
    save(figure, folder / "speed.svg")


def speeds_of(runs: Sequence[Run]) -> dict[tuple[str, float, float], float]:
    """Return (answer, link, host) -> tok/s; what uses no host is the same for each."""
    hosts = sorted({run["cell"]["host_gb"] for run in runs})
    speeds: dict[tuple[str, float, float], float] = {}
    for run in runs:
        cell = run["cell"]
        own = [cell["host_gb"]] if cell["answer"].startswith("host") else hosts
        speeds |= {(cell["answer"], cell["link_gb"], host): run["tok_per_s"] for host in own}
    return speeds


def winners(runs: Sequence[Run], suffix: str = "") -> Best:
    speed, best = speeds_of(runs), {}
    for link, host in sorted({key[1:] for key in speed}):
        own = {a: speed[a if a == "fetch" else a + suffix, link, host] for a in LOSSLESS}
        name = max(own, key=lambda answer: (own[answer], answer == "fetch"))
        best[link, host] = name, own[name] / own["fetch"]
    return best


def over_link(runs: Sequence[Run]) -> dict[str, dict[float, float]]:
    """Return answer -> link -> tok/s with one host."""
    found: dict[str, dict[float, float]] = {}
    for (answer, link, host), speed in speeds_of(runs).items():
        if host == HOST_GB:
            found.setdefault(answer, {})[link] = speed
    return found


def axes_of(best: Best) -> tuple[list[float], list[float]]:
    links, hosts = (sorted({key[i] for key in best}) for i in (0, 1))
    return links, hosts


def render_answers(runs: Sequence[Run]) -> str:
    parts = []
    for title, suffix in (("From an empty cache", ""), ("With the most used placed", PLACED)):
        best = winners(runs, suffix)
        links, hosts = axes_of(best)
        rows = [
            [f"{host:g}", *(f"{best[k, host][0]} (x{best[k, host][1]:.2f})" for k in links)]
            for host in hosts
        ]
        headers = ["Host \\ link GB/s", *(f"{link:g}" for link in links)]
        parts.append((f"Fastest lossless answer, gain over fetch: {title}", table(headers, rows)))
    headers = [f"tok/s (host {HOST_GB} GB/s)", *(f"{link:g} GB/s" for link in links)]
    speeds = over_link(runs).items()
    rows = [[answer, *(f"{own[link]:.1f}" for link in links)] for answer, own in speeds]
    return sections([*parts, ("All answers", table(headers, rows))])


def draw_answers(runs: Sequence[Run], costs: Mapping[str, str], folder: Path) -> None:
    """The one picture: who wins over link and host, and every answer with what it costs."""
    figure, panels = new_figure(1, 3)
    figure.set_size_inches(17, 5)
    titles = {"": "from an empty cache", PLACED: "most used experts placed"}
    for axes, (suffix, title) in zip(panels, titles.items(), strict=False):
        draw_map(axes, winners(runs, suffix))
        axes.set_title(f"fastest at equal outputs, {title}")
    axes = panels[2]
    for place, (answer, speeds) in enumerate(over_link(runs).items()):
        links, ys = zip(*sorted(speeds.items()), strict=True)
        dashes = "--" if answer.endswith(PLACED) else "-" if answer in LOSSLESS else ":"
        axes.plot(links, ys, dashes, label=f"{answer}{costs.get(answer, '')}", **look(place))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("link [GB/s]")
    axes.set_ylabel(f"tok/s, host {HOST_GB} GB/s")
    axes.set_title("every answer; dotted: lossy, with what it costs")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, folder / "answers.svg")


def draw_map(axes: Any, best: Best) -> None:
    links, hosts = axes_of(best)
    values = [[LOSSLESS.index(best[link, host][0]) for link in links] for host in hosts]
    axes.imshow(values, cmap="Pastel1", vmin=0, vmax=8, aspect="auto", origin="lower")
    axes.set_xticks(range(len(links)), [f"{link:g}" for link in links])
    axes.set_yticks(range(len(hosts)), [f"{host:g}" for host in hosts])
    axes.set_xlabel("link [GB/s]")
    axes.set_ylabel("host memory [GB/s]")
    axes.grid(False)
    for y, host in enumerate(hosts):
        for x, link in enumerate(links):
            answer, gain = best[link, host]
            text = f"{answer.removeprefix('host, ')}\nx{gain:.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7)


def perplexity_costs(folder: Path) -> dict[str, str]:
    """Return what each lossy answer costs, from the runs of accuracy/."""
    words: dict[str, float] = {}
    for run in load_runs(folder):
        miss = run.moecache["policy"]["miss"]
        name = f"drop, {miss['h']} kept" if "h" in miss else str(miss["name"])
        if run.moecache["model"]["precision"] == ["int4"]:
            name = "int4"
        words[name] = run.results["tiny_wikitext"]["word_perplexity,none"]
    plain = words.pop("fetch")
    return {name: f" (perplexity {100 * (v / plain - 1):+.1f}%)" for name, v in words.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--traces", type=Path, default=Path("policy_space_traces"))
    arguments = parser.parse_args()
    traces = record(arguments.traces)
    accuracy = RESULTS / "miss_answers" / "accuracy"
    draw_costs: Callable[..., None] = partial(draw_answers, costs=perplexity_costs(accuracy))
    for name, cells, measured, render, draw in (
        ("miss_answers", answers, measure_answer, render_answers, draw_costs),
        ("policy_space", space, measure_policy, render_space, draw_space),
    ):
        out = arguments.results / name
        runs = fill(out / "cells.json.gz", cells(), partial(measured, traces))
        (out / "table.md").write_text(render(runs))
        (out / "plots").mkdir(exist_ok=True)
        draw(runs, folder=out / "plots")


if __name__ == "__main__":
    main()
