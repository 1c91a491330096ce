"""What `moecache plot` draws."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.report.plots import write_figures, write_plots
from lm_eval_moecache.report.runs.answers import GOODPUT, read_slo
from lm_eval_moecache.report.runs.columns import chosen_runs
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.sweep.spec import sweep_fields


def plot(
    dir: str,
    *,
    output: str | None = None,
    task: str | None = None,
    group: str | None = None,
    where: str | None = None,
    slo: str | None = None,
) -> Report:
    """Draw accuracy against speed, misses and memory, and capacity curves, of a folder of results.

    Args:
        dir: a folder with results JSONs below it; the `figures` of its sweep.yaml, if any
        output: folder of the pictures; default: DIR/plots
        task: TASK or TASK:METRIC; default: mean
        group: the setting that gives a run its colour; default: policy
        where: only runs with these settings: capacity=5%,policy=specmd
        slo: draws goodput, too, the share of requests within limits: ttft=2s,itl=50ms,e2el=20s;
            of a sweep that names figures without it, the usual plots instead
    """
    folder, path = Path(dir), Path(dir) / "sweep.yaml"
    target = Path(output) if output else folder / "plots"
    runs = chosen_runs(load_runs(folder, read_slo(slo)), "where", where)
    figures = sweep_fields(path).figures if path.is_file() else []
    drawn = {name for figure in figures for panel in figure.panels for name in (panel.x, panel.y)}
    # A sweep that names its figures gets those, unless `--task` asks for the usual plots, or
    # `--slo` for goodput, which is in none of them.
    if figures and task is None and (slo is None or GOODPUT in drawn):
        if group is not None:
            raise ValueError(
                f"--group={group!r} has no effect on the `figures` of {path}, which have "
                "a `group` of their own. With --task the usual plots are drawn instead."
            )
        written = write_figures(runs, figures, target)
    else:
        written = write_plots(runs, target, task=task, group=group)
    files = [str(file) for file in written]
    return Report({"files": files}, "\n".join(files))
