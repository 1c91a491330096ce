"""Tests papers' claims on the files of runs: figures, intervals, tests, verdicts, a page.

A figure is a ratio of means, a difference of means, or a mean. Its samples are documents
(right-or-wrong answers, texts, times) or the rows of an analysis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_eval_moecache.records.files import parse_json, read_gzip, read_json, read_yaml
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.schemas import check, check_as
from lm_eval_moecache.records.schemas.results import RowsFile, TraceCell
from lm_eval_moecache.report.runs.columns import find_score, independent, metric_value, selected
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import BATCH, Run
from lm_eval_moecache.report.statistics import (
    Floats,
    answers_interval,
    documents_needed,
    holm,
)
from lm_eval_moecache.report.tables.text import line
from moecache_lab.claims.schema import Claim, Claims, Part, Premise
from moecache_lab.claims.statistics import (
    LEAST_ANSWERS,
    LEAST_SAMPLES,
    accepted_interval,
    margin_test,
    mean_test,
)

HOLDS, SIZE, DEPENDS, FAILS, TOO_FEW, OPEN = VERDICTS = (
    *("holds", "direction holds, size differs", "depends on the regime", "does not hold"),
    *("undecided: too few documents", "not testable here"),
)
_TO_TELL = 2.4864749
"""Standard errors to a bound that is passed at 5% in four of five cases: z of 5% and of 20%."""
UNDECIDED, GATED, INSIDE, OUTSIDE = "undecided", "not testable", "inside", "outside"
"""Verdicts of parts, besides HOLDS and FAILS: the sample cannot answer, the models cannot; and of
whole runs, which no test is of."""
FEW_DOCUMENTS = 15
TOKENS_PER_WORD = 1.3
"""Papers report perplexity by token, and their tokenizers have 1.2 to 1.4 to a word of such text.

`tiny`'s has 2.04, so that by its own tokens every loss would look a third smaller."""
_MOST = 1e150
"""Ratios and squares of larger values overflow."""
Kind = Literal["figures", "answers", "texts", "traces"]
Form = Literal["ratio", "difference", "value"]
Chances = list[tuple[float, float]]
"""By part: p-values of lying inside the claimed bounds, and of lying outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Paired samples. `answers`: right or wrong; `texts`: log-likelihoods with token counts.

    `traces`: single replays or whole runs, too few for a test. `old` is empty for one run's mean.
    """

    kind: Kind
    new: Floats
    old: Floats
    unit: str
    tokens: Floats | None = None

    @property
    def changes(self) -> tuple[int, int]:
        """Number of answers won and lost."""
        return int(np.sum(self.new > self.old)), int(np.sum(self.new < self.old))

    def beyond(self, bound: float, form: Form) -> Floats:
        """Return by how much each sample exceeds the bound; a figure at the bound gives mean 0."""
        if self.kind == "texts":
            assert self.tokens is not None, "texts without tokens"
            # The search for an interval's end may pass 0, below which no perplexity lies.
            return self.old - self.new - math.log(max(bound, 1e-12)) * self.tokens
        if form == "ratio":
            return self.new - bound * self.old
        return self.new - (self.old if self.old.size else 0.0) - bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95% interval, and its p-values against a bound.

    For traces the interval is their range, and p is 0 where all lie beyond the bound, else 1.
    """

    figure: float
    low: float
    high: float
    samples: Samples
    form: Form

    def p_above(self, bound: float, sign: float = 1.0) -> float:
        """Return the chance of a figure as high as this if the truth were `bound`."""
        data = self.samples
        if data.kind == "traces":
            nearest = self.low if sign > 0 else self.high
            return 0.0 if sign * (nearest - bound) > 0 else 1.0
        if data.kind == "answers":
            return margin_test(*data.changes, data.new.size, bound, sign)
        return mean_test(sign * data.beyond(bound, self.form))

    def p_below(self, bound: float) -> float:
        """Return the chance of a figure as low as this if the truth were `bound`."""
        return self.p_above(bound, -1.0)

    def documents_needed(self, bounds: Sequence[float]) -> int | None:
        """Return how many samples separate this figure from the nearest bound, were it the truth.

        In four of five cases, one-sided at 5%, before any correction. None for traces, and where no
        number does.
        """
        data = self.samples
        distances = [abs(float(data.beyond(bound, self.form).mean())) for bound in bounds]
        nearest = min(range(len(bounds)), key=lambda index: distances[index])
        if data.kind == "traces" or not distances[nearest]:
            return None
        if data.kind == "answers":
            changed = sum(data.changes) / data.new.size
            return documents_needed(min(distances[nearest], 1.0), changed)
        spread = float(data.beyond(bounds[nearest], self.form).std(ddof=1))
        return math.ceil((_TO_TELL * spread / distances[nearest]) ** 2)

    def least_p(self, bound: float) -> float | None:
        """Return the smallest p-value that as many answers can give against `bound`.

        At bound 0, as if all changed answers had changed alike; at other bounds, as if every answer
        were as claimed. None for samples that are not answers: theirs has no least.
        """
        data = self.samples
        if data.kind != "answers":
            return None
        won = 0 if bound < 0 else data.new.size if bound else sum(data.changes)
        return margin_test(won, 0, data.new.size, bound, 1.0)

    def is_small(self, bound: float) -> bool:
        """Whether there are fewer samples than the test against `bound` needs to keep its level.

        Never for traces, which are not tested, nor where every sample lies on the same side of the
        bound: as under the virtual clock, whose figures are nearly equal.
        """
        data = self.samples
        if data.kind in ("answers", "traces"):
            return data.kind == "answers" and data.new.size < LEAST_ANSWERS
        beyond = data.beyond(bound, self.form)
        return data.new.size < LEAST_SAMPLES and float(beyond.min()) * float(beyond.max()) <= 0

    @property
    def nothing_changed(self) -> bool:
        """Whether both sides' figures are equal in every sample, so that no test applies."""
        data = self.samples
        return data.kind == "figures" and bool(data.old.size) and np.array_equal(data.new, data.old)

    @property
    def by(self) -> str:
        """The test and its samples, in words."""
        data = self.samples
        if self.nothing_changed:
            return f"equal in all {data.new.size} {data.unit}"
        if data.kind == "answers":
            won, lost = data.changes
            return f"paired answers, {lost} lost and {won} won of {data.new.size}"
        if data.kind == "traces":
            of_runs = data.unit == "runs"
            return "whole runs, untested" if of_runs else f"all of {data.new.size} traces"
        return f"mean of {data.new.size} {data.unit}"


def estimate(data: Samples, form: Form) -> Estimate:
    """Return the figure of these samples with its interval.

    Raises ValueError for fewer than two samples (one for traces) and for a ratio to 0.
    """
    new, old = data.new, data.old
    if new.size < (1 if data.kind == "traces" else 2):
        raise ValueError(f"{new.size} {data.unit} have the figure, which are too few.")
    if form != "value" or data.kind == "answers":
        if old.size != new.size:
            raise ValueError(
                "there is no other side to compare with: `versus`, or the column `old`."
            )
        divisors = old if data.kind == "traces" else old.mean(keepdims=True)
        if form == "ratio" and data.kind != "texts" and not divisors.all():
            raise ValueError("what is compared with is 0, to which there is no ratio.")
        if max(np.abs(new).max(), np.abs(old).max()) > _MOST:
            raise ValueError(f"a figure is beyond {_MOST:g}, which nobody has measured.")

    if data.kind == "answers":
        figure, form = float(np.mean(new) - np.mean(old)), "difference"
        low, high = answers_interval(*data.changes, new.size)
    elif data.kind == "traces":
        figures = new / old if form == "ratio" else new - (old if form == "difference" else 0.0)
        figure, low, high = float(figures.mean()), float(figures.min()), float(figures.max())
    else:
        if data.kind == "texts":
            assert data.tokens is not None, "texts without tokens"
            figure = float(np.exp((old - new).sum() / data.tokens.sum()))
        elif form == "ratio":
            figure = float(new.mean() / old.mean())
        else:
            figure = float((new - (old if form == "difference" else 0.0)).mean())
        low, high = accepted_interval(figure, lambda bound: data.beyond(bound, form))
    return Estimate(figure=figure, low=low, high=high, samples=data, form=form)


# --- the samples of a part: documents of two runs, rows of an analysis, cells of traces ---


def measure(part: Part, root: Path) -> Estimate:
    """Return the estimate of one part's comparison."""
    if part.rows is not None:
        return estimate(_of_rows(part, root), part.form)
    if part.cells is not None:
        return estimate(_of_cells(part, root), part.form)
    new, *others = _sides(part, root)
    old = others[0] if others else None
    if part.whole:
        return estimate(_of_whole(new, old, part.metric), part.form)
    data = _of_documents(new, old, part.metric, part.task)
    if part.documents is not None:
        chosen = slice(0 if part.documents == "even" else 1, None, 2)
        tokens = None if data.tokens is None else data.tokens[chosen]
        unit = f"{part.documents} {data.unit}"
        data = replace(data, new=data.new[chosen], old=data.old[chosen], tokens=tokens, unit=unit)
    if data.kind == "answers" and part.form == "ratio":
        raise ValueError("answers are compared by their difference.")
    if data.kind == "texts" and part.form != "ratio":
        raise ValueError("perplexities are compared by their ratio.")
    return estimate(data, part.form)


def rests_on(part: Part, root: Path) -> str:
    """Return the model, and its version, of the runs that a part compares."""
    if part.rows is not None:
        return part.rows.model
    if part.cells is not None:
        return "real routing"
    carved = _sides(part, root)[0].model_args.get("pretrained") == "carved_gemma"
    return "carved Gemma" if carved else "tiny version 4"


def gate_of(part: Part, model: str, sensitivity: Mapping[str, Any], root: Path) -> str:
    """Return what the model lacks that the claim supposes; empty where it lacks nothing.

    That is the part's premise, and that random experts throughout lose at least the paper's loss.

    `sensitivity`: model -> `text`, nats that each change adds, and `right`, by task and change the
    percentages of right answers.
    """
    if part.premise is not None and (lacking := _lacking(part.premise, root)):
        return lacking
    if part.gate is None:
        return ""
    losses, task = sensitivity.get(model.removeprefix("tiny ")), part.metric.partition(":")[0]
    if losses is None:
        return f"what random experts cost {model} is not known"
    if task in losses["right"]:
        plain, random = (losses["right"][task][level] for level in ("unmodified", "100% random"))
        loss, unit = (plain - random) / 100, "of the answers"
    else:
        loss, unit = math.expm1(losses["text"]["100% random"]), "of perplexity"
    if loss >= part.gate:
        return ""
    return f"random experts cost {task} {loss:.3g} {unit}, and the paper's loss is {part.gate:g}"


def _lacking(premise: Premise, root: Path) -> str:
    rows = check(RowsFile, read_json(root / premise.file, premise.file), premise.file).rows
    found = float(np.mean([row[premise.column] for row in rows]))
    return "" if found >= premise.least else f"{premise.what} is {_rough(found)}: {premise.why}"


@lru_cache(maxsize=64)
def _runs(folder: str) -> list[Run]:
    return load_runs(Path(folder))


def _sides(part: Part, root: Path) -> list[Run]:
    """Return the run that a part is about, and with `versus` the one it is compared with."""
    sides = []
    for where in (part.where, *([] if part.versus is None else [{**part.where, **part.versus}])):
        matches = [run for run in _runs(str(root / str(part.runs))) if selected(run, where)]
        if len(matches) != 1:
            names = ", ".join(run.run_id for run in matches[:3]) or "none"
            raise ValueError(f"{dict(where)} picks {len(matches)} runs: {names}.")
        sides.append(matches[0])
    return sides


def _of_documents(new: Run, old: Run | None, metric: str, task: str | None) -> Samples:
    """Return the samples of a metric over the documents that both runs have.

    `metric` is a speed metric, else a task (or `task:metric`) whose answers or texts are compared.
    Documents of one batch are one sample of speed.
    Raises ValueError where the records lack it.
    """
    if task is None and len(new.tasks) != 1:
        raise ValueError(f"{new.run_id} has several tasks: the part has to name its `task`.")
    task = task or new.tasks[0]
    runs = [new] if old is None else [new, old]
    kind: Kind = "figures"
    speed = [run.speed.get(task, {}) for run in runs]
    sides: list[Any] = [figures.get(metric) for figures in speed]
    if all(side is not None for side in sides):
        both = set.intersection(*map(set, sides))
        sides = [
            independent({d: (v, f.get(BATCH, {}).get(d)) for d, v in side.items() if d in both})
            for side, f in zip(sides, speed, strict=True)
        ]
    else:
        score = find_score(new, metric)
        if score is None:
            metrics = [*new.speed.get(task, {}), *new.results]
            raise unknown_name_error(
                f"{new.run_id}: no document of task {task} has it: metric", metric, metrics
            )
        task = metric.partition(":")[0]
        sides = [run.samples.get(task, {}).get(score.key, {}) for run in runs]
        scores = [value for side in sides for value in side.values()]
        right_or_wrong = all(value in (0, 1) for value in scores)
        kind = "answers" if old is not None and right_or_wrong else "figures"
    documents = [doc for doc in sides[0] if all(doc in side for side in sides)]
    tokens = None
    if isinstance(next(iter(sides[0].values()), None), list):
        if old is None:
            raise ValueError("a perplexity is compared with another run's: `versus` is missing.")
        if other := [doc for doc in documents if sides[0][doc][1] != sides[1][doc][1]]:
            raise ValueError(
                f"{new.run_id}: {task} {other[0]} is another document in {old.run_id}."
            )
        kind = "texts"
        tokens = np.asarray([sides[0][doc][1] * TOKENS_PER_WORD for doc in documents])
        sides = [{doc: side[doc][0] for doc in documents} for side in sides]
    values = [np.asarray([float(side[doc]) for doc in documents]) for side in sides]
    before = values[1] if len(values) > 1 else np.empty(0)
    return Samples(kind=kind, new=values[0], old=before, unit="documents", tokens=tokens)


def _of_whole(new: Run, old: Run | None, metric: str) -> Samples:
    """Return a metric of two whole runs, as one sample of kind `traces`."""
    values = []
    for run in (new, *([] if old is None else [old])):
        value = metric_value(run, metric).number
        if value is None:
            raise unknown_name_error("metric", metric, [*run.moecache["totals"]])
        values.append(value)
    return Samples(
        kind="traces", new=np.asarray(values[:1]), old=np.asarray(values[1:]), unit="runs"
    )


def _of_rows(part: Part, root: Path) -> Samples:
    assert part.rows is not None, "a part without rows"
    file = part.rows.file
    rows = check(RowsFile, read_json(root / file, file), file).rows
    names = [part.rows.new, *([part.rows.old] if part.rows.old else [])]
    for name in names:
        if name not in rows[0]:
            raise unknown_name_error(f"{file}: the column", name, rows[0])
    cells = [[row[name] for name in names] for row in rows]
    complete = [values for values in cells if all(isinstance(v, int | float) for v in values)]
    new, *old = np.asarray(complete, dtype=np.float64).reshape(-1, len(names)).T
    return Samples(kind="figures", new=new, old=old[0] if old else np.empty(0), unit=part.rows.unit)


def _of_cells(part: Part, root: Path) -> Samples:
    """Return a metric's samples by trace: replays of real routing have no documents."""
    sides = []
    for where in (part.where, {**part.where, **(part.versus or {})}):
        side: dict[str, float] = {}
        for cell in _cells(str(root / str(part.cells))):
            setting, value = cell["cell"], cell.get(part.metric)
            if any(setting.get(key) != required for key, required in where.items()):
                continue
            if "trace" not in setting:
                raise ValueError(f"cell={shown(setting)} does not say its `trace`.")
            if isinstance(value, bool) or not isinstance(value, int | float):
                metrics = [name for name, field in cell.items() if isinstance(field, int | float)]
                raise unknown_name_error("metric", part.metric, metrics)
            side[str(setting["trace"])] = float(value)
        sides.append(side)
    traces = [name for name in sides[0] if name in sides[1]]
    new, old = (np.asarray([side[name] for name in traces]) for side in sides)
    old = np.empty(0) if part.versus is None else old
    return Samples(kind="traces", new=new, old=old, unit="traces")


@lru_cache(maxsize=4)
def _cells(path: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = parse_json(read_gzip(path, path), path)
    check_as(list[TraceCell], cells, path)
    return cells


# --- verdicts ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A part with its estimate. `p` is the verdict's, corrected over the claim's parts."""

    part: Part
    estimate: Estimate
    p: float
    verdict: str
    model: str
    """What its runs are of."""
    gate: str
    """Why the models cannot answer it; empty where they can."""
    least_p: float | None = None
    """The smallest p-value the sample could give, uncorrected; None where nothing is tested."""
    is_small: bool = False
    """Whether a test has too few samples to keep its level."""
    p_of_all: float | None = None
    """`p` corrected over all parts of all claims; None for parts that do not count, or are open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A claim's verdict over its counted answers."""

    claim: Claim
    answers: tuple[Answer, ...]
    verdict: str
    told: str
    """By what the size differs, which regimes it depends on, what is undecided or not testable."""

    @property
    def counted(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.part.aside]


def read_claims(path: Path) -> Claims:
    """Read a claims file. Raises ValueError naming the field that does not fit."""
    return check(Claims, read_yaml(path, f"claims file {path.name}"), f"claims file {path.name}")


def answer(claims: Claims, root: Path) -> list[Verdict]:
    """Return every claim's verdict from the runs under `root`. Raises ValueError without runs."""
    asked = [(claim, part) for claim in claims.claims for part in claim.parts]
    sensitivity = {} if claims.sensitivity is None else read_json(root / claims.sensitivity, "")
    estimates, models = [], []
    for claim, part in asked:
        try:
            estimates.append(measure(part, root))
            models.append(rests_on(part, root))
        except (ValueError, OSError) as error:
            raise ValueError(f"claim {claim.id}, {part.what!r}: {error}") from None
    parts = [part for _, part in asked]
    chances = list(map(_chances, estimates, parts))
    of_all = _corrected(chances, [index for index, part in enumerate(parts) if _counts(part)])
    # Parts that the verdict does not count are a family of their own; traces are not tested.
    families: dict[tuple[str, bool], list[int]] = {}
    for index, (claim, part) in enumerate(asked):
        if part.cells is None:
            families.setdefault((claim.id, part.aside), []).append(index)
    for places in families.values():
        chances = _corrected(chances, places)
    answers: dict[str, list[Answer]] = {claim.id: [] for claim in claims.claims}
    each = zip(asked, estimates, models, chances, of_all, strict=True)
    for (claim, part), estimate, model, own, overall in each:
        gate = gate_of(part, model, sensitivity, root)
        answers[claim.id].append(_answer(part, estimate, model, gate, own, overall, claims.alpha))
    return [_verdict(claim, answers[claim.id]) for claim in claims.claims]


def _counts(part: Part) -> bool:
    """Whether a part is tested and counts towards its claim's verdict."""
    return _is_tested(part) and not part.aside


def _is_tested(part: Part) -> bool:
    return part.cells is None and not part.whole


def _chances(estimate: Estimate, part: Part) -> tuple[float, float]:
    """Return the chances of this figure if the truth lay outside the bounds, and inside them."""
    expect, inside, outside = part.expect, [], []
    if expect.above is not None:
        inside.append(estimate.p_above(expect.above))
        outside.append(estimate.p_below(expect.above))
    if expect.below is not None:
        inside.append(estimate.p_below(expect.below))
        outside.append(estimate.p_above(expect.below))
    return max(inside), min(1.0, min(outside) * len(outside))


def _corrected(chances: Chances, places: Sequence[int]) -> Chances:
    """Return the chances, those at `places` with Holm's correction."""
    corrected = list(chances)
    sides = [holm([chances[index][side] for index in places]) for side in (0, 1)]
    for index, inside, outside in zip(places, *sides, strict=True):
        corrected[index] = inside, outside
    return corrected


def _answer(
    part: Part,
    estimate: Estimate,
    model: str,
    gate: str,
    chances: tuple[float, float],
    of_all: tuple[float, float],
    alpha: float,
) -> Answer:
    """Judge an estimate by its corrected chances; a closed gate leaves nothing to answer."""
    answered = partial(Answer, part=part, estimate=estimate, model=model, gate=gate)
    above, below = _ends(part)
    if estimate.nothing_changed and not above < estimate.figure < below:
        return answered(p=1.0, verdict=GATED if gate else FAILS)
    if part.whole:
        return answered(p=1.0, verdict=INSIDE if above < estimate.figure < below else OUTSIDE)
    inside, outside = chances
    verdict, p, p_of_all = UNDECIDED, min(inside, outside), None
    if inside <= alpha and above < estimate.low and estimate.high < below:
        verdict, p, p_of_all = HOLDS, inside, of_all[0]
    elif outside <= alpha and (estimate.high < above or estimate.low > below):
        verdict, p, p_of_all = FAILS, outside, of_all[1]
    bounds = [bound for bound in (part.expect.above, part.expect.below) if bound is not None]
    least = [x for x in map(estimate.least_p, bounds) if x is not None]
    return answered(
        p=p,
        verdict=GATED if gate else verdict,
        least_p=max(least, default=None) if _is_tested(part) else None,
        p_of_all=p_of_all if _counts(part) and not gate else None,
        is_small=_is_tested(part) and any(map(estimate.is_small, bounds)),
    )


def _verdict(claim: Claim, answers: Sequence[Answer]) -> Verdict:
    """Return a claim's verdict: by regime all that shows a direction has to hold, then sizes."""
    verdict, told = _of_regimes([answer for answer in answers if not answer.part.aside])
    if claim.untestable is not None:
        verdict, told = OPEN, claim.untestable
    return Verdict(claim=claim, answers=tuple(answers), verdict=verdict, told=told)


def _of_regimes(counted: Sequence[Answer]) -> tuple[str, str]:
    by_regime: dict[str, list[Answer]] = {}
    for answer in counted:
        by_regime.setdefault(answer.part.regime, []).append(answer)
    names: dict[str, list[str]] = {HOLDS: [], FAILS: [], UNDECIDED: [], GATED: []}
    for regime, parts in by_regime.items():
        names[_direction(parts)].append(regime)
    gates = dict.fromkeys(a.gate for a in counted if a.gate and a.part.regime in names[GATED])
    if not names[HOLDS]:
        if names[FAILS]:
            failing = (a for a in counted if a.verdict == FAILS and not a.part.size)
            return FAILS, ", ".join(a.part.what for a in failing)
        if names[UNDECIDED]:
            return TOO_FEW, "; ".join([_undecided(counted), *gates])
        return OPEN, "; ".join(gates) or "no part of it counts"
    sizes = [
        a for a in counted if a.part.size and a.verdict == FAILS and a.part.regime in names[HOLDS]
    ]
    told = [f"{a.part.what}: {_rough(a.estimate.figure)}" for a in sizes]
    if names[FAILS] or names[UNDECIDED] or names[GATED]:
        split = [f"{word}: {' / '.join(each)}" for word, each in names.items() if each]
        sized = [f"size differs: {', '.join(told)}"] if told else []
        return DEPENDS, "; ".join([*split, *gates, *sized])
    open_parts = [a.part.what for a in counted if a.verdict == UNDECIDED]
    told += [f"{UNDECIDED}: {', '.join(open_parts)}"] if open_parts else []
    return SIZE if sizes else HOLDS, "; ".join(told)


def _undecided(parts: Sequence[Answer]) -> str:
    """Return the figures that these samples leave undecided, and the most documents one asks for.

    A figure at its bound asks for no number.
    """
    undecided = [answer for answer in parts if answer.verdict == UNDECIDED]
    told = ", ".join(f"{a.part.what}: {_rough(a.estimate.figure)}" for a in undecided)
    asked = [number for each in undecided if (number := _needed(each)) is not None]
    without = len(undecided) - len(asked)
    most = [f"the largest asks for {max(asked):,} documents"] if asked else []
    none = [f"no number decides {without} of {len(undecided)}"] if without else []
    return "; ".join([told, ", ".join([*most, *none])])


def _needed(answer: Answer) -> int | None:
    """Return how many samples a part asks for (*for 80%*); None where no number decides it."""
    expect = answer.part.expect
    bounds = [end for end in (expect.above, expect.below) if end is not None]
    needed = answer.estimate.documents_needed(bounds) if _is_tested(answer.part) else None
    return None if needed is None else max(needed, 2)


def _is_uncounted(answer: Answer) -> bool:
    """Whether a sample that cannot answer has a figure other than the claim's."""
    above, below = _ends(answer.part)
    is_open = answer.verdict == UNDECIDED and not answer.part.size
    return is_open and not above < answer.estimate.figure < below


def _ends(part: Part) -> tuple[float, float]:
    above, below = part.expect.above, part.expect.below
    return -math.inf if above is None else above, math.inf if below is None else below


def _direction(parts: Sequence[Answer]) -> str:
    """Return whether what shows a direction holds in one regime, or why that is not shown.

    A part that fails is enough. A part that the models cannot answer leaves open what the others
    say, whatever the number of documents; so does, until there are enough, a part whose figure is
    not the claim's though the sample cannot answer.
    """
    asked = [answer for answer in parts if not answer.part.size] or parts
    words = {answer.verdict for answer in asked}
    if FAILS in words:
        return FAILS
    if GATED in words:
        return GATED
    return HOLDS if HOLDS in words and not any(map(_is_uncounted, asked)) else UNDECIDED


# --- the page ---

_HOW = """\
A part is answered where the figure's 95% interval lies wholly inside (or outside) of what the claim
says and the test's p, corrected over the claim's parts (Holm), is at most {alpha:g}. Tests: for
right or wrong answers McNemar's exact test against 0, and Tango's score test (with his interval)
against a margin; for times, rates and log-likelihoods Hall's test of a mean of skewed samples, over
the documents that both runs have, with the interval that it does not reject. *Few* marks tests of
fewer than {answers} answers, or of fewer than {samples} other samples that do not all lie on one
side of what is claimed: their probability of error may be twice the nominal. *Least p* is the
smallest p that as many answers could have given. *p of all* is the p corrected over all {parts}
tested parts of all claims. *For 80%* is how many samples would detect the measured figure in four
of five cases (one-sided 5%, one part alone, before any correction), by a normal approximation:
where a few samples lie far from the others, the tests ask for more. A figure at its bound has no
such number. Parts in *italics* are reported but do not count towards the verdict. Perplexities are
at {per_word:g} tokens a word, as in papers' tokenizers (`tiny`'s has 2.04). A part is *undecided*
if its sample cannot answer it, and *not testable* if the models cannot: random experts throughout
would lose less than the paper reports, or what the claim supposes is missing. Whole runs lie
*inside* or *outside* of what is claimed, without a test.

A claim has one of six verdicts. *Holds*: every answered part holds, the models can answer each,
and no undecided part has a figure that contradicts the claim. *Direction holds, size differs*: the
answered parts about the direction hold, and a part about the size does not (the difference
follows). *Depends on the regime*: it holds in some of the tested settings or halves, and fails, is
undecided or is not testable in others. *Does not hold*: a part about the direction fails in every
setting that the runs answer. *Undecided: too few documents*: no setting holds or fails, as no part
is answered or the figure of an undecided one contradicts the claim; the number is the most that an
undecided part asks for (*for 80%*). *Not testable here*: no number of documents would answer it,
as the models lack what it supposes, or as it reads another claim's figure again.

p values speak of other documents of the same kind, never of another model. There are two models:
`tiny`, by version, and, for some parts on quality, Gemma 3 270M carved into experts."""
_COLUMNS = (
    *("compared", "figure", "95% interval", "claimed", "p", "least p", "p of all"),
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
        models = ", ".join(dict.fromkeys(answer.model for answer in each.counted))
        cells = [link, statement, claim.paper, _ours(each), verdict, models]
        headlines.append(line([cell.strip() for cell in [*cells, survival if answered else ""]]))
        cells = [claim.id, claim.regime, verdict, claim.why]
        reasons.append(line([cell.strip() for cell in cells]))
        figures += ["", f"### {claim.id}", "", f"{claim.claim}: **{each.verdict}**.", ""]
        if each.answers:
            figures += [line(_COLUMNS), "|---|--:|--:|---|--:|--:|--:|---|--:|---|---|---|"]
            figures += map(_row, each.answers)
        else:
            figures.append(f"No figures: {each.told}.")

    counts = Counter(each.verdict for each in verdicts)
    told = "; ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    tested = [a for each in verdicts for a in each.answers if _counts(a.part)]
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
        f"than {FEW_DOCUMENTS}: "
        f"{sum(a.estimate.samples.new.size < FEW_DOCUMENTS for a in tested)}. "
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
        _HOW.format(
            alpha=claims.alpha,
            parts=len(tested),
            answers=LEAST_ANSWERS,
            samples=LEAST_SAMPLES,
            per_word=TOKENS_PER_WORD,
        ),
        *figures,
    ]
    return "\n".join(lines) + "\n"


class _Told:
    """Formats a figure with its interval for the templates of `Claim.ours`."""

    def __init__(self, estimate: Estimate) -> None:
        self._found = estimate

    def __format__(self, spec: str) -> str:
        estimate = self._found
        values = [estimate.figure, estimate.low, estimate.high]
        one = float(estimate.form == "ratio")
        if spec == "inverse":
            values = [1 / value if value else math.inf for value in values]
        elif spec in ("gain", "loss"):
            gains = [100 * (value - one) for value in values]
            values = gains if spec == "gain" else [0.0 - gain for gain in gains]
        elif spec:
            raise unknown_name_error("ours", f"{{:{spec}}}", ["{:inverse}", "{:gain}", "{:loss}"])
        figure, *ends = values
        percent = "%" if spec in ("gain", "loss") else ""
        return f"{_rough(figure)}{percent} ({_rough(min(ends))} to {_rough(max(ends))})"


def _rough(value: float) -> str:
    """Return three significant digits, for the first screen."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:.0f}"


def _ours(verdict: Verdict) -> str:
    claim = verdict.claim
    if not claim.ours:
        headline = verdict.answers[:1]
        return "".join(f"{answer.part.what}: {_Told(answer.estimate)}" for answer in headline)
    try:
        return claim.ours.format(*(_Told(answer.estimate) for answer in verdict.answers))
    except (IndexError, KeyError, AttributeError):
        allowed = f"allowed: {{0}} to {{{len(verdict.answers) - 1}}}"
        why = f"claim {claim.id}: ours={claim.ours!r} names a part that is not there"
        raise ValueError(f"{why}; {allowed}.") from None


def _row(answer: Answer) -> str:
    part, estimate, expect = answer.part, answer.estimate, answer.part.expect
    style = "*" if part.aside else ""
    figure, low, high = (
        f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"
        for value in (estimate.figure, estimate.low, estimate.high)
    )
    measured = part.metric if part.rows is None else part.rows.new
    measured += "" if part.form == "value" else f", {part.form}"
    if expect.above is not None and expect.below is not None:
        claimed = f"{expect.above:g} to {expect.below:g}"
    elif expect.above is not None:
        claimed = f"above {expect.above:g}"
    else:
        claimed = f"below {expect.below:g}"
    if part.runs is not None:
        source = f"[{part.runs}]({part.runs}/table.md)"
    else:
        path = part.rows.file if part.rows is not None else str(part.cells)
        source = f"[{Path(path).parent}]({path})"
    p = None if answer.least_p is None or estimate.nothing_changed else answer.p
    chances = map(_chance, (p, answer.least_p, answer.p_of_all))
    by = estimate.by + (", *few*" if answer.is_small else "")
    cells = [f"{style}{part.what}{style}", figure, f"{low} to {high}", f"{measured} {claimed}"]
    verdict = answer.verdict + (f": {answer.gate}" if answer.gate else "")
    needed = _needed(answer)
    enough = "" if needed is None else f"{needed:,}"
    return line([*cells, *chances, by, enough, answer.model, verdict, source])


def _chance(p: float | None) -> str:
    if p is None:
        return ""
    return "<0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.001 else f"{p:.3f}"
