"""What `moecache table` prints and writes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import read_json, read_yaml, write_whole
from lm_eval_moecache.records.numbers import listed_names
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.report import every_eval_ever
from lm_eval_moecache.report.runs.answers import GOODPUT, read_slo
from lm_eval_moecache.report.runs.files import RUNS, TABLE, load_runs
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.runs.schema import RowsFile
from lm_eval_moecache.report.tables import FORMS
from lm_eval_moecache.report.tables.leaderboard import Table, distinct, leaderboard
from lm_eval_moecache.report.tables.lost import lost_points
from lm_eval_moecache.report.tables.schema import Board
from lm_eval_moecache.report.tables.text import rows_as_markdown
from lm_eval_moecache.report.tables.views import view_table
from lm_eval_moecache.sweep.spec import sweep_fields

logger = logging.getLogger(__name__)
BOARD = "table.yaml"


class Asked(NamedTuple):
    """What of a board its user wants otherwise."""

    columns: list[str] | None = None
    sort: list[str] | None = None
    title: str | None = None
    slo: Mapping[str, float] | None = None


def table(
    dir: str,
    *,
    format: Literal["csv", "every_eval_ever", "html", "json", "md"] | None = None,
    columns: str | None = None,
    sort: str | None = None,
    title: str | None = None,
    write: bool = False,
    each: bool = False,
    slo: str | None = None,
) -> Report:
    """Make leaderboard tables (md, csv, html, json) from a folder of results.

    Args:
        dir: a sweep's folder, or any folder with results JSONs below it
        format: default: md; every_eval_ever: each run in that schema instead, one JSON per line
            (with --write: files below DIR/every_eval_ever/data, one per run, and one of its samples
            where lm-eval saved them)
        columns: comma-separated; ttft_ms.* is mean, p50, p90 and p99; default: the columns that
            vary
        sort: comma-separated columns, best first; NAME:asc or NAME:desc forces an order; default:
            right_per_hour, or without it accuracy,tok_per_s
        title: default: the sweep file's
        write: write DIR/table.md (and .csv, .html, .json)
        each: with --write: for every sweep's folder below DIR, for every folder with a table.yaml
            (title, where, distinct, by, columns, sort, views: a leaderboard over what lies below
            it), and for the JSONs of analyses and searches
        slo: adds goodput, the share of requests within limits: ttft=2s,itl=50ms,e2el=20s
    """
    folder = Path(dir)
    asked = Asked(listed_names(columns) or None, listed_names(sort) or None, title, read_slo(slo))
    is_shaped = any(asked[:3])
    if format == every_eval_ever.NAME:
        if is_shaped or each or slo:
            raise ValueError(
                f"--format={format} takes every run with all its figures: it cannot be combined "
                "with --columns, --sort, --title, --slo or --each."
            )
        return _exchange(folder, write)
    if each and (not write or is_shaped):
        raise ValueError(
            "--each needs --write, and cannot be combined with --columns, --sort or --title."
        )
    if write:
        folders = board_folders(folder) if each else [folder]
        files = [file for place in folders for file in _write(place, format, asked)]
        for path, text in other_tables(folder).items() if each else ():
            write_whole(path, text)
            files.append(str(path))
        return Report({"files": files}, "\n".join(files))
    runs = load_runs(folder, asked.slo)
    tables = collect(folder, asked, runs)
    named = [c for c in tables[0].columns if asked.columns or c.name == GOODPUT]
    for column in named:
        if tables[0].cells[column.name].isna().all():
            sys.stderr.write(f"moecache: no run here has {column.name}: its column is empty.\n")
    if format != "csv" and not is_shaped and (lost := lost_points(runs)):
        tables.append(lost)
    return Report(json.loads(FORMS["json"](tables)), FORMS[format or "md"](tables))


def _exchange(folder: Path, write: bool) -> Report:
    if write and not folder.is_dir():
        raise ValueError(f"--write: {str(folder)!r} is not a folder.")
    # All before the first is written; copies of a run are one document.
    runs = load_runs(folder)
    if not write:
        texts = dict.fromkeys(map(every_eval_ever.line, runs))
        return Report({"documents": [*map(json.loads, texts)]}, "".join(texts))
    files = {
        folder / every_eval_ever.NAME / name: text
        for run in runs
        for name, text in every_eval_ever.files(run).items()
    }
    for path, text in files.items():
        write_whole(path, text)
    names = [str(path) for path in files]
    return Report({"files": names}, "\n".join(names))


def _write(folder: Path, form: str | None, asked: Asked) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"--write: {str(folder)!r} is not a folder.")
    tables = collect(folder, asked)
    paths = {folder / f"table.{name}": FORMS[name] for name in ([form] if form else FORMS)}
    for path, write_as in paths.items():
        write_whole(path, write_as(tables))
    return [str(path) for path in paths]


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
    """Return path -> Markdown of analyses, made again from the JSON next to each.

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
    """Return the Markdown of one JSON of an analysis; None for any other file."""
    what = repr(str(path))
    data = read_json(path, what)
    if not isinstance(data, dict):
        return None
    if "rows" in data:
        check(RowsFile, data, what)
        return rows_as_markdown(data["rows"])
    return None


_AS_IT_IS = Asked()


def collect(folder: Path, asked: Asked = _AS_IT_IS, runs: Sequence[Run] = ()) -> list[Table]:
    """Return the leaderboard of a folder, then the views that its `table.yaml` or sweep defines."""
    runs, path = runs or load_runs(folder, asked.slo), folder / BOARD
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
    columns = asked.columns or board.columns
    if columns and asked.slo:
        columns = [*dict.fromkeys([*columns, GOODPUT])]
    first = leaderboard(
        distinct(chosen) if board.distinct else chosen,
        title=board.title if asked.title is None else asked.title,
        columns=columns,
        sort=asked.sort or board.sort,
        by=board.by,
        merge=board.distinct,
    )
    return [first, *(view_table(runs, view) for view in board.views)]
