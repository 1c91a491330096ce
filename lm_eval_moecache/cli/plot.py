"""Draw accuracy against speed, misses and memory, and capacity curves, from a folder of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.report.plots import write_plots
from lm_eval_moecache.report.results import load_runs


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dir", help="a folder with results JSONs below it")
    parser.add_argument("--output", type=str | None, help="default: DIR/plots")
    parser.add_argument("--task", type=str | None, help="TASK or TASK:METRIC; default: mean")
    parser.add_argument("--group", default="policy", help="the setting that gives a run its colour")


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    target = Path(arguments.output) if arguments.output else folder / "plots"
    written = write_plots(load_runs(folder), target, task=arguments.task, group=arguments.group)
    if arguments.json:
        sys.stdout.write(json.dumps({"files": [str(path) for path in written]}, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{path}\n" for path in written)
    return 0
