"""Published losses of accuracy where experts are dropped, replaced, removed or stored coarsely.

The rows are results/published_losses/rows.csv, whose README has the dictionary of its columns. A
rule's forecast is the median share of right answers that the rows like it keep, every model
counting once, with the range of eight rows in ten. Nothing finer beats it on models left out
(judged.csv), so a rule published on fewer than three models has no forecast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.files import read_csv, shipped_dir
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.real_model import RealModel
from moecache_plan.data import data

RULES = {rule: fields["words"] for rule, fields in data("rules").items()}
"""Class of rule -> its words."""
ALGORITHMS = {
    name: rule for rule, fields in data("rules").items() for name in fields.get("algorithms", ())
}
"""Lossy algorithm -> its class of rule."""
_ALSO = {"reap": "prune", "arcc": "arcchallenge", "arce": "arceasy", "gpqadiamond": "gpqa"}
"""Other names of rules and tasks, in lower case and without marks."""
GENERATE, CHOICE, TEXT = KINDS = ("generate", "choice", "text")
SHARES = ("accuracy", "relative_accuracy")
"""Metrics that are shares of right answers."""
LEAST_MODELS = 3
NOISE = 2.0
"""Points (rms) by which equal configurations of one source differ: SpecMD's Table 1, 12 pairs."""
LEVEL = 0.8
_Z = 1.2815515594463
_OF_CHANGED = ((0.3, "up to 30% changed"), (0.55, "30 to 55% changed"), (1, "over 55% changed"))
_OF_RESIDENT = ((0.25, "up to a quarter in memory"), (1, "over a quarter in memory"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One published pair of scores: a model as it is, and under a rule."""

    model: str
    experts: int | None
    top_k: int | None
    rule: str
    setting: str
    share: float | None
    """The share of experts removed, or of executed experts changed."""
    share_of: str
    """`experts` or `executed`; empty where the share is not known."""
    resident: float | None
    """The share of experts in memory."""
    kind: str
    task: str
    metric: str
    before: float
    after: float
    n: int | None
    source: str
    exactness: str

    @property
    def is_share(self) -> bool:
        """Whether the scores are shares of right answers."""
        return self.metric in SHARES and self.kind != TEXT and self.before > 0

    @property
    def kept(self) -> float:
        """The share of right answers that is kept."""
        return self.after / self.before

    @property
    def points(self) -> float:
        return 100 * (self.before - self.after)

    @property
    def amount(self) -> str:
        """How much was changed, in words; empty where the source does not say."""
        return amount(self.share, self.resident)


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What rows like one kept of their right answers: the median, and eight in ten of new rows."""

    kept: float
    low: float
    high: float
    rows: int
    models: int
    of: str
    """Whose rows they are, in words."""

    def points(self, before: float) -> tuple[float, float, float]:
        """Return the points lost of a score: the median, the least and the most.

        The range is never narrower than the sources' own noise.
        """
        floor = _Z * NOISE / 100 / before
        ends = (self.kept, max(self.high, self.kept + floor), min(self.low, self.kept - floor))
        lost = [100 * before * (1 - kept) for kept in ends]
        return lost[0], max(lost[1], 100 * (before - 1)), min(lost[2], 100 * before)


def amount(share: float | None, resident: float | None) -> str:
    """Return the words for a share of experts changed, or else for a share in memory."""
    value, words = (resident, _OF_RESIDENT) if share is None else (share, _OF_CHANGED)
    if value is None:
        return ""
    return next(text for most, text in words if value <= most)


@cache
def shipped() -> tuple[Loss, ...]:
    """Return the rows that ship."""
    return read_losses("rows.csv")


def read_losses(file: str | Path) -> tuple[Loss, ...]:
    """Return a CSV's rows: a shipped one's by its name."""
    kinds: dict[str, Any] = dict.fromkeys(("experts", "top_k", "n"), int)
    kinds |= dict.fromkeys(("share", "resident", "before", "after"), float)
    names = [field.name for field in fields(Loss)]
    return tuple(Loss(**{name: row[name] for name in names}) for row in _table(file, kinds))


def _table(file: str | Path, kinds: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Yield a CSV's rows: texts, and in the columns of `kinds` numbers, or None for no cell."""
    path = shipped_dir("results/published_losses") / file
    for row in read_csv(path, str(path)):
        numbers = {name: kind(row[name]) if row[name] else None for name, kind in kinds.items()}
        yield {**row, **numbers}


@cache
def here() -> tuple[dict[str, Any], ...]:
    """Return what the shipped model and the carved one lose under each rule here.

    From here.csv: `model`, `rule`, `class`, `task`, `kind`, `capacity`, `changed` (the share of
    the router's choices not executed), `documents`, `right` (a share), and `points` lost to the
    lossless run of the same documents.
    """
    kinds = {"documents": int, "changed": float, "right": float, "points": float}
    return tuple(_table("here.csv", kinds))


@cache
def judged() -> dict[tuple[str, str], dict[str, float]]:
    """Return (rule, kind) -> how far off forecasts of its rows were, each without its model.

    From judged.csv: `rows`, `covered` (the share within their ranges), `median_error` in points,
    and `no_loss_error`, that of a forecast of no loss.
    """
    kinds = {"rows": int, "covered": float, "median_error": float, "no_loss_error": float}
    rows = _table("judged.csv", kinds)
    return {(row["rule"], row["kind"]): {name: row[name] for name in kinds} for row in rows}


# --- the forecast ---


def band(rows: Iterable[Loss], of: str = "") -> Band | None:
    """Return the band of rows, None where they are of fewer than three models.

    Quantiles over rows of which each model's weigh one together, widened by sqrt(1 + 1 / M) for
    M models, as the model asked about is one more.
    """
    by_model: dict[str, list[float]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row.kept)
    count = len(by_model)
    if count < LEAST_MODELS:
        return None
    values = [(value, 1 / len(kept)) for kept in by_model.values() for value in kept]
    centre, low, high = _quantiles(values, (0.5, (1 - LEVEL) / 2, (1 + LEVEL) / 2))
    wider = math.sqrt(1 + 1 / count)
    ends = (centre - wider * (centre - low), centre + wider * (high - centre))
    return Band(
        kept=centre, low=max(ends[0], 0), high=ends[1], rows=len(values), models=count, of=of
    )


def _quantiles(values: Sequence[tuple[float, float]], at: Sequence[float]) -> list[float]:
    xs, weights = zip(*sorted(values), strict=True)
    middles = (np.cumsum(weights) - np.asarray(weights) / 2) / sum(weights)
    return [float(x) for x in np.interp(at, middles, xs)]


# --- what is asked of one model ---


def rules_of(name: str) -> list[str]:
    """Return the classes of rule of a class's name, a lossy algorithm's or a composition's.

    Raises ValueError for another name, and for a composition that loses nothing.
    """
    if name in RULES and name != "lossless":
        return [name]
    if name in ALGORITHMS:
        return [ALGORITHMS[name]]
    try:
        policy = load_policy(name)
    except ValueError as error:
        names = {*RULES, *ALGORITHMS} - {"lossless"}
        raise unknown_name_error("--lossy", name, names) from error
    choices = [policy.routing, policy.miss]
    lossy = [choice.name for choice in choices if not choice.algorithm.is_lossless]
    if not lossy:
        raise ValueError(f"--lossy={name!r} is lossless: it has the unmodified model's answers.")
    return list(dict.fromkeys(ALGORITHMS[each] for each in lossy if each in ALGORITHMS))


def known_names(lossy: str, task: str) -> tuple[str, str]:
    """Return a rule and a task as they are called here: REAP is `prune`, ARC-C `arc_challenge`.

    What is no rule's name, as a composition's path, stays as typed.
    """
    rule = re.sub("[- ]", "_", lossy.strip().lower())
    rule = _ALSO.get(rule, rule)
    spelled = {re.sub("_", "", name): name for name in _kinds()}
    name = re.sub("[^a-z0-9]", "", task.lower().replace("+", "plus"))
    is_rule = rule in RULES or rule in ALGORITHMS
    return rule if is_rule else lossy, spelled.get(_ALSO.get(name, name), task)


def kind_of(task: str) -> str:
    """Return the kind of a task: as published, or the kind itself. Raises ValueError for others."""
    if task not in _kinds():
        raise unknown_name_error("--task", task, sorted(_kinds()))
    return _kinds()[task]


@cache
def _kinds() -> dict[str, str]:
    kinds = {row.task: row.kind for row in shipped() if row.is_share}
    return {**kinds, GENERATE: GENERATE, CHOICE: CHOICE, "gpqa": CHOICE}


def published(
    model: RealModel, lossy: str, *, resident: float | None = None, task: str = GENERATE
) -> list[dict[str, Any]]:
    """Return what a lossy rule was published to lose, and loses here: a report a class of rule.

    Args:
        model: The model asked about; nearest are those of as many experts and as many a token.
        lossy: A class of rule (`prune`), an algorithm (`cache_prior`) or a composition.
        resident: The share of its experts in memory.
        task: A published task (`gsm8k`), or its kind (`generate`, `choice`).
    """
    return [_of_rule(model, rule, lossy, resident, task) for rule in rules_of(lossy)]


def _of_rule(
    model: RealModel, rule: str, lossy: str, resident: float | None, task: str
) -> dict[str, Any]:
    kind = kind_of(task)
    rows = [row for row in shipped() if row.is_share]
    alike = [row for row in rows if row.rule == rule and row.kind == kind]
    # Rules of a cache have their amount by what is resident; of the others nothing says it.
    by_resident = any(row.share is None and row.resident is not None for row in alike)
    asked = amount(None, resident if by_resident else None)
    chosen = [row for row in alike if asked and row.amount == asked]
    asked = asked if chosen else ""
    found = band(chosen, f"{rule}, {kind}, {asked}") or band(alike, f"{rule}, {kind}")
    befores = [row.before for row in rows if row.task == task and row.model == model.name]
    befores = befores or [row.before for row in alike if row.task == task]
    befores = befores or [row.before for row in alike]
    before = median(befores) if befores else 1.0
    by_model: dict[str, list[Loss]] = {}
    for row in alike:
        by_model.setdefault(row.model, []).append(row)
    nearest = [_near(model, each, asked, task) for each in by_model.values()]
    nearest.sort(key=lambda each: (not each["is_same"], -len(each["of"]), each["octaves"]))
    own = [row for row in here() if row["class"] == rule and row["kind"] == kind]
    # Our own losses of the rule asked for by name, or else of its class.
    named = [row for row in own if lossy in re.split(r"[ =]", row["rule"])]
    forecast: dict[str, Any] | None = None
    if found is not None:
        middle, least, most = found.points(before)
        counts = {"rows": found.rows, "models": found.models, "of": found.of}
        forecast = {"points": middle, "least": least, "most": most, **counts}
    return {
        "rule": rule,
        "words": RULES[rule],
        "lossy": lossy,
        "model": model.name,
        "task": task,
        "kind": kind,
        "amount": asked,
        "score": before,
        "forecast": forecast,
        "judged": judged().get((rule, kind)),
        "nearest": nearest[:3],
        "here": named or own,
        "noise_points": NOISE,
    }


def _near(model: RealModel, rows: Sequence[Loss], asked: str, task: str) -> dict[str, Any]:
    """Return a published model's rows, the points they lost, and how unlike the model asked it is.

    Of the task and the amount asked where it has such rows; `of` says which of both it has.
    `octaves` is the distance of its numbers of experts; an unknown one counts as two.
    """
    pairs = ((model.num_experts, rows[0].experts), (model.top_k, rows[0].top_k))
    apart = sum(abs(math.log2(ours / theirs)) if theirs else 2.0 for ours, theirs in pairs)
    for wanted in ({asked, task}, {asked}, {task}, set[str]()):
        kept = [row for row in rows if wanted <= {row.task, row.amount}]
        if kept:
            break
    points = sorted(row.points for row in kept)
    return {
        "model": rows[0].model,
        "is_same": rows[0].model == model.name,
        "octaves": apart,
        "rows": len(kept),
        "of": sorted(wanted - {""}),
        "median_points": median(points),
        "least_points": points[0],
        "most_points": points[-1],
        "sources": sorted({row.source for row in kept}),
        "settings": [
            {"setting": row.setting, "task": row.task, "before": row.before, "after": row.after}
            | {"n": row.n, "source": row.source, "exactness": row.exactness}
            for row in kept
        ],
    }
