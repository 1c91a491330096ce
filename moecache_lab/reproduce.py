"""What `moecache reproduce` remakes and prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache import api
from lm_eval_moecache.harness.evaluation_options import check_limit
from lm_eval_moecache.records.command import Report, listed, wrapped
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.tables.text import line
from lm_eval_moecache.sweep.pool import read_jobs
from moecache_lab.recipes import Recipe, ReproducedValue, fitted, load_recipe, recipe_names

SAID = "paper.md"
SEE = "see the table and the picture"


def reproduce(
    figure: str | None = None,
    *,
    pretrained: str = "tiny",
    limit: int | float | None = None,
    out: str | None = None,
    jobs: int = 1,
    live: bool = False,
    dry_run: bool = False,
) -> Report:
    """Remake a paper's table or figure by one command, with the paper's own numbers and ours.

    Args:
        figure: PAPER/FIGURE; without it, the list of all
        pretrained: tiny, a folder or a hub id
        limit: documents per task
        out: default: reproduced/PAPER/FIGURE
        jobs: parallel processes
        live: run the model for every cell
        dry_run: write the recipe and estimate only
    """
    if figure is None:
        return _all_figures()
    read_jobs(jobs)
    check_limit(limit, "reproduce")
    recipe = fitted(figure, pretrained, limit)
    folder = Path(out or Path("reproduced") / figure)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.analyze:
        analysis, options = recipe.analyze.analysis, recipe.analyze.options
        printed = [str(api.analyze(analysis, **options, out=str(folder)))]
    else:
        path = folder / "sweep.yaml"
        write_whole(path, yaml.safe_dump(recipe.sweep, sort_keys=False, allow_unicode=True))
        done: Report = api.sweep(str(path), jobs=jobs, live=live, dry_run=dry_run)
        if done.code or dry_run:
            return done
        printed = [str(done), str(api.table(str(folder), write=True)), str(api.plot(str(folder)))]
    runs = load_runs(folder) if recipe.sweep else []
    text = paper_page(figure, recipe, runs)
    write_whole(folder / SAID, text)
    return Report(
        {"figure": figure, "folder": str(folder)},
        "\n".join([*printed, text, f"written: {folder}"]),
    )


def _all_figures() -> Report:
    recipes = {name: load_recipe(name) for name in recipe_names()}
    shown = {"where", "title", "claims"}
    rows = [{"name": name, **recipe.model_dump(include=shown)} for name, recipe in recipes.items()]
    lead = max(map(len, recipes)) + 4
    lines = listed([(name, recipe.title) for name, recipe in recipes.items()], lead)
    note = f"{len(recipes)} tables and figures. `moecache reproduce NAME` remakes one on the "
    lines += ["", *wrapped(f"{note}shipped model, `--pretrained MODEL` on another.")]
    return Report({"figures": rows}, "\n".join(lines))


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
