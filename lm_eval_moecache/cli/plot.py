"""Draw accuracy against speed, misses and memory, and capacity curves, from a folder of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.parsers import print_result
from lm_eval_moecache.records.schemas.inputs import Figure
from lm_eval_moecache.report.columns import selected
from lm_eval_moecache.report.plots import write_figures, write_plots
from lm_eval_moecache.report.results import Run, load_runs
from lm_eval_moecache.sweep.spec import read_sweep


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "dir", help="a folder with results JSONs below it; the `figures` of its sweep.yaml, if any"
    )
    parser.add_argument("--output", type=str | None, help="default: DIR/plots")
    parser.add_argument("--task", type=str | None, help="TASK or TASK:METRIC; default: mean")
    parser.add_argument(
        "--group", type=str | None, help="the setting that gives a run its colour; default: policy"
    )
    parser.add_argument(
        "--where", type=str | None, help="only runs with these settings: capacity=5%%,policy=specmd"
    )


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    target = Path(arguments.output) if arguments.output else folder / "plots"
    runs = _chosen(load_runs(folder), arguments.where)
    own = figures_of(folder)
    # A sweep that names its figures is told by those, unless another picture is asked for.
    if own and arguments.task is None:
        if arguments.group is not None:
            raise ValueError(
                f"--group={arguments.group!r} has no effect on the `figures` of "
                f"{folder / 'sweep.yaml'}, which have a `group` of their own. With --task the "
                "usual plots are drawn instead."
            )
        written = write_figures(runs, own, target)
    else:
        written = write_plots(runs, target, task=arguments.task, group=arguments.group)
    files = [str(path) for path in written]
    return print_result(arguments.json, {"files": files}, "".join(f"{path}\n" for path in files))


def _chosen(runs: Sequence[Run], where: str | None) -> list[Run]:
    wanted = dict(item.split("=", 1) for item in (where or "").split(",") if "=" in item)
    found = [run for run in runs if selected(run, wanted)]
    if not found or (where and not wanted):
        raise ValueError(f"--where={where!r}: no run has these settings. Form: SETTING=VALUE,...")
    return found


def figures_of(folder: Path) -> list[Figure]:
    path = folder / "sweep.yaml"
    return read_sweep(path).figures if path.is_file() else []
