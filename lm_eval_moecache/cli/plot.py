"""Draw accuracy against speed, misses and memory, and capacity curves, from a folder of results."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.report.plots import write_figures, write_plots
from lm_eval_moecache.report.runs.columns import chosen_runs
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.sweep.spec import sweep_fields


def add_arguments(parser: ArgumentParser) -> None:
    text = "a folder with results JSONs below it; the `figures` of its sweep.yaml, if any"
    parser.add_argument("dir", help=text)
    parser.add_argument("--output", type=str | None, help="default: DIR/plots")
    parser.add_argument("--task", type=str | None, help="TASK or TASK:METRIC; default: mean")
    text = "the setting that gives a run its colour; default: policy"
    parser.add_argument("--group", type=str | None, help=text)
    text = "only runs with these settings: capacity=5%%,policy=specmd"
    parser.add_argument("--where", type=str | None, help=text)


def run(arguments: Namespace) -> int:
    folder, path = Path(arguments.dir), Path(arguments.dir) / "sweep.yaml"
    target = Path(arguments.output) if arguments.output else folder / "plots"
    runs = chosen_runs(load_runs(folder), "where", arguments.where)
    figures = sweep_fields(path).figures if path.is_file() else []
    # A sweep that names its figures gets those, unless `--task` asks for the usual plots.
    if figures and arguments.task is None:
        if arguments.group is not None:
            raise ValueError(
                f"--group={arguments.group!r} has no effect on the `figures` of {path}, which have "
                "a `group` of their own. With --task the usual plots are drawn instead."
            )
        written = write_figures(runs, figures, target)
    else:
        written = write_plots(runs, target, task=arguments.task, group=arguments.group)
    files = [str(file) for file in written]
    return print_result(arguments.json, {"files": files}, "".join(f"{file}\n" for file in files))
