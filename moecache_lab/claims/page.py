"""The page of verdicts, CLAIMS.md: a first screen, regimes and reasons, and every figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.report.tables.text import line
from moecache_lab.claims.estimates import TOKENS_PER_WORD, Estimate
from moecache_lab.claims.schema import Claims
from moecache_lab.claims.statistics import LEAST_ANSWERS, LEAST_SAMPLES
from moecache_lab.claims.verdicts import VERDICTS, Answer, Verdict, rough

FEW_DOCUMENTS = 15
_COLUMNS = (
    *("compared", "figure", "95% interval", "claimed", "p", "p of all"),
    *("test", "for 80%", "model", "verdict", "runs"),
)


def page(claims: Claims, verdicts: Sequence[Verdict]) -> str:
    """Return the Markdown, with a newline at its end."""

    def standing(answers: Sequence[Answer]) -> tuple[int, int]:
        """Return how many of these answers survive correction over all claims, and how many are."""
        p_values = [each.p_of_all for each in answers if each.p_of_all is not None]
        return sum(p <= claims.alpha for p in p_values), len(p_values)

    headlines, reasons, figures = [], [], []
    for each in verdicts:
        claim, (surviving, answered) = each.claim, standing(each.answers)
        survival = f"all {surviving}" if surviving == answered else f"{surviving} of {answered}"
        link, statement = f"[{claim.id}](#{claim.id.lower()})", f"{claim.claim} ({claim.where})"
        verdict = f"**{each.verdict}**" + (f" ({each.told})" if each.told else "")
        models = ", ".join(dict.fromkeys(a.model for a in each.answers if not a.part.aside))
        cells = [link, statement, claim.paper, _ours(each), verdict, models]
        headlines.append(line([cell.strip() for cell in [*cells, survival if answered else ""]]))
        cells = [claim.id, claim.regime, verdict, claim.why]
        reasons.append(line([cell.strip() for cell in cells]))
        figures += ["", f"### {claim.id}", "", f"{claim.claim}: **{each.verdict}**.", ""]
        if each.answers:
            figures += [line(_COLUMNS), "|---|--:|--:|---|--:|--:|---|--:|---|---|---|"]
            figures += map(_row, each.answers)
        else:
            figures.append(f"No figures: {each.told}.")

    counts = Counter(each.verdict for each in verdicts)
    told = "; ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    tested = [a for each in verdicts for a in each.answers if a.part.counts]
    surviving, answered = standing(tested)
    lines = [
        f"# {claims.title}",
        "",
        claims.about.strip(),
        "",
        f"{len(verdicts)} claims: {told}. "
        f"Tests answer {answered} of {len(tested)} parts; {surviving} of these answers survive "
        "correction over all parts of all claims (last column). "
        f"Parts that rest on few samples (see *few*): {sum(a.is_small for a in tested)}; on fewer "
        f"than {FEW_DOCUMENTS}: {sum(a.estimate.new.size < FEW_DOCUMENTS for a in tested)}. "
        "The models are `tiny`, by version, and a carved Gemma 3 270M.",
        "",
        "| id | claim | the paper | here (95% interval) | verdict | model "
        "| answers that survive correction |",
        "|---|---|---|---|---|---|---|",
        *headlines,
        "",
        "## Regimes and reasons",
        "",
        "| id | regime | verdict | why |",
        "|---|---|---|---|",
        *reasons,
        "",
        "## The figures",
        "",
        _method(claims, len(tested)),
        *figures,
    ]
    return "\n".join(lines) + "\n"


def _method(claims: Claims, parts: int) -> str:
    numbers = {"alpha": claims.alpha, "parts": parts, "per_word": TOKENS_PER_WORD}
    text = claims.method.strip()
    for name, number in {**numbers, "answers": LEAST_ANSWERS, "samples": LEAST_SAMPLES}.items():
        text = text.replace(f"{{{name}}}", f"{number:g}")
    return text


class _Told:
    """Formats a figure with its interval for the templates of `Claim.ours`."""

    def __init__(self, estimate: Estimate) -> None:
        self._found = estimate

    def __format__(self, spec: str) -> str:
        estimate, percent = self._found, "%" if spec in ("gain", "loss") else ""
        values = [estimate.figure, estimate.low, estimate.high]
        if spec == "inverse":
            values = [1 / value if value else math.inf for value in values]
        elif percent:
            one = float(estimate.form == "ratio")
            values = [100 * (value - one) for value in values]
            values = [0.0 - gain for gain in values] if spec == "loss" else values
        elif spec:
            raise unknown_name_error("ours", f"{{:{spec}}}", ["{:inverse}", "{:gain}", "{:loss}"])
        figure, *ends = values
        return f"{rough(figure)}{percent} ({rough(min(ends))} to {rough(max(ends))})"


def _ours(verdict: Verdict) -> str:
    claim, figures = verdict.claim, [_Told(answer.estimate) for answer in verdict.answers]
    if not claim.ours:
        return f"{verdict.answers[0].part.what}: {figures[0]}" if figures else ""
    try:
        return claim.ours.format(*figures)
    except (IndexError, KeyError, AttributeError):
        allowed = f"allowed: {{0}} to {{{len(figures) - 1}}}"
        why = f"claim {claim.id}: ours={claim.ours!r} names a part that is not there"
        raise ValueError(f"{why}; {allowed}.") from None


def _row(answer: Answer) -> str:
    part, estimate = answer.part, answer.estimate
    style = "*" if part.aside else ""
    figure, low, high = (
        f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"
        for value in (estimate.figure, estimate.low, estimate.high)
    )
    measured = part.metric if part.rows is None else part.rows.new
    measured += "" if part.form == "value" else f", {part.form}"
    if part.runs is not None:
        source = f"[{part.runs}]({part.runs}/table.md)"
    else:
        path = part.rows.file if part.rows is not None else str(part.cells)
        source = f"[{Path(path).parent}]({path})"
    is_tested = part.is_tested and not estimate.nothing_changed
    chances = map(_chance, (answer.p if is_tested else None, answer.p_of_all))
    by = estimate.by + (", *few*" if answer.is_small else "")
    cells = [f"{style}{part.what}{style}", figure, f"{low} to {high}", f"{measured} {part.expect}"]
    verdict = answer.verdict + (f": {answer.gate}" if answer.gate else "")
    enough = "" if answer.needed is None else f"{answer.needed:,}"
    return line([*cells, *chances, by, enough, answer.model, verdict, source])


def _chance(p: float | None) -> str:
    if p is None:
        return ""
    return "<0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.001 else f"{p:.3f}"
