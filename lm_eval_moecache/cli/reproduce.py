"""Remake a paper's table or figure by one command, with the paper's own numbers beside ours."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import main as moecache
from lm_eval_moecache.cli.parsers import print_result
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.schemas.inputs import Recipe, check_limit, read_jobs
from lm_eval_moecache.report.paper_comparison import comparison_table
from lm_eval_moecache.report.render import as_markdown
from lm_eval_moecache.report.results import RUNS, Run, load_runs
from lm_eval_moecache.sweep.recipes import fit, load_recipe, recipe_names

SAID = "paper.md"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "figure", nargs="?", type=str | None, help="PAPER/FIGURE; without it, the list of all"
    )
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--limit", type=int | float | None, help="documents a task")
    parser.add_argument("--out", type=str | None, help="default: reproduced/PAPER/FIGURE")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--live", action="store_true", help="run the model for every cell")
    parser.add_argument("--dry-run", action="store_true", help="write the recipe and estimate only")


def run(arguments: Namespace) -> int:
    if arguments.figure is None:
        return _list(arguments.json)
    found = load_recipe(arguments.figure)
    read_jobs(arguments.jobs)
    check_limit(arguments.limit, "reproduce")
    recipe = fit(found, arguments.pretrained, arguments.limit)
    folder = Path(arguments.out or Path("reproduced") / found.name)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.analyze:
        given = [f"--{key}={value}" for key, value in recipe.analyze.options.items()]
        code = moecache(["analyze", recipe.analyze.analysis, *given, f"--out={folder}"])
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
    runs = load_runs(folder / RUNS) if recipe.sweep else []
    text = paper_page(found.name, recipe, runs)
    write_whole(folder / SAID, text)
    sys.stdout.write(text + f"\nwritten: {folder}\n")
    return 0


def _list(as_json: bool) -> int:
    recipes = [load_recipe(name) for name in recipe_names()]
    rows = [
        {"name": f.name, **f.recipe.model_dump(include={"where", "title", "claims"})}
        for f in recipes
    ]
    text = "".join(f"{each.name:34s} {each.recipe.title}\n" for each in recipes)
    text += (
        f"{len(recipes)} tables and figures. `moecache reproduce NAME` remakes one on the shipped "
        "model, `--pretrained MODEL` on another.\n"
    )
    return print_result(as_json, {"figures": rows}, text)


def paper_page(name: str, recipe: Recipe, runs: list[Run]) -> str:
    """Return the page of the paper's numbers beside ours."""
    head = [f"# {name}: {recipe.title}", "", f"{recipe.paper}, {recipe.where}."]
    if recipe.claims:
        head.append(f"Claims: {', '.join(recipe.claims)}.")
    if recipe.notes:
        head += ["", recipe.notes.strip()]
    table = comparison_table("The paper's numbers beside ours", recipe.said, runs)
    return "\n".join([*head, "", as_markdown([table])])
