"""Replays every shipped composition, and every answer to a miss, on recorded runs of `tiny`.

Usage: python benchmarks/policy_space.py [--traces DIR]. A few minutes on one core. Writes
`cells.json.gz`, `table.md` and the plot of results/policy_space and results/miss_answers; cells
already there are kept, and runs already recorded in DIR are not recorded again.

Lossy compositions are replayed open loop, on the text that the unmodified model wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from grid import RESULTS, Run, arguments, fill, frame, sections, setting_of
from pandas import DataFrame

from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting, check_host
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.plots import look, new_figure, save
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.sweep.evaluation import evaluate
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.recorder import Detail
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import placement, use_of

TASKS = Cell(
    model="moecache", model_args={}, tasks=("tiny_gsm8k", "tiny_mmlu"), options={"limit": 2}
)
LADDER = "bf16:int8:int4"
DEVICES = {
    "a100-5GBps": "Qwen3-30B-A3B",
    "rtx-4090": "DeepSeek-V2-Lite",
    "phone-12gb": "Qwen1.5-MoE-A2.7B",
}
"""Device -> the model whose sizes `tiny`'s layers take."""
CAPACITIES = ("5%", "10%", "25%", "50%")
FIGURES = (
    *("tok_per_s", "hit_rate", "miss_rate", "decode_miss_rate", "collision_miss_rate"),
    *("stall_ms_per_token", "bytes_per_token", "link_utilization", "routing_fidelity"),
    *("dropped_share", "substituted_share", "low_precision_share", "host_share"),
)
BASE = "on_demand"
PLACED = ", placed"
"""Suffix of answers that start with the most used experts resident; host compute loads none."""
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
"""A host's FLOP per byte of memory bandwidth; the shipped profiles' processors have 10 to 23."""
HOST_GB = 100
"""Host memory bandwidth at which all answers are plotted over the link."""


def record(folder: Path) -> dict[str, Trace]:
    """Run the tasks unless they are recorded already, and load all that replays read."""
    shadows = {
        str(choice.as_dict()): (choice, 0, "never")
        for choice in (load_policy(name).prefetch for name in policy_names())
        if (rule := choice.algorithm).is_active and not (rule.needs_draft or rule.is_offline)
    }
    recordings: tuple[tuple[str, dict[str, str], Detail], ...] = (
        ("plain", {"policy": BASE}, Detail(shadows=tuple(shadows.values()))),
        ("predictor", {"policy": "commitmoe_prefetch"}, Detail()),
        ("ladder", {"policy": BASE, "precision": LADDER}, Detail()),
    )
    traces = {}
    for name, model_args, detail in recordings:
        out = folder / name
        if not any(out.glob("*.parquet")):
            out.mkdir(parents=True, exist_ok=True)
            lm = MoECacheLM(pretrained="tiny", capacity="50%", **model_args)
            lm.install(lm.moecache.with_changes(trace=str(out), detail=detail))
            evaluate(TASKS, lm)
        [path] = out.glob("*.parquet")
        traces[name] = load_trace(str(path), logits=True, predicted=True)
    return traces


def space() -> Iterator[tuple[Run, None]]:
    for policy, device, capacity in product(policy_names(), DEVICES.items(), CAPACITIES):
        cell = {"policy": policy, "hardware": device[0], "emulate": device[1]}
        yield {**cell, "capacity": capacity}, None


def answers() -> Iterator[tuple[Run, None]]:
    for answer, link, host in product(ANSWERS, LINKS_GB, HOSTS_GB):
        if answer.startswith("host") or host == HOSTS_GB[0]:
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
    return measure(trace, setting_of(trace.geometry, **cell))


def measure_answer(traces: Mapping[str, Trace], cell: Run, _: None) -> Run:
    """Measure one answer under LRU without prefetch, so that all answers face the same misses."""
    trace, answer = traces["ladder"], ANSWERS[cell["answer"]]
    setting = setting_of(trace.geometry, "25%", answer, policy=BASE, emulate="Qwen3-30B-A3B")
    machine = replace(
        setting.hardware,
        link_bytes_per_s=cell["link_gb"] * 1e9,
        host_memory_bytes_per_s=cell["host_gb"] * 1e9,
        host_flops=HOST_FLOP_PER_BYTE * cell["host_gb"] * 1e9,
    )
    warm = use_of(trace) if cell["answer"].endswith(PLACED) else None
    warm = placement(setting.policy, warm, trace.geometry)
    return measure(trace, replace(setting, hardware=machine, warm=warm))


def measure(trace: Trace, setting: Setting) -> Run:
    engine = replay(trace, setting, cache_reset="never")
    engine.check_integrity()
    metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
    geometry = setting.emulate.emulated_by(trace.geometry)
    return {
        "open_loop": not setting.policy.is_lossless,
        "ttft_ms": metrics["ttft_ms"]["mean"],
        "tpot_ms": metrics["tpot_ms"]["mean"],
        "cycles": regime_of(geometry, setting.capacity.total_bytes, setting.hardware).cycles,
        **{name: metrics[name] for name in FIGURES if name in metrics},
    }


def gains_of(runs: Sequence[Run]) -> DataFrame:
    """Return speeds relative to `on_demand`: policies, best first, by device and capacity."""
    speeds = frame(runs).pivot(index="policy", columns=["hardware", "capacity"], values="tok_per_s")
    gains = speeds / speeds.loc[BASE]
    means = np.log(gains).mean(axis=1).fillna(-math.inf)
    return gains.loc[sorted(gains.index, key=lambda name: (-means[name], name))]


def render_space(runs: Sequence[Run]) -> str:
    gains, cells, parts = gains_of(runs), frame(runs), {}
    headers = [
        *("Policy", *(f"{c} tok/s" for c in CAPACITIES), *(f"{c} miss" for c in CAPACITIES)),
        *("Router's own at 25%", "Left out at 25%"),
    ]
    for (hardware, model), group in cells.groupby(["hardware", "emulate"], sort=False):
        rows = []
        for policy in gains.index:
            curve = group[group.policy == policy].set_index("capacity").loc[list(CAPACITIES)]
            if curve.tok_per_s.isna().all():
                rows.append([policy, curve.refused.iloc[0], *[""] * 9])
                continue
            ratios = gains.loc[policy, hardware][curve.index]
            speeds = [
                f"{x:.1f} (x{gain:.2f})" for x, gain in zip(curve.tok_per_s, ratios, strict=True)
            ]
            misses, quarter = [f"{100 * rate:.0f}%" for rate in curve.miss_rate], curve.loc["25%"]
            lossy = [f"{100 * quarter[key]:.0f}%" for key in ("routing_fidelity", "dropped_share")]
            rows.append([policy, *speeds, *misses, *(lossy if quarter.open_loop else ["", ""])])
        base = group[group.policy == BASE]
        sizes = zip(base.capacity, base.cycles, strict=True)
        cycles = ", ".join(f"{capacity} = {count:.2f}" for capacity, count in sizes)
        parts[f"{hardware}, {model}"] = f"Cycles: {cycles}.\n\n{padded(headers, rows)}"
    return sections(parts)


def draw_space(runs: Sequence[Run], folder: Path) -> None:
    """One map per device: speed relative to on_demand, by policy and capacity."""
    gains = gains_of(runs).dropna(how="all")
    lossy = {run["cell"]["policy"] for run in runs if run.get("open_loop")}
    labels = [f"{policy} *" if policy in lossy else policy for policy in gains.index]
    figure, panels = new_figure(1, len(DEVICES))
    figure.set_size_inches(4 + 3.2 * len(panels), 1.2 + 0.24 * len(gains))
    for place, ((hardware, model), axes) in enumerate(zip(DEVICES.items(), panels, strict=True)):
        values = gains[hardware][list(CAPACITIES)].to_numpy()
        image = axes.imshow(np.log2(values), cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        axes.set_title(f"{hardware}\n{model}")
        row_labels = labels if not place else [""] * len(gains)
        texts = np.vectorize(lambda gain: "-" if np.isnan(gain) else f"{gain:.2f}")(values)
        write_cells(axes, texts, CAPACITIES, row_labels, abs(np.log2(values)) > 1.2)
    bar = figure.colorbar(image, ax=panels, ticks=[-2, -1, 0, 1, 2], shrink=0.5)
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label(f"tok/s over {BASE}")
    save(figure, folder / "speed.svg")


def write_cells(axes: Any, texts: Any, columns: Any, rows: Any, is_dark: Any = None) -> None:
    """Label the rows and columns of an image and write a text into each cell, white on dark."""
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(False)
    for place, text in np.ndenumerate(texts):
        color = "w" if is_dark is not None and is_dark[place] else "k"
        axes.text(*place[::-1], text, ha="center", va="center", fontsize=7, color=color)


def speeds_of(runs: Sequence[Run]) -> DataFrame:
    """Return tok/s by link and host, a column per answer; equal over hosts if none computes."""
    cells = frame(runs)
    speeds = cells.pivot(index=["link_gb", "host_gb"], columns="answer", values="tok_per_s")
    return speeds[cells.answer.unique()].groupby(level="link_gb").ffill()


def winners(runs: Sequence[Run], suffix: str = "") -> tuple[DataFrame, DataFrame]:
    """Return the fastest lossless answers and their gains over fetching, by host and link."""
    speeds = speeds_of(runs)[[LOSSLESS[0], *(name + suffix for name in LOSSLESS[1:])]]
    best = speeds.idxmax(axis=1).str.removesuffix(suffix)
    return best.unstack("link_gb"), (speeds.max(axis=1) / speeds["fetch"]).unstack("link_gb")


def render_answers(runs: Sequence[Run]) -> str:
    parts = {}
    for title, suffix in (("From an empty cache", ""), ("With the most used placed", PLACED)):
        names, gains = winners(runs, suffix)
        rows = [
            [f"{host:g}", *(f"{name} (x{gains.loc[host, link]:.2f})" for link, name in row.items())]
            for host, row in names.iterrows()
        ]
        headers = ["Host \\ link GB/s", *(f"{link:g}" for link in names)]
        parts[f"Fastest lossless answer, gain over fetch: {title}"] = padded(headers, rows)
    speeds = speeds_of(runs).xs(HOST_GB, level="host_gb")
    headers = [f"tok/s (host {HOST_GB} GB/s)", *(f"{link:g} GB/s" for link in speeds.index)]
    rows = [[answer, *(f"{speed:.1f}" for speed in row)] for answer, row in speeds.items()]
    return sections(parts | {"All answers": padded(headers, rows)})


def draw_answers(runs: Sequence[Run], costs: Mapping[str, str], folder: Path) -> None:
    """Plot the winners over link and host, and every answer's speed with its cost in perplexity."""
    figure, panels = new_figure(3, 1)
    figure.set_size_inches(9, 13)
    titles = {"": "from an empty cache", PLACED: "most used experts placed"}
    for axes, (suffix, title) in zip(panels, titles.items(), strict=False):
        names, gains = winners(runs, suffix)
        places = names.map(LOSSLESS.index)
        axes.imshow(places, cmap="Pastel1", vmin=0, vmax=8, aspect="auto", origin="lower")
        texts = names.map(lambda name: name.removeprefix("host, ")) + gains.map("\nx{:.3g}".format)
        links, hosts = ([f"{rate:g}" for rate in values] for values in (names.columns, names.index))
        write_cells(axes, texts, links, hosts)
        axes.set(xlabel="link [GB/s]", ylabel="host memory [GB/s]")
        axes.set_title(f"fastest at equal outputs, {title}: times the speed of fetching")
    axes = panels[2]
    speeds = speeds_of(runs).xs(HOST_GB, level="host_gb")
    for place, (answer, curve) in enumerate(speeds.items()):
        dashes = "--" if answer.endswith(PLACED) else "-" if answer in LOSSLESS else ":"
        axes.plot(
            curve.index, curve, dashes, label=f"{answer}{costs.get(answer, '')}", **look(place)
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="link [GB/s]", ylabel=f"tok/s, host {HOST_GB} GB/s")
    axes.set_title("every answer; dotted: lossy, with what it costs")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, folder / "answers.svg")


def perplexity_costs(folder: Path) -> dict[str, str]:
    """Return the perplexity cost of each lossy answer, from the runs of accuracy/."""
    words: dict[str, float] = {}
    for run in load_runs(folder):
        miss = run.moecache["policy"]["miss"]
        name = f"drop, {miss['h']} kept" if "h" in miss else str(miss["name"])
        if run.moecache["model"]["precision"] == ["int4"]:
            name = "int4"
        words[name] = run.results["tiny_wikitext"]["word_perplexity,none"]
    plain = words.pop("fetch")
    return {
        name: f" (perplexity by word {100 * (v / plain - 1):+.1f}%)" for name, v in words.items()
    }


def main() -> None:
    options = arguments(__doc__, results=RESULTS, traces=Path("policy_space_traces"))
    traces = record(options.traces)
    accuracy = RESULTS / "miss_answers" / "accuracy"
    draw_costs: Callable[..., None] = partial(draw_answers, costs=perplexity_costs(accuracy))
    for name, cells, measured, render, draw in (
        ("miss_answers", answers, measure_answer, render_answers, draw_costs),
        ("policy_space", space, measure_policy, render_space, draw_space),
    ):
        out = options.results / name
        runs = fill(out / "cells.json.gz", cells(), partial(measured, traces))
        (out / "table.md").write_text(render(runs))
        draw(runs, folder=out / "plots")


if __name__ == "__main__":
    main()
