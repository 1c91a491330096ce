"""The page of a claims file: a table of verdicts, and under it each figure that they rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lm_eval_moecache.records.schemas.claims import Bounds, Claims, Part
from lm_eval_moecache.report.claims import Answer, Verdict

_HOW = """\
A part is answered where the figure's 95% interval lies inside (or outside) of what the claim says
and the test's chance, corrected over the claim's parts (Holm), is at most {alpha:g}. Answers right
or wrong: McNemar's test; times, rates and log-likelihoods: sign flips, and intervals by bootstrap,
over the documents that both runs have. Parts in *italics* are told beside the verdict. Perplexities
are by token."""


def page(claims: Claims, verdicts: Sequence[Verdict]) -> str:
    """Return the Markdown, with a newline at its end."""
    counts = Counter(each.verdict for each in verdicts)
    told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [
        f"# {claims.title}",
        "",
        claims.about.strip(),
        "",
        _HOW.format(alpha=claims.alpha),
        "",
        f"{len(verdicts)} claims: {told}.",
        "",
        "| id | claim | regime | verdict | why |",
        "|---|---|---|---|---|",
        *(_summary(each) for each in verdicts),
        "",
        "## The figures",
    ]
    for each in verdicts:
        lines += ["", *_figures(each)]
    return "\n".join(lines) + "\n"


def _summary(found: Verdict) -> str:
    claim = found.claim
    verdict = f"**{found.verdict}**" + (f" ({found.told})" if found.told else "")
    cells = [claim.id, f"{claim.claim} ({claim.where})", claim.regime, verdict, claim.why]
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


def _figures(found: Verdict) -> list[str]:
    heading = f"### {found.claim.id}: {found.verdict}"
    if not found.answers:
        return [heading, "", f"No figures: {found.told}."]
    return [
        heading,
        "",
        "| compared | figure | 95% interval | claimed | p | test | verdict | runs |",
        "|---|--:|--:|---|--:|---|---|---|",
        *(_row(each) for each in found.answers),
    ]


def _row(found: Answer) -> str:
    part, shown = found.part, found.shown
    style = "*" if part.aside else ""
    cells = [
        f"{style}{part.what}{style}",
        number(shown.figure),
        f"{number(shown.low)} to {number(shown.high)}",
        f"{_measure(part)} {_bounds(part.expect)}",
        "" if part.cells or shown.nothing_changed else _chance(found.p),
        shown.by,
        found.verdict,
        _source(part),
    ]
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def _chance(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _measure(part: Part) -> str:
    name = part.metric if part.rows is None else part.rows.new
    return f"{name}, {part.form}" if part.form != "value" else name


def _bounds(expect: Bounds) -> str:
    if expect.above is not None and expect.below is not None:
        return f"{expect.above:g} to {expect.below:g}"
    if expect.above is not None:
        return f"above {expect.above:g}"
    return f"below {expect.below:g}"


def _source(part: Part) -> str:
    if part.runs is not None:
        table = f"{part.runs}/table.md"
        return f"[{part.runs}]({table})"
    path = part.rows.file if part.rows is not None else str(part.cells)
    return f"[{Path(path).parent}]({path})"
