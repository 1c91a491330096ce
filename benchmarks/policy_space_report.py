"""Tables and pictures of results/policy_space and results/miss_answers from their cells.

Usage: python benchmarks/policy_space_report.py [--results results]
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.report.mpl_style import look, new_figure, save

Run = dict[str, Any]
CAPACITIES = ("5%", "10%", "25%", "50%")
BASE = "on_demand"
PLACED = ", placed"
LOSSLESS = ("fetch", "host, always", "host, first", "host, balanced")
HOST_GB = 100
"""Where all answers are drawn over the link."""


def load(file: Path) -> list[Run]:
    found: list[Run] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def devices(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["cell"]["hardware"], r["cell"]["emulate"]) for r in runs))


def at(runs: Sequence[Run]) -> dict[tuple[str, str, str], Run]:
    return {(c["hardware"], c["policy"], c["capacity"]): r for r in runs for c in [r["cell"]]}


def gains(runs: Sequence[Run], hardware: str, policy: str) -> list[float | None]:
    """Return the speed over `on_demand`'s at each capacity; None where the policy is refused."""
    found, own = at(runs), []
    for capacity in CAPACITIES:
        run = found[hardware, policy, capacity]
        base = found[hardware, BASE, capacity]["tok_per_s"]
        own.append(None if "refused" in run else run["tok_per_s"] / base)
    return own


def ranked(runs: Sequence[Run]) -> list[str]:
    """Return the policies, the best mean gain first; those refused everywhere come last."""
    names = list(dict.fromkeys(r["cell"]["policy"] for r in runs))

    def rank(name: str) -> float:
        known = [g for hardware, _ in devices(runs) for g in gains(runs, hardware, name) if g]
        return -sum(map(math.log, known)) / len(known) if known else math.inf

    return sorted(names, key=lambda name: (rank(name), name))


def render_space(runs: Sequence[Run]) -> str:
    parts, found = [], at(runs)
    for hardware, model in devices(runs):
        writer = MarkdownTableWriter()
        writer.headers = [
            *("Policy", *(f"{c} tok/s" for c in CAPACITIES), *(f"{c} miss" for c in CAPACITIES)),
            *("Router's own at 25%", "Left out at 25%"),
        ]
        writer.value_matrix = []
        for policy in ranked(runs):
            own = [found[hardware, policy, capacity] for capacity in CAPACITIES]
            if "refused" in own[0]:
                writer.value_matrix.append([policy, own[0]["refused"], *[""] * 9])
                continue
            changes = gains(runs, hardware, policy)
            speeds = [
                f"{r['tok_per_s']:.1f} (x{change:.2f})"
                for r, change in zip(own, changes, strict=True)
            ]
            misses = [f"{100 * r['miss_rate']:.0f}%" for r in own]
            lossy = [own[2]["routing_fidelity"], own[2]["dropped_share"]]
            shares = [f"{100 * s:.0f}%" for s in lossy] if own[2]["open_loop"] else ["", ""]
            writer.value_matrix.append([policy, *speeds, *misses, *shares])
        cycles = ", ".join(f"{c} = {found[hardware, BASE, c]['cycles']:.2f}" for c in CAPACITIES)
        parts.append(f"## {hardware}, {model}\n\nCycles: {cycles}.\n\n{writer.dumps()}")
    return "\n".join(parts)


def draw_space(runs: Sequence[Run], folder: Path) -> None:
    """One map a device: speed over on_demand's, by policy and capacity."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = [p for p in ranked(runs) if any(g for h, _ in devices(runs) for g in gains(runs, h, p))]
    lossy = {r["cell"]["policy"] for r in runs if r.get("open_loop")}
    labels = [f"{policy} *" if policy in lossy else policy for policy in shown]
    figure, panels = new_figure(1, len(devices(runs)))
    figure.set_size_inches(4 + 3.2 * len(panels), 1.2 + 0.24 * len(shown))
    for place, ((hardware, model), axes) in enumerate(zip(devices(runs), panels, strict=True)):
        rows = [gains(runs, hardware, policy) for policy in shown]
        values = [[math.nan if g is None else math.log2(g) for g in row] for row in rows]
        image = axes.imshow(values, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        axes.set_title(f"{hardware}\n{model}")
        axes.set_xticks(range(len(CAPACITIES)), CAPACITIES)
        axes.set_yticks(range(len(shown)), labels if not place else [""] * len(shown))
        axes.grid(False)
        for y, row in enumerate(rows):
            for x, gain in enumerate(row):
                text = "-" if gain is None else f"{gain:.2f}"
                dark = gain is not None and abs(math.log2(gain)) > 1.2
                axes.text(
                    x, y, text, ha="center", va="center", fontsize=7, color="w" if dark else "k"
                )
    bar = figure.colorbar(image, ax=panels, ticks=[-2, -1, 0, 1, 2], shrink=0.5)
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label(f"tok/s over {BASE}")
    save(figure, folder / "speed.svg")


def answers_at(runs: Sequence[Run]) -> dict[tuple[str, float, float], float]:
    """Return (answer, link, host) -> tok/s; what uses no host is the same for each."""
    hosts = sorted({r["cell"]["host_gb"] for r in runs})
    found: dict[tuple[str, float, float], float] = {}
    for run in runs:
        cell = run["cell"]
        own = [cell["host_gb"]] if cell["answer"].startswith("host") else hosts
        found |= {(cell["answer"], cell["link_gb"], host): run["tok_per_s"] for host in own}
    return found


def winners(runs: Sequence[Run], suffix: str = "") -> dict[tuple[float, float], tuple[str, float]]:
    """Return (link, host) -> the fastest lossless answer and its gain over fetching."""
    speed = answers_at(runs)
    found = {}
    for link, host in sorted({key[1:] for key in speed}):
        own = {a: speed[a if a == "fetch" else a + suffix, link, host] for a in LOSSLESS}
        best = max(own, key=lambda answer: (own[answer], answer == "fetch"))
        found[link, host] = best, own[best] / own["fetch"]
    return found


def render_answers(runs: Sequence[Run]) -> str:
    parts = []
    for title, suffix in (("From an empty cache", ""), ("With the most used placed", PLACED)):
        best = winners(runs, suffix)
        links, hosts = (sorted({key[i] for key in best}) for i in (0, 1))
        writer = MarkdownTableWriter()
        writer.headers = ["Host \\ link GB/s", *(f"{link:g}" for link in links)]
        writer.value_matrix = [
            [f"{host:g}", *(f"{best[k, host][0]} (x{best[k, host][1]:.2f})" for k in links)]
            for host in hosts
        ]
        parts.append(f"## Fastest lossless answer, gain over fetch: {title}\n\n{writer.dumps()}")
    speed = answers_at(runs)
    links = sorted({key[1] for key in speed})
    writer = MarkdownTableWriter()
    writer.headers = [f"tok/s (host {HOST_GB} GB/s)", *(f"{link:g} GB/s" for link in links)]
    writer.value_matrix = [
        [answer, *(f"{speed[answer, link, HOST_GB]:.1f}" for link in links)]
        for answer in dict.fromkeys(key[0] for key in speed)
    ]
    parts.append(f"## All answers\n\n{writer.dumps()}")
    return "\n".join(parts)


def draw_answers(runs: Sequence[Run], scores: dict[str, str], folder: Path) -> None:
    """The one picture: who wins over link and host, and every answer with what it costs."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, panels = new_figure(1, 3)
    figure.set_size_inches(17, 5)
    for axes, title, suffix in zip(
        panels, ("from an empty cache", "most used experts placed"), ("", PLACED), strict=False
    ):
        draw_map(axes, winners(runs, suffix))
        axes.set_title(f"fastest at equal outputs, {title}")
    speed, axes = answers_at(runs), panels[2]
    links = sorted({key[1] for key in speed})
    for place, answer in enumerate(a for a in dict.fromkeys(k[0] for k in speed)):
        ys = [speed[answer, link, HOST_GB] for link in links]
        dashed = "--" if answer.endswith(PLACED) else "-" if answer in LOSSLESS else ":"
        told = scores.get(answer, "")
        axes.plot(links, ys, dashed, label=f"{answer}{told}", **look(place))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("link [GB/s]")
    axes.set_ylabel(f"tok/s, host {HOST_GB} GB/s")
    axes.set_title("every answer; dotted: lossy, with what it costs")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, folder / "answers.svg")


def draw_map(axes: Any, best: dict[tuple[float, float], tuple[str, float]]) -> None:
    links, hosts = (sorted({key[i] for key in best}) for i in (0, 1))
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


def costs(file: Path) -> dict[str, str]:
    """Return what each lossy answer costs in perplexity, from the runs of accuracy/."""
    if not file.is_file():
        return {}
    words: dict[str, float] = {}
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        run = json.loads(line)
        miss = run["config"]["moecache"]["policy"]["miss"]
        name = f"drop, {miss['h']} kept" if "h" in miss else str(miss["name"])
        if run["config"]["moecache"]["model"]["precision"] == ["int4"]:
            name = "int4"
        words[name] = run["results"]["tiny_wikitext"]["word_perplexity,none"]
    return {
        name: f" (perplexity {100 * (value / words['fetch'] - 1):+.1f}%)"
        for name, value in words.items()
        if name != "fetch"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    results = parser.parse_args().results
    space = results / "policy_space"
    runs = load(space / "cells.json.gz")
    (space / "table.md").write_text(render_space(runs))
    draw_space(runs, space / "plots")
    answers = results / "miss_answers"
    runs = load(answers / "cells.json.gz")
    (answers / "table.md").write_text(render_answers(runs))
    draw_answers(runs, costs(answers / "accuracy" / "runs.jsonl.gz"), answers / "plots")


if __name__ == "__main__":
    main()
