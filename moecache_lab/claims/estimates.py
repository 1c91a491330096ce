"""The figure of a claim's part with its interval and tests, from samples of the files of runs.

A figure is a ratio of means, a difference of means, or a mean. Its samples are documents
(right-or-wrong answers, texts, times) or the rows of an analysis; replays of real traces and whole
runs are too few for a test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.records.files import parse_json, read_gzip, read_json
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.records.schemas import check, check_as
from lm_eval_moecache.report.metrics import BATCH
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run, independent
from lm_eval_moecache.report.runs.schema import RowsFile, TraceCell
from lm_eval_moecache.report.statistics import Floats, answers_interval, documents_needed
from moecache_lab.claims.schema import Part
from moecache_lab.claims.statistics import (
    LEAST_ANSWERS,
    LEAST_SAMPLES,
    accepted_interval,
    margin_test,
    mean_test,
)

TOKENS_PER_WORD = 1.3
"""Papers report perplexity by token, and their tokenizers have 1.2 to 1.4 to a word of such text.

`tiny`'s has 2.04, so that by its own tokens every loss would look a third smaller."""
_TO_TELL = 2.4864749
"""Standard errors to a bound that is passed at 5% in four of five cases: z of 5% and of 20%."""
_MOST = 1e150
"""Ratios and squares of larger values overflow."""
Form = Literal["ratio", "difference", "value"]
NOTHING: Floats = np.empty(0)


class Estimate:
    """The mean of samples, or how those of `new` differ from their pairs in `old`.

    Means are of times, rates and log-likelihoods; subclasses are of other samples. Raises
    ValueError for fewer than two samples (one for traces), for a comparison without an other side,
    and for a ratio to 0.
    """

    of: ClassVar[str] = "figures"
    least: ClassVar[int] = 2
    allowed: ClassVar[tuple[Form, ...]] = ("ratio", "difference", "value")

    def __init__(self, new: Floats, old: Floats, unit: str, form: Form) -> None:
        if form not in self.allowed:
            raise ValueError(f"{self.of} are compared by their {self.allowed[0]}.")
        if new.size < self.least:
            raise ValueError(f"{new.size} {unit} have the figure, which are too few.")
        if form != "value":
            if old.size != new.size:
                raise ValueError(
                    "there is no other side to compare with: `versus`, or the column `old`."
                )
            if max(np.abs(new).max(), np.abs(old).max()) > _MOST:
                raise ValueError(f"a figure is beyond {_MOST:g}, which nobody has measured.")
        self.new, self.unit, self.form = new, unit, form
        self.old = np.zeros_like(new) if form == "value" else old
        self.figure, self.low, self.high = self._interval()
        # So that no test applies.
        self.nothing_changed = type(self) is Estimate and form != "value" and not (new - old).any()

    def _interval(self) -> tuple[float, float, float]:
        """Return the figure, and the ends of its 95% interval."""
        if self.form == "ratio":
            figure = float(self.new.mean() / _divisor(self.old.mean()))
        else:
            figure = float((self.new - self.old).mean())
        return figure, *accepted_interval(figure, self.beyond)

    def beyond(self, bound: float) -> Floats:
        """Return by how much each sample exceeds the bound; a figure at the bound gives mean 0."""
        if self.form == "ratio":
            return self.new - bound * self.old
        return self.new - self.old - bound

    def p_above(self, bound: float, sign: float = 1.0) -> float:
        """Return the chance of a figure as high as this if the truth were `bound`."""
        return mean_test(sign * self.beyond(bound))

    def p_below(self, bound: float) -> float:
        """Return the chance of a figure as low as this if the truth were `bound`."""
        return self.p_above(bound, -1.0)

    def is_small(self, bound: float) -> bool:
        """Whether there are fewer samples than the test against `bound` needs to keep its level.

        Never where every sample lies on the same side of the bound: as under the virtual clock,
        whose figures are nearly equal.
        """
        beyond = self.beyond(bound)
        return self.new.size < LEAST_SAMPLES and float(beyond.min()) * float(beyond.max()) <= 0

    def documents_needed(self, bounds: Sequence[float]) -> int | None:
        """Return how many samples separate this figure from the nearest bound, were it the truth.

        In four of five cases, one-sided at 5%, before any correction. None for traces, and where no
        number does.
        """
        distances = {bound: abs(float(self.beyond(bound).mean())) for bound in bounds}
        nearest = min(bounds, key=distances.__getitem__)
        return self._needed(nearest, distances[nearest]) if distances[nearest] else None

    def _needed(self, bound: float, distance: float) -> int | None:
        spread = float(self.beyond(bound).std(ddof=1))
        return max(math.ceil((_TO_TELL * spread / distance) ** 2), 2)

    @property
    def by(self) -> str:
        """The test and its samples, in words."""
        if self.nothing_changed:
            return f"equal in all {self.new.size} {self.unit}"
        return f"mean of {self.new.size} {self.unit}"


class Texts(Estimate):
    """A ratio of perplexities: `new` and `old` are log-likelihoods of texts of `tokens`."""

    of, allowed = "perplexities", ("ratio",)

    def __init__(self, new: Floats, old: Floats, unit: str, form: Form, tokens: Floats) -> None:
        self.tokens = tokens
        super().__init__(new, old, unit, form)

    def _interval(self) -> tuple[float, float, float]:
        figure = float(np.exp((self.old - self.new).sum() / self.tokens.sum()))
        return figure, *accepted_interval(figure, self.beyond)

    def beyond(self, bound: float) -> Floats:
        # The search for an interval's end may pass 0, below which no perplexity lies.
        return self.old - self.new - math.log(max(bound, 1e-12)) * self.tokens


class Answers(Estimate):
    """A difference of shares of right answers: `new` and `old` are 0 or 1 by document."""

    of, allowed = "answers", ("difference",)

    @property
    def changes(self) -> tuple[int, int]:
        """Number of answers won and lost."""
        return int(np.sum(self.new > self.old)), int(np.sum(self.new < self.old))

    def _interval(self) -> tuple[float, float, float]:
        low, high = answers_interval(*self.changes, self.new.size)
        return float(np.mean(self.new) - np.mean(self.old)), low, high

    def p_above(self, bound: float, sign: float = 1.0) -> float:
        return margin_test(*self.changes, self.new.size, bound, sign)

    def is_small(self, bound: float) -> bool:
        return self.new.size < LEAST_ANSWERS

    def _needed(self, bound: float, distance: float) -> int | None:
        changed = sum(self.changes) / self.new.size
        return max(documents_needed(min(distance, 1.0), changed), 2)

    @property
    def by(self) -> str:
        won, lost = self.changes
        return f"paired answers, {lost} lost and {won} won of {self.new.size}"


class Traces(Estimate):
    """Figures of replayed traces or whole runs: the interval is their range, and none is tested.

    p is 0 where all lie beyond the bound, else 1.
    """

    least = 1

    def _interval(self) -> tuple[float, float, float]:
        ratio = self.form == "ratio"
        figures = self.new / _divisor(self.old) if ratio else self.new - self.old
        return float(figures.mean()), float(figures.min()), float(figures.max())

    def p_above(self, bound: float, sign: float = 1.0) -> float:
        nearest = self.low if sign > 0 else self.high
        return 0.0 if sign * (nearest - bound) > 0 else 1.0

    def is_small(self, bound: float) -> bool:
        return False

    def _needed(self, bound: float, distance: float) -> int | None:
        return None

    @property
    def by(self) -> str:
        of_runs = self.unit == "runs"
        return "whole runs, untested" if of_runs else f"all of {self.new.size} traces"


def _divisor(values: Any) -> Any:
    if not np.all(values):
        raise ValueError("versus: it is 0, to which there is no ratio. Allowed: form=difference.")
    return values


# --- the samples of a part: documents of two runs, rows of an analysis, cells of traces ---


def measure(part: Part, root: Path) -> Estimate:
    """Return the estimate of one part's comparison."""
    if part.rows is not None:
        names = [part.rows.new, *([part.rows.old] if part.rows.old else [])]
        new, *old = read_columns(root, part.rows.file, names)
        return Estimate(new, old[0] if old else NOTHING, part.rows.unit, part.form)
    if part.cells is not None:
        return _of_cells(part, root)
    return _of_whole(part, root) if part.whole else _of_documents(part, root)


def rests_on(part: Part, root: Path) -> str:
    """Return the model, and its version, of the runs that a part compares."""
    if part.rows is not None:
        return part.rows.model
    if part.cells is not None:
        return "real routing"
    carved = _sides(part, root)[0].model_args.get("pretrained") == "carved_gemma"
    return "carved Gemma" if carved else "tiny version 4"


def read_columns(root: Path, file: str, names: Sequence[str]) -> Any:
    """Return columns of an analysis's JSON, of the rows that have numbers in all of them."""
    rows = check(RowsFile, read_json(root / file, file), file).rows
    for name in names:
        if name not in rows[0]:
            raise unknown_name_error(f"{file}: the column", name, rows[0])
    cells = [[row[name] for name in names] for row in rows]
    complete = [values for values in cells if all(isinstance(v, int | float) for v in values)]
    return np.asarray(complete, dtype=np.float64).reshape(-1, len(names)).T


@lru_cache(maxsize=64)
def _runs(folder: str) -> list[Run]:
    return load_runs(Path(folder))


def _sides(part: Part, root: Path) -> list[Run]:
    """Return the run that a part is about, and with `versus` the one it is compared with."""
    sides = []
    for where in part.sides:
        matches = [run for run in _runs(str(root / str(part.runs))) if run.matches(where)]
        if len(matches) != 1:
            names = ", ".join(run.run_id for run in matches[:3]) or "none"
            raise ValueError(f"{dict(where)} picks {len(matches)} runs: {names}.")
        sides.append(matches[0])
    return sides


def _of_documents(part: Part, root: Path) -> Estimate:
    """Return the estimate of a metric over the documents that both runs have.

    It is a speed metric, else a task (or `task:metric`) whose answers or texts are compared.
    Documents of one batch are one sample of speed. Raises ValueError where the records lack it.
    """
    runs, metric, task = _sides(part, root), part.metric, part.task
    new = runs[0]
    if task is None and len(new.tasks) != 1:
        raise ValueError(f"{new.run_id} has several tasks: the part has to name its `task`.")
    task = task or new.tasks[0]
    speed = [run.speed.get(task, {}) for run in runs]
    sides: list[Any] = [figures.get(metric) for figures in speed]
    are_answers = False
    if all(side is not None for side in sides):
        both = set.intersection(*map(set, sides))
        sides = [
            independent({d: (v, f.get(BATCH, {}).get(d)) for d, v in side.items() if d in both})
            for side, f in zip(sides, speed, strict=True)
        ]
    else:
        score = new.find_score(metric)
        if score is None:
            metrics = [*new.speed.get(task, {}), *new.results]
            raise unknown_name_error(
                f"{new.run_id}: no document of task {task} has it: metric", metric, metrics
            )
        task = metric.partition(":")[0]
        sides = [run.samples.get(task, {}).get(score.key, {}) for run in runs]
        are_answers = len(runs) > 1 and all(v in (0, 1) for side in sides for v in side.values())
    documents = [doc for doc in sides[0] if all(doc in side for side in sides)]
    unit = "documents"
    if part.documents is not None:
        documents = documents[0 if part.documents == "even" else 1 :: 2]
        unit = f"{part.documents} documents"
    if isinstance(next(iter(sides[0].values()), None), list):
        return _of_texts(part, runs, sides, documents, unit)
    values = [np.asarray([float(side[doc]) for doc in documents]) for side in sides]
    kind = Answers if are_answers else Estimate
    return kind(values[0], values[1] if len(values) > 1 else NOTHING, unit, part.form)


def _of_texts(
    part: Part, runs: Sequence[Run], sides: Sequence[Any], documents: Sequence[str], unit: str
) -> Texts:
    """Return the ratio of two runs' perplexities on the same documents."""
    if len(runs) < 2:
        raise ValueError("a perplexity is compared with another run's: `versus` is missing.")
    if other := [doc for doc in documents if sides[0][doc][1] != sides[1][doc][1]]:
        first, second = (run.run_id for run in runs)
        task = part.metric.partition(":")[0]
        raise ValueError(f"{first}: {task} {other[0]} is another document in {second}.")
    tokens = np.asarray([sides[0][doc][1] * TOKENS_PER_WORD for doc in documents])
    new, old = (np.asarray([float(side[doc][0]) for doc in documents]) for side in sides)
    return Texts(new, old, unit, part.form, tokens)


def _of_whole(part: Part, root: Path) -> Traces:
    """Return a metric of two whole runs."""
    values = []
    for run in _sides(part, root):
        value = run[part.metric].number
        if value is None:
            raise unknown_name_error("metric", part.metric, [*run.moecache["totals"]])
        values.append(value)
    return Traces(np.asarray(values[:1]), np.asarray(values[1:]), "runs", part.form)


def _of_cells(part: Part, root: Path) -> Traces:
    """Return a metric's samples by trace: replays of real routing have no documents."""
    sides = []
    for where in part.sides:
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
    traces = [name for name in sides[0] if all(name in side for side in sides)]
    new, *old = (np.asarray([side[name] for name in traces]) for side in sides)
    return Traces(new, old[0] if old else NOTHING, "traces", part.form)


@lru_cache(maxsize=4)
def _cells(path: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = parse_json(read_gzip(path, path), path)
    check_as(list[TraceCell], cells, path)
    return cells
