"""Answer what papers claim from the runs of a results folder, with intervals and tests.

A claims file names for each claim the runs to compare, the metric and what is expected; the page
of verdicts (CLAIMS.md next to it) follows from it and the runs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from lm_eval_moecache.cli.main import make_parser, parsed, print_result
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.numbers import finite
from moecache_lab.claims.page import page
from moecache_lab.claims.verdicts import Verdict, answer, read_claims

PAGE = "CLAIMS.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 2 with a one-line message for a user's error."""
    parser = make_parser("python -m moecache_lab.claims", __doc__)
    parser.add_argument("file", nargs="?", default="results/claims.yaml", help="the claims file")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} next to the file")
    try:
        return run(parsed(parser, sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        sys.stderr.write(f"claims: {error}\n")
        return 2


def run(arguments: Namespace) -> int:
    path = Path(arguments.file)
    claims = read_claims(path)
    verdicts = answer(claims, path.parent)
    if arguments.json:
        report = finite({"claims": [_told(verdict) for verdict in verdicts]})
        return print_result(True, report, "")
    text = page(claims, verdicts)
    if arguments.write:
        write_whole(path.parent / PAGE, text)
        text = f"written: {path.parent / PAGE}\n"
    return print_result(False, None, text)


def _told(verdict: Verdict) -> dict[str, object]:
    parts = [
        {
            "what": answer.part.what,
            **{key: getattr(answer.estimate, key) for key in ("figure", "low", "high")},
            "p": answer.p if answer.part.is_tested else None,
            **{key: getattr(answer, key) for key in ("p_of_all", "verdict", "model", "gate")},
        }
        for answer in verdict.answers
    ]
    return {
        "id": verdict.claim.id,
        "verdict": verdict.verdict,
        "told": verdict.told,
        "parts": parts,
    }


if __name__ == "__main__":
    raise SystemExit(main())
