"""Remake a paper's table or figure by one command, with the paper's own numbers and ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import listed, print_result, wrapped
from lm_eval_moecache.cli.main import main as moecache
from lm_eval_moecache.harness.evaluation_options import check_limit
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.tables.text import line
from lm_eval_moecache.sweep.pool import read_jobs
from moecache_lab.recipes import Recipe, ReproducedValue, fitted, load_recipe, recipe_names

SAID = "paper.md"
SEE = "see the table and the picture"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "figure", nargs="?", type=str | None, help="PAPER/FIGURE; without it, the list of all"
    )
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--limit", type=int | float | None, help="documents per task")
    parser.add_argument("--out", type=str | None, help="default: reproduced/PAPER/FIGURE")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    parser.add_argument("--live", action="store_true", help="run the model for every cell")
    parser.add_argument("--dry-run", action="store_true", help="write the recipe and estimate only")


def run(arguments: Namespace) -> int:
    if arguments.figure is None:
        return _list(arguments.json)
    name = arguments.figure
    read_jobs(arguments.jobs)
    check_limit(arguments.limit, "reproduce")
    recipe = fitted(name, arguments.pretrained, arguments.limit)
    folder = Path(arguments.out or Path("reproduced") / name)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.analyze:
        settings = [f"--{key}={value}" for key, value in recipe.analyze.options.items()]
        code = moecache(["analyze", recipe.analyze.analysis, *settings, f"--out={folder}"])
    else:
        path = folder / "sweep.yaml"
        write_whole(path, yaml.safe_dump(recipe.sweep, sort_keys=False, allow_unicode=True))
        options = [f"--jobs={arguments.jobs}", *(["--live"] if arguments.live else [])]
        options += ["--dry-run"] if arguments.dry_run else []
        code = moecache(["sweep", str(path), *options])
        if not code and not arguments.dry_run:
            code = moecache(["table", str(folder), "--write"]) or moecache(["plot", str(folder)])
    if code or arguments.dry_run:
        return code
    runs = load_runs(folder) if recipe.sweep else []
    text = paper_page(name, recipe, runs)
    write_whole(folder / SAID, text)
    sys.stdout.write(text + f"\nwritten: {folder}\n")
    return 0


def _list(as_json: bool) -> int:
    recipes = {name: load_recipe(name) for name in recipe_names()}
    shown = {"where", "title", "claims"}
    rows = [{"name": name, **recipe.model_dump(include=shown)} for name, recipe in recipes.items()]
    lead = max(map(len, recipes)) + 4
    lines = listed([(name, recipe.title) for name, recipe in recipes.items()], lead)
    note = f"{len(recipes)} tables and figures. `moecache reproduce NAME` remakes one on the "
    lines += ["", *wrapped(f"{note}shipped model, `--pretrained MODEL` on another.")]
    return print_result(as_json, {"figures": rows}, "\n".join([*lines, ""]))


def paper_page(name: str, recipe: Recipe, runs: list[Run]) -> str:
    """Return the page of the paper's numbers and ours, and the source of ours."""
    head = [f"# {name}: {recipe.title}", "", f"{recipe.paper}, {recipe.where}."]
    if recipe.claims:
        head.append(f"Claims: {', '.join(recipe.claims)}.")
    if recipe.notes:
        head += ["", recipe.notes.strip()]
    head += ["", "## The paper's numbers and ours", ""]
    rows = [("What", "Paper", "Ours", "Ours is"), ("---",) * 4]
    for entry in recipe.said:
        paper, ours, source = entry.paper, SEE, ""
        if not isinstance(paper, str):
            ends = paper if isinstance(paper, list) else [paper]
            paper = " to ".join(f"{end:g}" for end in ends)
        if entry.ours is not None:
            value, source = our_value(entry.ours, runs), _source(entry.ours)
            ours = "none" if value is None else f"{value:.4g}"
        rows.append((entry.what, paper, ours, source))
    return "\n".join([*head, *map(line, rows), ""])


def _source(reproduced: ReproducedValue) -> str:
    place, other = (
        ", ".join(f"{key}={value}" for key, value in (where or {}).items())
        for where in (reproduced.where, reproduced.versus)
    )
    metric = f"{reproduced.metric} at {place}" if place else reproduced.metric
    is_value = reproduced.form == "value"
    return metric if is_value else f"{reproduced.form} of {metric} against {other}"


def our_value(reproduced: ReproducedValue, runs: Sequence[Run]) -> float | None:
    """Return our figure, or None where a run or its figure is missing.

    Raises ValueError where the settings pick several runs, a fault of the recipe.
    """
    value, *others = (_value(reproduced.metric, where, runs) for where in reproduced.sides)
    if reproduced.form == "value":
        return value
    reference = others[0] if others else value
    if value is None or reference is None:
        return None
    if reproduced.form == "difference":
        return value - reference
    if not reference:
        return None
    return value / reference if reproduced.form == "ratio" else 1 - value / reference


def _value(metric: str, where: Mapping[str, Any], runs: Sequence[Run]) -> float | None:
    matches = [run for run in runs if run.matches(where)]
    if len(matches) > 1:
        names = ", ".join(run.run_id for run in matches[:3])
        raise ValueError(f"said: where={dict(where)!r} picks {len(matches)} runs: {names} ...")
    return matches[0][metric].number if matches else None
