"""Make leaderboard tables (md, csv, html, json) from a folder of results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.records.files import read_json, read_yaml, write_whole
from lm_eval_moecache.records.numbers import listed_names
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.report import every_eval_ever
from lm_eval_moecache.report.runs.files import RUNS, TABLE, load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.runs.schema import FrontFile, RowsFile
from lm_eval_moecache.report.tables import FORMS
from lm_eval_moecache.report.tables.leaderboard import Table, distinct, leaderboard
from lm_eval_moecache.report.tables.lost import lost_points
from lm_eval_moecache.report.tables.schema import Board
from lm_eval_moecache.report.tables.text import rows_as_markdown
from lm_eval_moecache.report.tables.views import view_table
from lm_eval_moecache.sweep.spec import sweep_fields

logger = logging.getLogger(__name__)
BOARD = "table.yaml"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dir", help="a sweep's folder, or any folder with results JSONs below it")
    text = f"default: md; {every_eval_ever.NAME}: each run in that schema instead, one "
    text += f"JSON per line (with --write: DIR/{every_eval_ever.NAME}/UUID.json, one file per run)"
    forms = [*sorted(FORMS), every_eval_ever.NAME]
    parser.add_argument("--format", choices=forms, help=text)
    text = "comma-separated; ttft_ms.* is mean, p50, p90 and p99; default: the columns that vary"
    parser.add_argument("--columns", type=str | None, help=text)
    text = "comma-separated columns, best first; NAME:asc or NAME:desc forces an order; "
    text += "default: accuracy,tok_per_s"
    parser.add_argument("--sort", type=str | None, help=text)
    parser.add_argument("--title", type=str | None, help="default: the sweep file's")
    text = "write DIR/table.md (and .csv, .html, .json)"
    parser.add_argument("--write", action="store_true", help=text)
    text = "with --write: for every sweep's folder below DIR, for every folder with a table.yaml "
    text += "(title, where, distinct, by, columns, sort, views: a leaderboard over what lies below "
    text += "it), and for the JSONs of analyses and searches"
    parser.add_argument("--each", action="store_true", help=text)


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    form = "json" if arguments.json else arguments.format
    columns, sort = (listed_names(arguments[key]) or None for key in ("columns", "sort"))
    choices = columns, sort, arguments.title
    if not arguments.dir:
        raise ValueError("DIR='' is not a path. Allowed: a folder of results, `.` for this one.")
    if form == every_eval_ever.NAME:
        if any(choices) or arguments.each:
            raise ValueError(
                f"--format={form} takes every run with all its figures: it cannot be combined with "
                "--columns, --sort, --title or --each."
            )
        return _exchange(folder, arguments.write)
    if arguments.each:
        if not arguments.write or any(choices):
            raise ValueError(
                "--each needs --write, and cannot be combined with --columns, --sort or --title."
            )
        for board_folder in board_folders(folder):
            _write(board_folder, collect(board_folder), form)
        for path, text in other_tables(folder).items():
            write_whole(path, text)
            sys.stdout.write(f"{path}\n")
    elif arguments.write:
        _write(folder, collect(folder, *choices), form)
    else:
        runs = load_runs(folder)
        tables = collect(folder, *choices, runs=runs)
        for place, column in enumerate(tables[0].columns if choices[0] else ()):
            if all(row[place].raw is None for row in tables[0].rows):
                sys.stderr.write(f"moecache: no run here has {column.name}: its column is empty.\n")
        if form != "csv" and not any(choices) and (lost := lost_points(runs)):
            tables.append(lost)
        sys.stdout.write(FORMS[form or "md"](tables))
    return 0


def _exchange(folder: Path, write: bool) -> int:
    if write and not folder.is_dir():
        raise ValueError(f"--write: {str(folder)!r} is not a folder.")
    # All before the first is written; copies of a run are one document.
    texts = {every_eval_ever.file_name(run): every_eval_ever.line(run) for run in load_runs(folder)}
    for name, text in texts.items():
        if write:
            write_whole(folder / every_eval_ever.NAME / name, text)
        sys.stdout.write(f"{folder / every_eval_ever.NAME / name}\n" if write else text)
    return 0


def _write(folder: Path, tables: Sequence[Table], chosen: str | None) -> None:
    if not folder.is_dir():
        raise ValueError(f"--write: {str(folder)!r} is not a folder.")
    for name in [chosen] if chosen else FORMS:
        path = folder / f"table.{name}"
        write_whole(path, FORMS[name](tables))
        sys.stdout.write(f"{path}\n")


def board_folders(folder: Path) -> list[Path]:
    """Return the folders with a table of their own: finished sweeps, and any `table.yaml`'s."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r}: there is no such folder.")
    sweeps = {path.parent for path in folder.rglob("sweep.yaml")}
    finished = {f for f in sweeps if (f / TABLE).is_file() or any((f / RUNS).glob("*.json"))}
    folders = sorted(finished | {path.parent for path in folder.rglob(BOARD)})
    if not folders:
        raise ValueError(f"{str(folder)!r} has neither finished sweeps nor a {BOARD} below it.")
    return folders


def other_tables(folder: Path) -> dict[Path, str]:
    """Return path -> Markdown of analyses and searches, made again from the JSON next to each.

    A file that does not fit is left out with a warning that names file and field.
    """
    tables = {}
    for path in sorted(folder.rglob("*.json")):
        target = path.with_suffix(".md")
        if path.name == "table.json" or not target.is_file():
            continue
        try:
            text = other_table(path)
        except ValueError as error:
            logger.warning("skipping unreadable table: %s", error)
            continue
        if text is not None:
            tables[target] = text
    return tables


def other_table(path: Path) -> str | None:
    """Return the Markdown of one JSON of an analysis or a search; None for any other file."""
    what = repr(str(path))
    data = read_json(path, what)
    if not isinstance(data, dict):
        return None
    if "rows" in data:
        check(RowsFile, data, what)
        return rows_as_markdown(data["rows"])
    if "front" in data:
        from lm_eval_moecache.tune.outcome import front_table

        check(FrontFile, data, what)
        return front_table(data)
    return None


def collect(
    folder: Path,
    columns: list[str] | None = None,
    sort: list[str] | None = None,
    title: str | None = None,
    runs: Sequence[Run] = (),
) -> list[Table]:
    """Return the leaderboard of a folder, then the views that its `table.yaml` or sweep defines."""
    runs, path = runs or load_runs(folder), folder / BOARD
    if path.is_file():
        board = check(Board, read_yaml(path, str(path)), str(path))
    elif (folder / "sweep.yaml").is_file():
        # Of a sweep file only title and views apply.
        sweep = sweep_fields(folder / "sweep.yaml")
        board = Board(title=sweep.title or sweep.name, views=sweep.views)
    else:
        board = Board()
    chosen = [run for run in runs if run.matches(board.where)]
    if not chosen:
        raise ValueError(f"{path}: no run has where={board.where!r}.")
    first = leaderboard(
        distinct(chosen) if board.distinct else chosen,
        title=board.title if title is None else title,
        columns=columns or board.columns,
        sort=sort or board.sort,
        by=board.by,
        merge=board.distinct,
    )
    return [first, *(view_table(runs, view) for view in board.views)]
