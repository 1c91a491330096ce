"""The capacity sweep as a picture: miss rate against capacity, with the bound's line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.mpl_style import new_figure, plain, save
from lm_eval_moecache.report.replay_sweep import FEWEST, LRU, Row

_SUFFIXES = (".svg", ".png", ".pdf")


def plot_miss_rates(rows: Sequence[Row], file: str) -> None:
    """Write one line per trace for the policy, and one for each bound."""
    path = Path(file)
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"plot={file!r}: the suffix {path.suffix!r} is not known. Allowed: "
            f"{', '.join(_SUFFIXES)}."
        )
    figure, (axes,) = new_figure()
    drawn: set[str] = set()
    for trace, named, machine in dict.fromkeys(map(_series, rows)):
        own = [row for row in rows if _series(row) == (trace, named, machine)]
        own.sort(key=lambda row: row.capacity.total_bytes)
        # Where a trace says no sizes, a byte stands for one expert.
        unit = MEGABYTE if own[0].has_sizes else 1
        sizes = [row.capacity.total_bytes / unit for row in own]
        name = Path(trace).name
        policy = own[0].policy
        label = f"{name}: {named} ({policy.eviction.name})"
        label += f", {machine}" if len({_series(row)[2] for row in rows}) > 1 else ""
        axes.plot(sizes, [row.metrics["miss_rate"] for row in own], marker="o", label=plain(label))
        for bound, style in ((LRU, ":"), (FEWEST, "--")):
            if (
                trace not in drawn
                and own[0].bounds
                and not (bound == LRU and policy.eviction.name == LRU)
            ):
                rates = [row.bounds[""][bound] for row in own]
                label = f"{name}: {bound}, on demand"
                axes.plot(sizes, rates, style, color="black", label=plain(label))
        drawn.add(trace)
    axes.set_xlabel("capacity of the cache [MB]" if rows[0].has_sizes else "capacity [experts]")
    axes.set_ylabel("miss rate [of requests]")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    save(figure, path)


def _series(row: Row) -> tuple[str, str, str]:
    link = f"{row.hardware.link_bytes_per_s / 1e9:g} GB/s"
    return row.trace, row.policy.name, f"{row.hardware.name} at {link}"
