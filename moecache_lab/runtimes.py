"""The action `moecache profile runtimes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import traces_dir, write_whole
from lm_eval_moecache.records.runtimes import MECHANISMS_FILE
from lm_eval_moecache.report.plots import look, new_figure, save
from moecache_lab.fit_runtimes import as_yaml, begin_at, fit_all
from moecache_plan.published import read_rows
from moecache_plan.validate import speeds_text


def profile_runtimes(
    *, from_: str, out: str = str(MECHANISMS_FILE), report: str | None = None
) -> Report:
    """Fit the constants of runtimes' mechanisms to published speeds, each machine left out once.

    Writes the constants, and for each mechanism how far forecasts were from machines that played no
    part in their fit (`mechanisms.yaml`); with --report also a table and a plot.

    Args:
        from_: published speeds, as of `moecache validate --speeds`: a CSV
        out: file of the constants (default: the package's own)
        report: folder for the table and the plot, each machine left out of its own fit
    """
    begin = begin_at(traces_dir().glob("*.parquet"))
    rows, left_out = read_rows(Path(from_), begin)
    known, result = fit_all(rows, begin)
    result = {**result, "left_out": left_out}
    write_whole(Path(out), as_yaml(known, result["hit_rates"]))
    if report:
        # Every row as forecast without its machine.
        folder = Path(report)
        write_whole(folder / "table.md", speeds_text(result))
        _plot(result["rows"], folder / "plots" / "predicted.svg")
    text = speeds_text(result) + "\n" + as_yaml(known, result["hit_rates"]) + "\n"
    return Report({**result, "constants": dict(known.constants)}, text)


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot predicted against measured decode speeds, a colour a mechanism."""
    figure, (axes,) = new_figure()
    told = pd.DataFrame([row for row in rows if row["measured_tok_s"]])
    speeds = [1.0, *told["measured_tok_s"]]
    ends = [min(speeds) / 1.5, max(speeds) * 1.5]
    axes.fill_between(
        ends, [e / 1.5 for e in ends], [e * 1.5 for e in ends], alpha=0.12, label="within 1.5 times"
    )
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for index, (name, points) in enumerate(told.groupby("mechanism", sort=False)):
        sides = points["measured_tok_s"], points["predicted_tok_s"]
        axes.plot(*sides, **{**look(index), "linestyle": "none"}, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, tok/s", ylabel="predicted, tok/s")
    axes.legend()
    save(figure, path)
