"""Answer what papers claim from the runs of a results folder, with intervals and tests.

A claims file names for each claim the runs to compare, the metric and what is expected; the page
of verdicts (CLAIMS.md beside it) follows from it and the runs alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.numbers import finite
from lm_eval_moecache.report.claims import Verdict, answer, page, read_claims

PAGE = "CLAIMS.md"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="results/claims.yaml", help="the claims file")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} beside the file")


def run(arguments: Namespace) -> int:
    path = Path(arguments.file)
    claims = read_claims(path)
    verdicts = answer(claims, path.parent)
    if arguments.json:
        rows = {"claims": [_told(each) for each in verdicts]}
        sys.stdout.write(json.dumps(finite(rows), indent=2) + "\n")
        return 0
    text = page(claims, verdicts)
    if arguments.write:
        write_whole(path.parent / PAGE, text)
        sys.stdout.write(f"written: {path.parent / PAGE}\n")
    else:
        sys.stdout.write(text)
    return 0


def _told(found: Verdict) -> dict[str, object]:
    parts = [
        {
            "what": each.part.what,
            "figure": each.estimate.figure,
            "low": each.estimate.low,
            "high": each.estimate.high,
            "p": None if each.part.cells or each.part.whole else each.p,
            "least_p": each.least_p,
            "p_of_all": each.p_of_all,
            "verdict": each.verdict,
        }
        for each in found.answers
    ]
    return {"id": found.claim.id, "verdict": found.verdict, "told": found.told, "parts": parts}
