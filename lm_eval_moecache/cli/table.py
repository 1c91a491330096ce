"""Make leaderboard tables (md, csv, html, json) from a folder of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.report.html import as_html
from lm_eval_moecache.report.render import as_csv, as_json, as_markdown
from lm_eval_moecache.report.results import load_runs
from lm_eval_moecache.report.tables import Table, leaderboard
from lm_eval_moecache.report.views import view_table
from lm_eval_moecache.sweep.files import write_atomically
from lm_eval_moecache.sweep.spec import read_sweep

_FORMATS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": as_markdown,
    "csv": lambda tables: as_csv(tables[0]),
    "html": as_html,
    "json": as_json,
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dir", help="a sweep's folder, or any folder with results JSONs below it")
    parser.add_argument("--format", choices=sorted(_FORMATS), help="default: md")
    parser.add_argument("--columns", type=str | None, help="comma-separated; default: what varies")
    parser.add_argument(
        "--sort",
        type=str | None,
        help="comma-separated columns, best first; NAME:asc or NAME:desc forces an order; "
        "default: accuracy,tok_per_s",
    )
    parser.add_argument("--title", type=str | None, help="default: the sweep file's")
    parser.add_argument(
        "--write", action="store_true", help="write DIR/table.md (and .csv, .html, .json)"
    )


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    tables = collect(
        folder, _split(arguments.columns), _split(arguments.sort), title=arguments.title
    )
    chosen = "json" if arguments.json else arguments.format
    if not arguments.write:
        sys.stdout.write(_FORMATS[chosen or "md"](tables))
        return 0
    if not folder.is_dir():
        raise ValueError(f"--write: {str(folder)!r} is not a folder.")
    for name in [chosen] if chosen else _FORMATS:
        path = folder / f"table.{name}"
        write_atomically(path, _FORMATS[name](tables))
        sys.stdout.write(f"{path}\n")
    return 0


def collect(
    folder: Path,
    columns: list[str] | None = None,
    sort: list[str] | None = None,
    title: str | None = None,
) -> list[Table]:
    """Return the leaderboard of a folder, then the views that its sweep file defines."""
    runs = load_runs(folder)
    path = folder / "sweep.yaml"
    sweep = read_sweep(path) if path.is_file() else None
    heading = (sweep.title or sweep.name) if sweep else ""
    first = leaderboard(runs, title=heading if title is None else title, columns=columns, sort=sort)
    return [first, *(view_table(runs, view) for view in (sweep.views if sweep else ()))]


def _split(text: str | None) -> list[str] | None:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    return names or None
