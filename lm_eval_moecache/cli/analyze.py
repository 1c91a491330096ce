"""Analyse a model as the papers do: `sensitivity` to ranks, `locality` of experts in the cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.errors import unknown

ANALYSES = ("locality", "sensitivity")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("analysis", help=" or ".join(ANALYSES))
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--text", help="a plain text file (default for tiny: its held-out pages)")
    parser.add_argument("--max_tokens", type=int, default=4096, help="how much of the text to read")
    parser.add_argument("--out", help="folder for the JSON, the table and the pictures")
    parser.add_argument("--seeds", type=int, default=3, help="sensitivity: draws per swapped rank")
    parser.add_argument("--capacity", default="8/layer", help="locality: the cache of each layer")
    parser.add_argument("--layer", type=int, default=0, help="locality: the MoE layer to draw")
    parser.add_argument(
        "--lambda", dest="lambda_", type=float, default=0.5, help="locality: of cache_prior"
    )


def run(arguments: Namespace) -> int:
    if arguments.analysis not in ANALYSES:
        raise unknown("analysis", arguments.analysis, ANALYSES)
    # Imported late: they bring torch, and a misspelt analysis should not wait for it.
    from lm_eval_moecache.analysis.subject import Subject, read_text

    text = read_text(arguments.pretrained, arguments.text)
    subject = Subject(arguments.pretrained, text, arguments.max_tokens)
    analysis = _sensitivity if arguments.analysis == "sensitivity" else _locality
    rows = analysis(subject, arguments)
    if arguments.json:
        sys.stdout.write(json.dumps({"model": subject.name, "rows": rows}, indent=2) + "\n")
    else:
        sys.stdout.write(_markdown(rows))
    if arguments.out:
        _write(Path(arguments.out), arguments.analysis, {"model": subject.name, "rows": rows})
    return 0


def _sensitivity(subject: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import sensitivity

    rows = sensitivity.analyze(subject, arguments.seeds)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/sensitivity.{suffix}"
            sensitivity.draw(rows, f"{sensitivity.TITLE} ({subject.name})", path)
    return rows


def _locality(subject: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import locality

    cache_prior = {"routing": "cache_prior", "routing.lambda": arguments.lambda_}
    routings = {"standard": {}, f"cache_prior (lambda {arguments.lambda_:g})": cache_prior}
    rows, maps = locality.analyze(subject, arguments.capacity, routings, arguments.layer)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/locality.{suffix}"
            locality.draw(maps, f"{locality.TITLE} ({subject.name}, {arguments.capacity})", path)
    return rows


def _markdown(rows: list[dict[str, Any]]) -> str:
    from pytablewriter import MarkdownTableWriter

    return str(
        MarkdownTableWriter(
            headers=list(rows[0]),
            value_matrix=[
                [f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows
            ],
        ).dumps()
    )


def _write(folder: Path, name: str, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / f"{name}.md").write_text(_markdown(found["rows"]))
