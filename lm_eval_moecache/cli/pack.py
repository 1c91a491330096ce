"""Pack each experiment's runs into one compressed file, which all other commands read as well.

A sweep resumed in a packed folder unpacks it first: pack again when it is done.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.report.runs.files import PACKED, RUNS, pack, unpack
from lm_eval_moecache.sweep.files import only_sweep


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("dir", help="an experiment's folder, or a folder of such folders")
    parser.add_argument(
        "--undo", action="store_true", help=f"write {RUNS}/*.json again, and remove {PACKED}"
    )


def run(arguments: Namespace) -> int:
    folder = Path(arguments.dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r}: there is no such folder.")
    pattern = PACKED if arguments.undo else f"{RUNS}/*.json"
    depth = 0 if arguments.undo else 1
    places = sorted({path.parents[depth] for path in folder.rglob(pattern)})
    if not places:
        raise ValueError(f"{str(folder)!r} has nothing to {'un' * arguments.undo}pack: {pattern}.")
    counts = {}
    for place in places:
        if arguments.undo:
            counts[str(place)] = unpack(place)
        else:
            with only_sweep(place):
                counts[str(place)] = pack(place)
    lines = (f"{count:5d} runs  {place}\n" for place, count in counts.items())
    return print_result(arguments.json, {"runs": counts}, "".join(lines))
