"""Differences of a leaderboard's runs to a named baseline, or to the lossless run paired with each.

Paired by document, and only among runs of one identity: another identity's difference is not the
run's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.compare import Difference, difference
from lm_eval_moecache.report.runs.columns import Column, Value, find_column, metric_column, setting
from lm_eval_moecache.report.runs.run import Run, identity
from lm_eval_moecache.report.statistics import documents_needed, holm, other_documents_interval
from lm_eval_moecache.report.tables.front import is_lossless
from lm_eval_moecache.report.tables.leaderboard import Table, default_columns

_NAMES = ("run", "policy", "capacity")
_FIGURES = ("Difference", "95% low", "95% high")


def differences(runs: Sequence[Run], baseline: str, columns: Sequence[str] | None = None) -> Table:
    """Return a row per run and figure: new minus baseline over the same documents.

    `baseline` is a run's name (its label or id) or a policy's name that one run has. `p` is
    two-sided and corrected over all rows of the table (Holm 1979). Figures without values by
    document on both sides are left out; a rate over requests is told by their mean. Raises
    ValueError where no run, or several, are meant.
    """
    named = [run for run in runs if baseline in (run.label, run.run_id)]
    named = named or [run for run in runs if setting(run, "policy").identity == baseline]
    if not named:
        names = [str(setting(run, name).raw) for run in runs for name in ("run", "policy")]
        raise unknown_name_error("--baseline", baseline, list(dict.fromkeys(names)))
    if len(named) > 1:
        ids = ", ".join(run.run_id for run in named)
        raise ValueError(f"--baseline={baseline!r} names {len(named)} runs. Allowed: one of {ids}.")
    base, rows = named[0], list[tuple[Run, Column, Difference]]()
    for run in runs:
        if run is base or identity(run) != identity(base):
            continue
        for name in columns or default_columns(runs):
            column = find_column(runs, name)
            old, new = column.samples(base), column.samples(run)
            if len(old) < 2 or old.keys() != new.keys():
                continue
            found = difference([old[doc] - new[doc] for doc in old])
            before, after = (column.read(side).number for side in (base, run))
            if (
                before is None
                or after is None
                or not math.isclose(found.mean, after - before, rel_tol=1e-6, abs_tol=1e-9)
            ):
                if metric_column(name) is None:
                    continue  # a perplexity is no mean over documents
                column = replace(column, heading=f"{column.heading} (mean over requests)")
            rows.append((run, column, found))
    if not rows:
        raise ValueError(
            f"--baseline={baseline!r}: no other run of its identity has figures of the same "
            "documents. Allowed: a run of a sweep, whose records keep them."
        )
    chances = holm([found.p for _, _, found in rows])
    body = [
        (
            *(setting(run, name) for name in _NAMES),
            Value(column.heading),
            *(Value(figure) for figure in found[:3]),
            Value(found.documents),
            Value(chance),
        )
        for (run, column, found), chance in zip(rows, chances, strict=True)
    ]
    heads = [Column(name, name.capitalize()) for name in (*_NAMES, "figure")]
    heads += [Column(h.lower().replace(" ", "_"), h, 4, is_number=True) for h in _FIGURES]
    heads += [Column("n", "n", 0, is_number=True), Column("p", "p (Holm)", 4, is_number=True)]
    return Table(f"Differences to {baseline}", tuple(heads), tuple(body))


DOCUMENTS = 1_000
POINTS = (1, 3)
_COUNTS = ("documents", "won", "lost")
_ON = ("points_lost", "low", "high")


def lost_points(runs: Sequence[Run]) -> Table | None:
    """Return a row per lossy run and task: points lost, on its documents and on 1,000 others.

    Right and wrong answers against those of a lossless run of the same documents and identity; None
    where no lossy run has one. The interval is of the difference that other documents of the kind
    would show (95%); the last columns are the documents that tell 1 and 3 points in four of five
    cases, at one-sided 5%, where answers change as often as here.
    """
    exact = [run for run in runs if is_lossless(run)]
    body = []
    for run in runs:
        if is_lossless(run):
            continue
        for task in run.scored:
            answers = _answers(run, task)
            bases = (_answers(other, task) for other in exact if identity(other) == identity(run))
            base = next((old for old in bases if old.keys() == answers.keys()), None)
            if not answers or base is None:
                continue
            won = sum(answers[doc] > old for doc, old in base.items())
            lost = sum(answers[doc] < old for doc, old in base.items())
            low, high = other_documents_interval(won, lost, len(base), DOCUMENTS)
            changed = (won + lost) / len(base)
            body.append(
                (
                    *(setting(run, name) for name in _NAMES),
                    Value(task),
                    *map(Value, (len(base), won, lost)),
                    *(Value(100 * each) for each in ((lost - won) / len(base), -high, -low)),
                    *(Value(documents_needed(points / 100, changed)) for points in POINTS),
                )
            )
    if not body:
        return None
    heads = [Column(name, name.capitalize()) for name in (*_NAMES, "task")]
    heads += [Column(name, name.capitalize(), 0, is_number=True) for name in _COUNTS]
    headings = ("Points lost", f"95% low on {DOCUMENTS:,}", "95% high")
    heads += [
        Column(name, heading, 1, is_number=True)
        for name, heading in zip(_ON, headings, strict=True)
    ]
    heads += [
        Column(f"documents_for_{points}", f"To tell {points}: documents", 0, is_number=True)
        for points in POINTS
    ]
    return Table("Points lost against the lossless run", tuple(heads), tuple(body))


def _answers(run: Run, task: str) -> dict[str, float]:
    """Return document -> right (1) or wrong (0); empty for scores of another kind."""
    score = run.score(task)
    answers = run.samples.get(task, {}).get(score.key, {}) if score else {}
    is_right = all(value in (0, 1) for value in answers.values() if not isinstance(value, list))
    if not is_right or any(isinstance(value, list) for value in answers.values()):
        return {}
    return dict(answers)
