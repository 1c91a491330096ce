"""Published losses of accuracy where experts are dropped, replaced, removed or stored coarsely.

The rows are results/published_losses/rows.csv, whose README has the dictionary of its columns. A
rule's forecast is the median share of right answers that the rows like it keep, every model
counting once, with the range of eight rows in ten. Nothing finer beats it on models left out
(`judge`), so a rule published on fewer than three models has no forecast.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.files import read_text, shipped_dir
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.real_model import RealModel

COLUMNS = (
    *("model", "experts", "top_k", "shared", "rule", "setting", "share", "share_of", "resident"),
    *("kind", "task", "metric", "before", "after", "n", "shots", "source", "exactness", "quote"),
)
RULES = {
    "reroute": "routing biased towards resident experts",
    "residents": "routing restricted to resident experts",
    "substitute": "absent experts replaced by residents of similar score",
    "buddy": "absent experts replaced by their buddies",
    "random": "experts replaced at random",
    "drop": "light or absent experts left out",
    "top_k": "fewer experts a token",
    "cascade": "absent experts run at lower precision, or left out",
    "commit": "predicted experts run, whatever the router says",
    "prune": "experts removed from the model",
    "merge": "experts merged into fewer",
    "quantise": "experts stored at fewer bits",
    "lossless": "nothing changed: the noise of the source",
}
"""Class of rule -> its words."""
ALGORITHMS = {
    **dict.fromkeys(("cache_prior", "max_rank", "cumsum", "substitute_cached"), "reroute"),
    **dict.fromkeys(("commit", "pre_gated"), "commit"),
    **dict.fromkeys(("pruning", "drop_rank"), "top_k"),
    **dict.fromkeys(("skip_mass", "skip_ratio", "sensitivity"), "drop"),
    **dict.fromkeys(("drop", "drop_cold", "degrade_zero", "expert_budget"), "drop"),
    **dict.fromkeys(("swap_rank", "substitute_random"), "random"),
    **dict.fromkeys(("cascade", "drop_cascade", "fetch_lowest", "fetch_priority"), "cascade"),
    **{"buddy": "buddy", "substitute_score": "substitute"},
}
"""Lossy algorithm -> its class of rule."""
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
    def family(self) -> str:
        """The first word of the model's name."""
        return re.split(r"[-.\d]", self.model)[0]

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
    return tuple(read_losses(shipped_dir("results/published_losses") / "rows.csv"))


def read_losses(path: Path) -> list[Loss]:
    """Read a CSV of losses.

    Raises ValueError for a file without these columns, and for a cell that is none of its allowed
    values, naming the row.
    """
    what = f"losses={str(path)!r}"
    table = csv.DictReader(io.StringIO(read_text(path, what)))
    if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
        raise ValueError(f"{what} lacks the columns {', '.join(missing)}.")
    rows = []
    for number, cells in enumerate(table, start=2):
        for name, allowed in (("rule", RULES), ("kind", KINDS)):
            if cells[name] not in allowed:
                raise unknown_name_error(f"{what}, line {number}: {name}", cells[name], allowed)
        try:
            rows.append(_loss(cells))
        except ValueError as error:
            raise ValueError(f"{what}, line {number}: {error}") from error
    return rows


def _loss(cells: Mapping[str, str]) -> Loss:
    words = {name: cells[name] for name in ("model", "rule", "setting", "share_of", "kind", "task")}
    words |= {name: cells[name] for name in ("metric", "source", "exactness")}
    numbers = {name: float(cells[name]) if cells[name] else None for name in ("share", "resident")}
    for name, value in numbers.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name}={cells[name]!r} is not a share. Allowed: 0 to 1.")
    counts = {name: int(cells[name]) if cells[name] else None for name in ("experts", "top_k", "n")}
    scores = {name: float(cells[name]) for name in ("before", "after")}
    return Loss(**words, **numbers, **counts, **scores)  # type: ignore[arg-type]


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


Key = Callable[[Loss], tuple[str, ...]]


def of_rule(row: Loss) -> tuple[str, ...]:
    return row.rule, row.kind


def of_amount(row: Loss) -> tuple[str, ...]:
    return row.rule, row.kind, row.amount


FINEST: tuple[Key, ...] = (of_amount, of_rule)
"""What is alike, finest first: the first with three models is taken."""


# --- how far off, on models left out ---


def judge(rows: Sequence[Loss]) -> dict[str, Any]:
    """Forecast every row without its model, and return how far off each kind of forecast is.

    All on the same rows, those for which the finest forecast has three other models.
    """
    scored = [row for row in rows if row.is_share]
    cells: dict[Key, dict[tuple[str, ...], list[Loss]]] = {}
    for key in (*FINEST, _of_kind):
        for row in scored:
            cells.setdefault(key, {}).setdefault(key(row), []).append(row)
    known: dict[tuple[Any, ...], Band | None] = {}

    def without(row: Loss, keys: Sequence[Key]) -> Band | None:
        for key in keys:
            at = (key, key(row), row.model)
            if at not in known:
                known[at] = band(
                    other for other in cells[key][key(row)] if other.model != row.model
                )
            if (found := known[at]) is not None:
                return found
        return None

    told = [row for row in scored if without(row, FINEST)]
    forms: dict[str, Callable[[Loss], Band | None]] = {
        "rule, kind of task, amount": lambda row: without(row, FINEST),
        "rule, kind of task": lambda row: without(row, (of_rule,)),
        "kind of task": lambda row: without(row, (_of_kind,)),
    }
    misses = {name: [_miss(row, form(row)) for row in told] for name, form in forms.items()}
    misses["no loss"] = [_miss(row, None) for row in told]
    nothing = [each["error"] for each in misses["no loss"]]
    ours = misses["rule, kind of task, amount"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row, each in zip(told, ours, strict=True):
        groups.setdefault(of_rule(row), []).append({**each, "nothing": abs(row.points)})
    return {
        "rows": len(rows),
        "models": len({row.model for row in rows}),
        "shares": len(scored),
        "forecast": len(told),
        "forms": {name: _summary(told, each, nothing) for name, each in misses.items()},
        "rules": [
            {
                "rule": rule,
                "kind": kind,
                "rows": len(each),
                "models": len({row.model for row in told if of_rule(row) == (rule, kind)}),
                "median_points": median(row.points for row in told if of_rule(row) == (rule, kind)),
                "median_error": median(one["error"] for one in each),
                "no_loss_error": median(one["nothing"] for one in each),
                "covered": mean(one["covered"] for one in each),
            }
            for (rule, kind), each in sorted(groups.items())
        ],
        "no_forecast": [
            {"rule": rule, "kind": kind, "rows": len(each), "models": len({r.model for r in each})}
            for (rule, kind), each in sorted(cells[of_rule].items())
            if len({row.model for row in each}) < LEAST_MODELS
        ],
        "untested": [
            {"rule": rule, "kind": kind, "rows": len(each)}
            for (rule, kind), each in sorted(cells[of_rule].items())
            if len({row.model for row in each}) == LEAST_MODELS
        ],
        "constant_as_good": mean(
            constant["error"] <= each["error"]
            for constant, each in zip(misses["kind of task"], ours, strict=True)
        ),
        "noise_points": NOISE,
    }


def _of_kind(row: Loss) -> tuple[str, ...]:
    return (row.kind,)


def _miss(row: Loss, found: Band | None) -> dict[str, Any]:
    """Return by how many points a forecast errs, and whether its range holds the row."""
    if found is None:
        return {"error": abs(row.points), "covered": math.nan, "width": 0.0}
    middle, least, most = found.points(row.before)
    covered = least - 1e-9 <= row.points <= most + 1e-9
    return {"error": abs(row.points - middle), "covered": covered, "width": most - least}


def _summary(
    rows: Sequence[Loss], misses: Sequence[Mapping[str, Any]], nothing: Sequence[float]
) -> dict[str, float]:
    errors = [each["error"] for each in misses]
    by_cell: dict[tuple[str, ...], list[float]] = {}
    by_model: dict[str, list[float]] = {}
    for row, each in zip(rows, misses, strict=True):
        by_cell.setdefault((*of_rule(row), row.model), []).append(each["covered"])
        by_model.setdefault(row.model, []).append(each["covered"])
    return {
        "median_error": median(errors),
        "rms_error": math.sqrt(mean(error**2 for error in errors)),
        "within_2": mean(error <= 2 for error in errors),
        "within_5": mean(error <= 5 for error in errors),
        "no_better": mean(e >= n for e, n in zip(errors, nothing, strict=True)),
        "covered": mean(each["covered"] for each in misses),
        "covered_cells": mean(mean(each) for each in by_cell.values()),
        "covered_models": mean(mean(each) for each in by_model.values()),
        "median_width": median(each["width"] for each in misses),
    }


@cache
def judged() -> Mapping[str, Any]:
    """Return how far off the forecasts of the shipped rows are."""
    return judge(shipped())


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
        names = [*(rule for rule in RULES if rule != "lossless"), *ALGORITHMS]
        raise unknown_name_error("--lossy", name, names) from error
    choices = [policy.routing, policy.miss]
    lossy = [choice.name for choice in choices if not choice.algorithm.is_lossless]
    if not lossy:
        raise ValueError(f"--lossy={name!r} is lossless: it has the unmodified model's answers.")
    return list(dict.fromkeys(ALGORITHMS[each] for each in lossy if each in ALGORITHMS))


def kind_of(task: str) -> str:
    """Return the kind of a task: as published, or the kind itself. Raises ValueError for others."""
    kinds = {row.task: row.kind for row in shipped() if row.is_share}
    kinds |= {GENERATE: GENERATE, CHOICE: CHOICE}
    if task not in kinds:
        raise unknown_name_error("--task", task, sorted(kinds))
    return kinds[task]


def published(
    model: RealModel,
    lossy: str,
    *,
    resident: float | None = None,
    changed: float | None = None,
    task: str = GENERATE,
) -> list[dict[str, Any]]:
    """Return what a lossy rule was published to lose, and loses here: a report a class of rule.

    Args:
        model: The model asked about; nearest are those of as many experts and as many a token.
        lossy: A class of rule (`prune`), an algorithm (`cache_prior`) or a composition.
        resident: The share of its experts in memory.
        changed: The share of experts removed, or of executed experts changed, where known.
        task: A published task (`gsm8k`), or its kind (`generate`, `choice`).
    """
    kind = kind_of(task)
    return [_of_rule(model, rule, lossy, resident, changed, task, kind) for rule in rules_of(lossy)]


def _of_rule(
    model: RealModel,
    rule: str,
    lossy: str,
    resident: float | None,
    changed: float | None,
    task: str,
    kind: str,
) -> dict[str, Any]:
    rows = [row for row in shipped() if row.is_share]
    alike = [row for row in rows if row.rule == rule and row.kind == kind]
    # Rules of a cache have their amount by what is resident, the others by what is changed.
    by_resident = any(row.share is None and row.resident is not None for row in alike)
    asked = amount(changed, resident if by_resident else None)
    asked = asked if any(row.amount == asked for row in alike) else ""
    chosen = [row for row in alike if asked and row.amount == asked]
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
    report: dict[str, Any] = {
        "rule": rule,
        "words": RULES[rule],
        "lossy": lossy,
        "model": model.name,
        "task": task,
        "kind": kind,
        "amount": asked,
        "score": before,
        "forecast": None,
        "judged": next(
            (row for row in judged()["rules"] if (row["rule"], row["kind"]) == (rule, kind)), None
        ),
        "nearest": nearest[:3],
        "here": _own(rule, lossy, kind),
        "noise_points": NOISE,
    }
    if found is not None:
        middle, least, most = found.points(before)
        report["forecast"] = {
            "points": middle,
            "least": least,
            "most": most,
            "rows": found.rows,
            "models": found.models,
            "of": found.of,
        }
    return report


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


def _own(rule: str, lossy: str, kind: str) -> list[dict[str, Any]]:
    """Return our own losses under a rule: of the one asked for by name, or else of its class."""
    rows = [row for row in here() if row["class"] == rule and row["kind"] == kind]
    named = [row for row in rows if lossy in re.split(r"[ =]", row["rule"])]
    return named or rows


@cache
def here() -> tuple[dict[str, Any], ...]:
    """Return what the shipped model and the carved one lose under each rule here.

    From results/published_losses/here.csv: `model`, `rule`, `class`, `task`, `kind`, `capacity`,
    `changed` (the share of the router's choices not executed), `documents`, `right` (a share), and
    `points` lost to the lossless run of the same documents.
    """
    path = shipped_dir("results/published_losses") / "here.csv"
    table = csv.DictReader(io.StringIO(read_text(path, str(path))))
    numbers = {"documents": int, "changed": float, "right": float, "points": float}
    return tuple(
        {name: numbers.get(name, str)(cell) for name, cell in row.items()} for row in table
    )
