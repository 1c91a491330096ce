"""How a comparison is told: as text, as a pull request's comment, as JSON and as JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from lm_eval_moecache.report.compare import SAME, Comparison, Row

WHOLE_RUN = "(whole run)"


def as_json(comparison: Comparison, *, everything: bool = True) -> str:
    """Return `{"verdict", "alpha", "tests", "differing", "rows": [...]}`; always every row."""
    told = {
        "verdict": "regression" if comparison.is_regression else "pass",
        "alpha": comparison.alpha,
        "tests": comparison.tests,
        "weak_tests": list(comparison.weak_tests),
        "exact_runs": comparison.exact_runs,
        "differing": {name: list(pair) for name, pair in comparison.differing.items()},
        "rows": [_as_dict(row) for row in comparison.rows],
    }
    return json.dumps(told, indent=2) + "\n"


def _as_dict(row: Row) -> dict[str, Any]:
    judged = row.judgement
    return {
        "run": row.run,
        "task": row.task,
        "metric": row.metric,
        "baseline": judged.baseline,
        "new": judged.new,
        "change": judged.change,
        "allowed": judged.allowed,
        "judged_by": judged.judged_by,
        "p": judged.p,
        "p_corrected": judged.corrected,
        "verdict": judged.verdict,
    }


def as_text(comparison: Comparison, *, everything: bool = False) -> str:
    """One line a figure that changed (or all), and the verdict last, where a log is read first."""
    lines = [_line(row) for row in _chosen(comparison, everything)]
    return "\n".join([*_notes(comparison), *lines, _summary(comparison)]) + "\n"


def as_markdown(comparison: Comparison, *, everything: bool = False) -> str:
    """A pull-request comment: verdict first, then a table of what changed."""
    lines = [f"### moecache: {_summary(comparison)}", "", *_notes(comparison)]
    chosen = _chosen(comparison, everything)
    if chosen:
        lines += [""] if lines[-1] else []
        lines += ["| | Run | Task | Metric | Baseline | New | Change | Allowed | Judged by | p |"]
        lines += ["| --- | --- | --- | --- | --: | --: | --: | --: | --- | --: |"]
    for row in chosen:
        judged = row.judgement
        cells = [
            f"**{row.verdict}**" if row.is_regression else row.verdict,
            f"`{row.run}`",
            row.task or WHOLE_RUN,
            row.metric or "",
            *map(_number, (judged.baseline, judged.new, judged.change)),
            _number(judged.allowed) if judged.baseline is not None else "",
            judged.judged_by,
            _number(judged.corrected, 2),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def as_junit(comparison: Comparison, *, everything: bool = True) -> str:
    """One suite a run, one case a figure: what CI systems show as tests."""
    head = {"name": "moecache compare", **_counts(comparison.rows)}
    root = ElementTree.Element("testsuites", head)
    for name in dict.fromkeys(row.run for row in comparison.rows):
        rows = [row for row in comparison.rows if row.run == name]
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(rows)})
        for row in rows:
            place = " ".join(filter(None, (row.task or WHOLE_RUN, row.metric)))
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=place)
            if row.is_regression:
                failure = ElementTree.SubElement(
                    case, "failure", type=row.verdict, message=_line(row)
                )
                failure.text = "\n".join(_notes(comparison))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


FORMS: Mapping[str, Callable[..., str]] = {
    "text": as_text,
    "md": as_markdown,
    "json": as_json,
    "junit": as_junit,
}


def _counts(rows: Sequence[Row]) -> dict[str, str]:
    failed = sum(row.is_regression for row in rows)
    return {"tests": str(len(rows)), "failures": str(failed), "errors": "0"}


def _chosen(comparison: Comparison, everything: bool) -> list[Row]:
    return [row for row in comparison.rows if everything or row.verdict != SAME]


def _notes(comparison: Comparison) -> list[str]:
    lines = [
        f"argument differs: {name}: {before} -> {after}"
        for name, (before, after) in comparison.differing.items()
    ]
    if comparison.exact_runs:
        lines.append(
            f"{comparison.exact_runs} runs were made on the baseline's machine and are compared "
            "to the digit."
        )
    if comparison.tests:
        lines.append(
            f"{comparison.tests} scores are tested; the chance that chance alone fails this "
            f"comparison is at most {100 * comparison.alpha:g}% (Holm, Tarone)."
        )
    if comparison.weak_tests:
        lines.append(
            f"{len(comparison.weak_tests)} of them have too few documents to ever fail: "
            f"{', '.join(comparison.weak_tests)}."
        )
    return lines


def _line(row: Row) -> str:
    judged = row.judgement
    place = " ".join(filter(None, (row.task or WHOLE_RUN, row.metric)))
    text = f"{row.verdict:8s} {place}"
    if judged.change is not None:
        text += (
            f": {_number(judged.baseline)} -> {_number(judged.new)} "
            f"(change {judged.change:+.4g}, allowed {judged.allowed:.4g}, {judged.judged_by}"
        )
        if judged.p is not None and judged.corrected is not None:
            text += f", p {judged.p:.2g}, corrected {judged.corrected:.2g}"
        text += ")"
    return f"{text}  [{row.run}]"


def _summary(comparison: Comparison) -> str:
    rows = comparison.rows
    verdicts = [row.verdict for row in rows]
    told = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    return f"{'REGRESSION' if comparison.is_regression else 'pass'}: {len(rows)} figures: {told}"


def _number(value: float | None, digits: int = 6) -> str:
    return "" if value is None else f"{value:.{digits}g}"
