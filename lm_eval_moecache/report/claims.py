"""Answers what papers claim from the files of runs: figures, intervals, tests, verdicts, a page.

A figure is a ratio of means, a difference of means, or a mean. Its samples are documents (of
right-or-wrong answers, of texts, of times), or whatever an analysis has a row for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import parse_json, read_gzip, read_json, read_yaml
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas.base import check, check_as
from lm_eval_moecache.records.schemas.results import (
    Bounds,
    Claim,
    Claims,
    Part,
    RowsFile,
    TraceCell,
)
from lm_eval_moecache.report.columns import find_score, metric_value, selected
from lm_eval_moecache.report.results import Run, load_runs
from lm_eval_moecache.report.statistics import (
    Floats,
    answers_interval,
    bootstrap_interval,
    holm,
    least_flip_p,
    margin_test,
    mean_interval,
    sign_flip_test,
)

HOLDS, FAILS, OPEN = "holds", "does not hold", "not testable here"
IN_PART = "in part"
VERDICTS = (HOLDS, FAILS, OPEN)
_MOST = 1e150
"""Ratios and squares of more overflow."""
Form = Literal["ratio", "difference", "value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Paired samples. `answers`: right or wrong; `texts`: log-likelihoods with token counts.

    `traces` are single replays or whole runs, too few for a test. `old` is empty for the mean of
    one run.
    """

    kind: Literal["figures", "answers", "texts", "traces"]
    new: Floats
    old: Floats
    unit: str
    tokens: Floats | None = None

    @property
    def changes(self) -> tuple[int, int]:
        """Answers won and lost."""
        return int(np.sum(self.new > self.old)), int(np.sum(self.new < self.old))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95% interval, and the chances of it if the truth were a bound.

    Of traces: the range over them, and chances of 0 or 1, which say whether all lie beyond it.
    """

    figure: float
    low: float
    high: float
    samples: Samples
    form: Form

    def p_above(self, bound: float) -> float:
        """Return the chance of a figure as high as this if the truth were `bound`."""
        return self._p(bound, 1.0)

    def p_below(self, bound: float) -> float:
        return self._p(bound, -1.0)

    @property
    def nothing_changed(self) -> bool:
        """Whether two measured sides are equal in every sample: there is nothing to test."""
        data = self.samples
        return data.kind == "figures" and bool(data.old.size) and np.array_equal(data.new, data.old)

    @property
    def by(self) -> str:
        data = self.samples
        if self.nothing_changed:
            return f"equal in all {data.new.size} {data.unit}"
        if data.kind == "answers":
            won, lost = data.changes
            return f"exact, {lost} lost and {won} won of {data.new.size}"
        if data.unit == "runs":
            return "whole runs, untested"
        if data.kind == "traces":
            return f"all of {data.new.size} traces"
        return f"sign flips over {data.new.size} {data.unit}"

    def least_p(self, bound: float) -> float:
        """Return the smallest chance that samples like these can give beside `bound`.

        Of answers at a bound of 0 as many as changed count, elsewhere as if all were as claimed.
        """
        data = self.samples
        if data.kind == "answers":
            changed = sum(data.changes)
            best = (changed, 0) if not bound else (0, 0) if bound < 0 else (data.new.size, 0)
            return margin_test(*best, data.new.size, bound, 1.0)
        return least_flip_p(_beyond(data, bound, self.form))

    def _p(self, bound: float, sign: float) -> float:
        data = self.samples
        if data.kind == "traces":
            nearest = self.low if sign > 0 else self.high
            return 0.0 if sign * (nearest - bound) > 0 else 1.0
        if data.kind == "answers":
            return margin_test(*data.changes, data.new.size, bound, sign)
        return sign_flip_test(sign * _beyond(data, bound, self.form))


def _beyond(data: Samples, bound: float, form: Form) -> Floats:
    """Return per sample how far it lies beyond the bound; their mean is 0 at the bound."""
    if data.kind == "texts":
        assert data.tokens is not None, "texts without tokens"
        return data.old - data.new - math.log(bound) * data.tokens
    if form == "ratio":
        return data.new - bound * data.old
    return data.new - (data.old if data.old.size else 0.0) - bound


def estimate(data: Samples, form: Form) -> Estimate:
    """Return the figure of these samples with its interval.

    ValueError for fewer than two samples, and for a ratio to nothing.
    """
    _check(data, form)
    if data.kind == "answers":
        low, high = answers_interval(*data.changes, data.new.size)
        figure = float(np.mean(data.new) - np.mean(data.old))
        return Estimate(figure=figure, low=low, high=high, samples=data, form="difference")
    if data.kind == "traces":
        each = _by_trace(data, form)
        mean, low, high = float(each.mean()), float(each.min()), float(each.max())
        return Estimate(figure=mean, low=low, high=high, samples=data, form=form)
    if data.kind == "figures" and form != "ratio":
        each = data.new - (data.old if form == "difference" else 0.0)
        low, high = mean_interval(each)
        return Estimate(figure=float(each.mean()), low=low, high=high, samples=data, form=form)
    statistic: Callable[..., Floats] = (
        _perplexity_ratio if data.kind == "texts" else _ratio_of_means
    )
    sides = [data.new, data.old, *([] if data.tokens is None else [data.tokens])]
    figure = float(statistic(*sides))
    low, high = bootstrap_interval(sides, statistic)
    return Estimate(
        figure=figure, low=min(low, figure), high=max(high, figure), samples=data, form=form
    )


def _ratio_of_means(new: Floats, old: Floats, axis: int = -1) -> Floats:
    return np.asarray(new.mean(axis=axis) / old.mean(axis=axis))


def _perplexity_ratio(new: Floats, old: Floats, tokens: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.exp((old - new).sum(axis=axis) / tokens.sum(axis=axis)))


def _check(data: Samples, form: Form) -> None:
    if data.new.size < (1 if data.kind == "traces" else 2):
        raise ValueError(f"{data.new.size} {data.unit} have the figure, which are too few.")
    if form == "value" and data.kind != "answers":
        return
    if data.old.size != data.new.size:
        raise ValueError("there is no other side to compare with: `versus`, or the column `old`.")
    old = data.old if data.kind == "traces" else data.old.mean(keepdims=True)
    if form == "ratio" and data.kind != "texts" and not old.all():
        raise ValueError("what is compared with is 0, to which there is no ratio.")
    if max(np.abs(data.new).max(), np.abs(data.old).max()) > _MOST:
        raise ValueError(f"a figure is beyond {_MOST:g}, which nobody has measured.")


def _by_trace(data: Samples, form: Form) -> Floats:
    if form == "ratio":
        return data.new / data.old
    return data.new - data.old if form == "difference" else data.new


def of_runs(new: Run, old: Run | None, metric: str, task: str | None) -> Samples:
    """Return the samples of a metric over the documents that both runs have.

    A metric of speed, else a task (or `task:metric`) whose answers or texts are compared. Raises
    ValueError where the records do not hold it.
    """
    task = task or _only_task(new)
    runs = [new] if old is None else [new, old]
    speed = [run.speed.get(task, {}).get(metric) for run in runs]
    if all(each is not None for each in speed):
        return _paired("figures", speed)
    score = find_score(new, metric)
    if score is None:
        known = [*new.speed.get(task, {}), *new.results]
        raise unknown(f"{new.run_id}: no document of task {task} has it: metric", metric, known)
    task = metric.partition(":")[0]
    found = [run.samples.get(task, {}).get(score.key, {}) for run in runs]
    if isinstance(next(iter(found[0].values()), None), list):
        return _texts(found, _tokens_per_word(new, task, found[0]))
    return _paired("answers" if old is not None else "figures", found)


def _only_task(run: Run) -> str:
    if len(run.tasks) != 1:
        raise ValueError(f"{run.run_id} has several tasks: the part has to name its `task`.")
    return run.tasks[0]


def _paired(kind: Any, found: Sequence[Mapping[str, Any] | None]) -> Samples:
    sides = [each or {} for each in found]
    documents = [doc for doc in sides[0] if all(doc in side for side in sides)]
    values = [np.asarray([float(side[doc]) for doc in documents]) for side in sides]
    old = values[1] if len(values) > 1 else np.empty(0)
    return Samples(kind=kind, new=values[0], old=old, unit="documents")


def _texts(found: Sequence[Mapping[str, Any]], per_word: float) -> Samples:
    if len(found) == 1:
        raise ValueError("a perplexity is compared with another run's: `versus` is missing.")
    new, old = found
    documents = [doc for doc in new if doc in old]
    return Samples(
        kind="texts",
        new=np.asarray([float(new[doc][0]) for doc in documents]),
        old=np.asarray([float(old[doc][0]) for doc in documents]),
        unit="documents",
        tokens=np.asarray([new[doc][1] * per_word for doc in documents]),
    )


def _tokens_per_word(run: Run, task: str, texts: Mapping[str, Any]) -> float:
    """Papers tell perplexity by token; the records count words, and bytes by token read."""
    figures = run.moecache["tasks"][task]
    per_token = figures.get("bytes_per_token")
    if not per_token:
        raise ValueError(f"{run.run_id}: nothing was moved, and so no tokens are told of.")
    words = sum(pair[1] for pair in texts.values())
    return float(figures["bytes_moved"] / per_token / words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A part with what it shows. `p` is that of the verdict, corrected over the claim's parts."""

    part: Part
    estimate: Estimate
    p: float
    verdict: str
    least_p: float | None = None
    """The smallest chance that the sample could give, uncorrected; None where nothing is tested."""
    p_of_all: float | None = None
    """The verdict's chance corrected over all parts of all claims; None where it does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    claim: Claim
    answers: tuple[Answer, ...]
    verdict: str
    told: str
    """Which parts hold and which do not, where they differ."""


def read_claims(path: Path) -> Claims:
    return check(Claims, read_yaml(path, f"claims file {path.name}"), f"claims file {path.name}")


def answer(claims: Claims, root: Path) -> list[Verdict]:
    """Answer every claim from the runs under `root`. ValueError where a part finds no runs."""
    found = [_measured(claim, root) for claim in claims.claims]
    of_all = _corrected_over_all(claims.claims, found)
    return [
        _judged(claim, claims.alpha, each, wide)
        for claim, each, wide in zip(claims.claims, found, of_all, strict=True)
    ]


def _measured(claim: Claim, root: Path) -> list[Estimate]:
    estimates = []
    for part in claim.parts:
        try:
            estimates.append(measure(part, root))
        except (ValueError, OSError) as error:
            raise ValueError(f"claim {claim.id}, {part.what!r}: {error}") from None
    return estimates


Chances = list[tuple[float, float]]
"""By part: does it lie where the claim says, or surely outside?"""


def _corrected_over_all(
    claims: Sequence[Claim], found: Sequence[Sequence[Estimate]]
) -> list[Chances]:
    """Return the chances by claim and part, corrected over every part of every claim."""
    parts = [part for claim in claims for part in claim.parts]
    raw = _raw(parts, [each for estimates in found for each in estimates])
    corrected = iter(_corrected(raw, [at for at, part in enumerate(parts) if _counts(part)]))
    return [[next(corrected) for _ in claim.parts] for claim in claims]


def _counts(part: Part) -> bool:
    """Whether a part is tested for its claim's verdict: what is told beside it is not."""
    return _is_tested(part) and not part.aside


def _is_tested(part: Part) -> bool:
    return part.cells is None and not part.whole


def _raw(parts: Sequence[Part], estimates: Sequence[Estimate]) -> Chances:
    return [_chances(each, part.expect) for each, part in zip(estimates, parts, strict=True)]


def _corrected(chances: Chances, places: Sequence[int]) -> Chances:
    """Return the chances with Holm's correction over those of these places."""
    fixed = list(chances)
    inside, outside = (holm([chances[at][side] for at in places]) for side in (0, 1))
    for at, pair in zip(places, zip(inside, outside, strict=True), strict=True):
        fixed[at] = pair
    return fixed


def _judged(claim: Claim, alpha: float, estimates: Sequence[Estimate], wide: Chances) -> Verdict:
    parts = claim.parts
    chances = _raw(parts, estimates)
    # What is told beside the verdict is a family of its own, and traces are not tested.
    for aside in (False, True):
        family = [at for at, part in enumerate(parts) if part.cells is None and part.aside == aside]
        chances = _corrected(chances, family)
    answers = tuple(
        _answered(*each, alpha) for each in zip(parts, estimates, chances, wide, strict=True)
    )
    verdict, told = _summed(claim, answers)
    return Verdict(claim=claim, answers=answers, verdict=verdict, told=told)


def _chances(found: Estimate, expect: Bounds) -> tuple[float, float]:
    """Return the chances of this figure if the truth lay outside the bounds, and inside."""
    inside, outside = [], []
    if expect.above is not None:
        inside.append(found.p_above(expect.above))
        outside.append(found.p_below(expect.above))
    if expect.below is not None:
        inside.append(found.p_below(expect.below))
        outside.append(found.p_above(expect.below))
    return max(inside), min(1.0, min(outside) * len(outside))


def _answered(
    part: Part,
    found: Estimate,
    chances: tuple[float, float],
    wide: tuple[float, float],
    alpha: float,
) -> Answer:
    above = -math.inf if part.expect.above is None else part.expect.above
    below = math.inf if part.expect.below is None else part.expect.below
    if found.nothing_changed and not above < found.figure < below:
        return Answer(part=part, estimate=found, p=1.0, verdict=FAILS)
    inside, outside = chances
    verdict, p, of_all = OPEN, min(inside, outside), None
    if inside <= alpha and above < found.low and found.high < below:
        verdict, p, of_all = HOLDS, inside, wide[0]
    elif outside <= alpha and (found.high < above or found.low > below):
        verdict, p, of_all = FAILS, outside, wide[1]
    bounds = [bound for bound in (part.expect.above, part.expect.below) if bound is not None]
    least = None if not _is_tested(part) else max(found.least_p(bound) for bound in bounds)
    return Answer(
        part=part,
        estimate=found,
        p=p,
        verdict=verdict,
        least_p=least,
        p_of_all=of_all if _counts(part) else None,
    )


def _summed(claim: Claim, answers: Sequence[Answer]) -> tuple[str, str]:
    if claim.untestable is not None:
        return OPEN, claim.untestable
    counted = [each for each in answers if not each.part.aside]
    found = {word: [a.part.what for a in counted if a.verdict == word] for word in VERDICTS}
    present = [word for word in VERDICTS if found[word]]
    if len(present) == 1:
        return present[0], ""
    return IN_PART, "; ".join(f"{word}: {', '.join(found[word])}" for word in present)


def measure(part: Part, root: Path) -> Estimate:
    """Return what one comparison shows."""
    if part.rows is not None:
        return estimate(_of_rows(part, root), part.form)
    if part.cells is not None:
        return estimate(_of_cells(part, root), part.form)
    assert part.runs is not None, "a part without a source"
    runs = _runs(str(root / part.runs))
    new = _one(runs, part.where)
    old = None if part.versus is None else _one(runs, {**part.where, **part.versus})
    if part.whole:
        return estimate(_of_whole(new, old, part.metric), part.form)
    data = of_runs(new, old, part.metric, part.task)
    if part.documents is not None:
        data = _half(data, part.documents)
    if data.kind == "answers" and part.form == "ratio":
        raise ValueError("answers are compared by their difference.")
    if data.kind == "texts" and part.form != "ratio":
        raise ValueError("perplexities are compared by their ratio.")
    return estimate(data, part.form)


def _of_whole(new: Run, old: Run | None, metric: str) -> Samples:
    """Return a metric of two whole runs: one sample, as of a trace."""
    found = []
    for run in (new, *([] if old is None else [old])):
        value = metric_value(run, metric).number
        if value is None:
            raise unknown("metric", metric, [*run.moecache["totals"]])
        found.append(value)
    one, other = np.asarray(found[:1]), np.asarray(found[1:])
    return Samples(kind="traces", new=one, old=other, unit="runs")


def _half(data: Samples, which: str) -> Samples:
    kept = slice(0 if which == "even" else 1, None, 2)
    tokens = None if data.tokens is None else data.tokens[kept]
    old = data.old[kept] if data.old.size else data.old
    unit = f"{which} {data.unit}"
    return Samples(kind=data.kind, new=data.new[kept], old=old, unit=unit, tokens=tokens)


@lru_cache(maxsize=64)
def _runs(folder: str) -> list[Run]:
    return load_runs(Path(folder))


def _one(runs: Sequence[Run], where: Mapping[str, Any]) -> Run:
    found = [run for run in runs if selected(run, where)]
    if len(found) != 1:
        names = ", ".join(run.run_id for run in found[:3]) or "none"
        raise ValueError(f"{dict(where)} picks {len(found)} runs: {names}.")
    return found[0]


def _of_rows(part: Part, root: Path) -> Samples:
    assert part.rows is not None, "a part without rows"
    file = part.rows.file
    rows = check(RowsFile, read_json(root / file, file), file).rows
    names = [part.rows.new, *([part.rows.old] if part.rows.old else [])]
    for name in names:
        if name not in rows[0]:
            raise unknown(f"{file}: the column", name, rows[0])
    kept = [[row[name] for name in names] for row in rows]
    kept = [each for each in kept if all(isinstance(value, int | float) for value in each)]
    columns = np.asarray(kept, dtype=np.float64).reshape(-1, len(names)).T
    old = columns[1] if part.rows.old else np.empty(0)
    return Samples(kind="figures", new=columns[0], old=old, unit=part.rows.unit)


def _of_cells(part: Part, root: Path) -> Samples:
    """Return a metric by trace: cells of real routing have no documents."""
    assert part.cells is not None, "a part without cells"
    cells = _cells(str(root / part.cells))
    sides = [part.where, {**part.where, **(part.versus or {})}]
    found = [
        {_trace_of(cell): _figure(cell, part.metric) for cell in cells if _is(cell, side)}
        for side in sides
    ]
    traces = [name for name in found[0] if name in found[1]]
    new, old = (np.asarray([side[name] for name in traces]) for side in found)
    old = np.empty(0) if part.versus is None else old
    return Samples(kind="traces", new=new, old=old, unit="traces")


def _trace_of(cell: Mapping[str, Any]) -> str:
    if "trace" not in cell["cell"]:
        raise ValueError(f"cell={shown(cell['cell'])} does not say its `trace`.")
    return str(cell["cell"]["trace"])


def _figure(cell: Mapping[str, Any], metric: str) -> float:
    found = cell.get(metric)
    if isinstance(found, bool) or not isinstance(found, int | float):
        known = [name for name, value in cell.items() if isinstance(value, int | float)]
        raise unknown("metric", metric, known)
    return float(found)


@lru_cache(maxsize=4)
def _cells(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parse_json(read_gzip(path, path), path)
    check_as(list[TraceCell], found, path)
    return found


def _is(cell: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(cell["cell"].get(key) == value for key, value in where.items())


_HOW = """\
A part is answered where the figure's 95% interval lies inside (or outside) of what the claim says
and the test's chance, corrected over the claim's parts (Holm), is at most {alpha:g}. Answers right
or wrong: exact tests (McNemar's, binomial) and intervals (Clopper and Pearson's); times, rates and
log-likelihoods: sign flips, with BCa bootstrap intervals of ratios and Student's of means, over the
documents that both runs have. *Least p* is the smallest chance that the sample could have given,
*p of all* the verdict's chance corrected over all {parts} tested parts of all claims. Parts in
*italics* are told beside the verdict. Perplexities are by token."""


def page(claims: Claims, verdicts: Sequence[Verdict]) -> str:
    """Return the Markdown, with a newline at its end."""
    counts = Counter(each.verdict for each in verdicts)
    told = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    tested = [a for each in verdicts for a in each.answers if _counts(a.part)]
    answered = [a for a in tested if a.p_of_all is not None]
    kept = sum(_survives(each, claims.alpha) for each in answered)
    lines = [
        f"# {claims.title}",
        "",
        claims.about.strip(),
        "",
        f"{len(verdicts)} claims: {told}. Tests answer {len(answered)} of {len(tested)} parts; "
        f"{kept} of these answers stand when corrected over all parts of all claims (last column).",
        "",
        "| id | claim | the paper | here (95% interval) | verdict | answers that stand |",
        "|---|---|---|---|---|---|",
        *(_headline(each, claims.alpha) for each in verdicts),
        "",
        "## Regimes and reasons",
        "",
        "| id | regime | verdict | why |",
        "|---|---|---|---|",
        *(_summary(each) for each in verdicts),
        "",
        "## The figures",
        "",
        _HOW.format(alpha=claims.alpha, parts=len(tested)),
    ]
    for each in verdicts:
        lines += ["", *_figures(each)]
    return "\n".join(lines) + "\n"


def _survives(found: Answer, alpha: float) -> bool:
    return found.p_of_all is not None and found.p_of_all <= alpha


def _headline(found: Verdict, alpha: float) -> str:
    claim = found.claim
    answered = [each for each in found.answers if each.p_of_all is not None]
    kept = sum(_survives(each, alpha) for each in answered)
    stand = f"all {kept}" if kept == len(answered) else f"{kept} of {len(answered)}"
    cells = [
        f"[{claim.id}](#{claim.id.lower()})",
        f"{claim.claim} ({claim.where})",
        claim.paper,
        _ours(found),
        f"**{found.verdict}**",
        stand if answered else "",
    ]
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


class _Told:
    """A figure with its interval, as `Claim.ours` asks for it."""

    _FORMS: Mapping[str, Callable[[float, float], float]] = {
        "": lambda value, _: value,
        "inverse": lambda value, _: 1 / value if value else math.inf,
        "gain": lambda value, one: 100 * (value - one),
        "loss": lambda value, one: 100 * (one - value),
    }

    def __init__(self, found: Estimate) -> None:
        self._found = found

    def __format__(self, spec: str) -> str:
        if spec not in self._FORMS:
            raise unknown("ours", f"{{:{spec}}}", [f"{{:{form}}}" for form in self._FORMS if form])
        form, found = self._FORMS[spec], self._found
        one = float(found.form == "ratio")
        figure, *ends = (form(value, one) for value in (found.figure, found.low, found.high))
        percent = "%" if spec in ("gain", "loss") else ""
        return f"{_rough(figure)}{percent} ({_rough(min(ends))} to {_rough(max(ends))})"


def _rough(value: float) -> str:
    """Three digits, as a first screen needs them."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:.0f}"


def _ours(found: Verdict) -> str:
    claim = found.claim
    if not claim.ours:
        first = found.answers[:1]
        return "".join(f"{each.part.what}: {_Told(each.estimate)}" for each in first)
    try:
        return claim.ours.format(*(_Told(each.estimate) for each in found.answers))
    except (IndexError, KeyError, AttributeError):
        allowed = f"allowed: {{0}} to {{{len(found.answers) - 1}}}"
        why = f"claim {claim.id}: ours={claim.ours!r} names a part that is not there"
        raise ValueError(f"{why}; {allowed}.") from None


def _summary(found: Verdict) -> str:
    claim = found.claim
    verdict = f"**{found.verdict}**" + (f" ({found.told})" if found.told else "")
    cells = [claim.id, claim.regime, verdict, claim.why]
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


_COLUMNS = (
    *("compared", "figure", "95% interval", "claimed", "p", "least p", "p of all"),
    *("test", "verdict", "runs"),
)


def _figures(found: Verdict) -> list[str]:
    heading = f"### {found.claim.id}"
    said = f"{found.claim.claim}: **{found.verdict}**."
    if not found.answers:
        return [heading, "", said, "", f"No figures: {found.told}."]
    return [
        heading,
        "",
        said,
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|--:|--:|---|--:|--:|--:|---|---|---|",
        *(_row(each) for each in found.answers),
    ]


def _row(found: Answer) -> str:
    part, estimate = found.part, found.estimate
    style = "*" if part.aside else ""
    cells = [
        f"{style}{part.what}{style}",
        number(estimate.figure),
        f"{number(estimate.low)} to {number(estimate.high)}",
        f"{_measure(part)} {_bounds(part.expect)}",
        "" if found.least_p is None or estimate.nothing_changed else _chance(found.p),
        "" if found.least_p is None else _chance(found.least_p),
        "" if found.p_of_all is None else _chance(found.p_of_all),
        estimate.by,
        found.verdict,
        _source(part),
    ]
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def _chance(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.001 else f"{p:.3f}"


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
