"""What a leaderboard's lossy runs lose against the lossless run of the same documents.

Paired by document, and only among runs of one identity: another identity's difference is not the
run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval_moecache.report.metrics import Column
from lm_eval_moecache.report.runs.run import Run, Value
from lm_eval_moecache.report.statistics import documents_needed, other_documents_interval
from lm_eval_moecache.report.tables.leaderboard import INTERVAL, Table, cells_of

_NAMES = ("run", "policy", "capacity")
DOCUMENTS = 1_000
POINTS = (1, 3)
_NOTE = (
    f"95%: of the points lost on {DOCUMENTS:,} other documents of the kind. Documents for 1: on "
    "so many a loss of 1 point is shown in four cases of five (one-sided, 5%), where answers "
    "change as often as here"
)
_COLUMNS = (
    *(Column(name, name.capitalize()) for name in (*_NAMES, "task")),
    *(Column(name, name.capitalize(), 0) for name in ("documents", "won", "lost")),
    Column("points_lost", "Points lost", 1),
    Column("low", "95% from", 1),
    Column("high", "to", 1),
    *(Column(f"documents_for_{n}", f"Documents for {n}", 0) for n in POINTS),
)


def lost_points(runs: Sequence[Run]) -> Table | None:
    """Return a row per lossy run and task: points lost, on its documents and on 1,000 others.

    Right and wrong answers against those of a lossless run of the same documents and identity; None
    where no lossy run has one. The interval is of the difference that other documents of the kind
    would show (95%); the last columns are the documents that tell 1 and 3 points in four of five
    cases, at one-sided 5%, where answers change as often as here.
    """
    exact = [run for run in runs if run.is_lossless]
    body = []
    for run in runs:
        for task in () if run.is_lossless else run.scored:
            answers = _answers(run, task)
            bases = (_answers(other, task) for other in exact if other.identity == run.identity)
            base = next((old for old in bases if old.keys() == answers.keys()), None)
            if not answers or base is None:
                continue
            won = sum(answers[doc] > old for doc, old in base.items())
            lost = sum(answers[doc] < old for doc, old in base.items())
            low, high = other_documents_interval(won, lost, len(base), DOCUMENTS)
            changed = (won + lost) / len(base)
            figures: list[Any] = [task, len(base), won, lost]
            figures += [100 * each for each in ((lost - won) / len(base), -high, -low)]
            figures += [documents_needed(points / 100, changed) for points in POINTS]
            body.append((*(run.setting(name) for name in _NAMES), *map(Value, figures)))
    if not body:
        return None
    title = "Points lost against the lossless run"
    return Table(title, _COLUMNS, cells_of(_COLUMNS, body), about=((INTERVAL, _NOTE),))


def _answers(run: Run, task: str) -> dict[str, float]:
    """Return document -> right (1) or wrong (0); empty for scores of another kind."""
    score = run.score(task)
    answers = run.samples.get(task, {}).get(score.key, {}) if score else {}
    is_right = all(value in (0, 1) for value in answers.values() if not isinstance(value, list))
    if not is_right or any(isinstance(value, list) for value in answers.values()):
        return {}
    return dict(answers)
