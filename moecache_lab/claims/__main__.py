"""`python -m moecache_lab.claims`: answers what papers claim from the runs of a results folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval_moecache.cli.main import answered, run
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import write_whole
from moecache_lab.claims.page import page
from moecache_lab.claims.verdicts import Verdict, answer, read_claims

PAGE = "CLAIMS.md"


def claims(file: str = "results/claims.yaml", *, write: bool = False) -> Report:
    """Answer what papers claim from the runs of a results folder, with intervals and tests.

    A claims file names for each claim the runs to compare, the metric and what is expected; the
    page of verdicts (CLAIMS.md next to it) follows from it and the runs alone.

    Args:
        file: the claims file (default: results/claims.yaml)
        write: write CLAIMS.md next to the file
    """
    path = Path(file)
    asked = read_claims(path)
    verdicts = answer(asked, path.parent)
    text = page(asked, verdicts)
    if write:
        write_whole(path.parent / PAGE, text)
        text = f"written: {path.parent / PAGE}"
    return Report({"claims": [_told(verdict) for verdict in verdicts]}, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 2 with a one-line message for a user's error."""
    return answered("claims", lambda: run("claims", claims, sys.argv[1:] if argv is None else argv))


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
    said = {"id": verdict.claim.id, "verdict": verdict.verdict, "told": verdict.told}
    return {**said, "parts": parts}


if __name__ == "__main__":
    raise SystemExit(main())
