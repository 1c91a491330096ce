"""Fit the constants of runtimes' mechanisms to published speeds, one machine left out at a time.

Writes the constants, and for each mechanism how far forecasts were from machines that played no
part in their fit (`mechanisms.yaml`); with --report also a table and a plot.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import Told
from lm_eval_moecache.records.files import traces_dir, write_whole
from lm_eval_moecache.records.runtimes import MECHANISMS_FILE
from lm_eval_moecache.report.plots import plot_speeds
from moecache_lab.fit_runtimes import as_yaml, begin_at, fit_all
from moecache_plan.published import read_rows
from moecache_plan.validate import speeds_text


def add_arguments(parser: ArgumentParser) -> None:
    text = "published speeds, as of `moecache validate --speeds`"
    parser.add_argument("--from", type=str, required=True, metavar="CSV", help=text)
    text = "file of the constants (default: the package's own)"
    parser.add_argument("--out", type=str, default=str(MECHANISMS_FILE), help=text)
    text = "folder for the table and the plot, each machine left out of its own fit"
    parser.add_argument("--report", type=str | None, help=text)


def run(arguments: Namespace) -> Told:
    begin = begin_at(traces_dir().glob("*.parquet"))
    rows, left_out = read_rows(Path(getattr(arguments, "from")), begin)
    known, result = fit_all(rows, begin)
    result = {**result, "left_out": left_out}
    write_whole(Path(arguments.out), as_yaml(known, result["hit_rates"]))
    if arguments.report:
        # Every row as forecast without its machine.
        folder = Path(arguments.report)
        write_whole(folder / "table.md", speeds_text(result))
        plot_speeds(result["rows"], folder / "plots" / "predicted.svg")
    text = speeds_text(result) + "\n" + as_yaml(known, result["hit_rates"]) + "\n"
    return {**result, "constants": dict(known.constants)}, text
