"""Verdicts of papers' claims: each part's answer from its estimate, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import read_json, read_yaml
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.report.statistics import holm
from moecache_lab.claims.estimates import Estimate, measure, read_columns, rests_on
from moecache_lab.claims.schema import Claim, Claims, Part

HOLDS, SIZE, DEPENDS, FAILS, TOO_FEW, OPEN = VERDICTS = (
    *("holds", "direction holds, size differs", "depends on the regime", "does not hold"),
    *("undecided: too few documents", "not testable here"),
)
UNDECIDED, GATED, INSIDE, OUTSIDE = "undecided", "not testable", "inside", "outside"
"""Verdicts of parts, besides HOLDS and FAILS: the sample cannot answer, the models cannot; and of
whole runs, which no test is of."""
Chances = tuple[float, float]
"""p-values of lying inside the claimed bounds, and of lying outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A part with its estimate. `p` is the verdict's, corrected over the claim's parts."""

    part: Part
    estimate: Estimate
    model: str
    """What its runs are of."""
    gate: str
    """Why the models cannot answer it; empty where they can."""
    p: float
    verdict: str
    p_of_all: float | None = None
    """`p` corrected over all parts of all claims; None for parts that do not count, or are open."""

    @property
    def is_small(self) -> bool:
        """Whether a test has too few samples to keep its level."""
        is_tested = not self.estimate.nothing_changed
        return is_tested and any(map(self.estimate.is_small, self.part.expect.given))

    @property
    def needed(self) -> int | None:
        """How many samples it asks for (*for 80%*); None where no number decides it."""
        return self.estimate.documents_needed(self.part.expect.given)

    @property
    def is_uncounted(self) -> bool:
        """Whether a sample that cannot answer has a figure other than the claim's."""
        above, below = self.part.expect.ends
        is_open = self.verdict == UNDECIDED and not self.part.size
        return is_open and not above < self.estimate.figure < below

    def __str__(self) -> str:
        return f"{self.part.what}: {rough(self.estimate.figure)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A claim's verdict over its counted answers."""

    claim: Claim
    answers: Sequence[Answer]
    verdict: str
    told: str
    """By what the size differs, which regimes it depends on, what is undecided or not testable."""


def rough(value: float) -> str:
    """Return three significant digits, for the first screen."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:.0f}"


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
    of_all = _corrected(chances, [index for index, part in enumerate(parts) if part.counts])
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
        gate = _gate(part, model, sensitivity, root)
        answered = partial(Answer, part=part, estimate=estimate, model=model, gate=gate)
        verdict, p, p_of_all = _judged(part, estimate, own, overall, claims.alpha)
        if gate and verdict not in (INSIDE, OUTSIDE):
            verdict, p_of_all = GATED, None
        answers[claim.id].append(answered(verdict=verdict, p=p, p_of_all=p_of_all))
    return [_verdict(claim, answers[claim.id]) for claim in claims.claims]


def _gate(part: Part, model: str, sensitivity: Mapping[str, Any], root: Path) -> str:
    """Return what the model lacks that the claim supposes; empty where it lacks nothing.

    That is the part's premise, and that random experts throughout lose at least the paper's loss.

    `sensitivity`: model -> `text`, nats that each change adds, and `right`, by task and change the
    percentages of right answers.
    """
    premise = part.premise
    if premise is not None:
        (column,) = read_columns(root, premise.file, [premise.column])
        if (found := float(column.mean())) < premise.least:
            return f"{premise.what} is {rough(found)}: {premise.why}"
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


def _chances(estimate: Estimate, part: Part) -> Chances:
    """Return the chances of this figure if the truth lay outside the bounds, and inside them."""
    expect, inside, outside = part.expect, [], []
    if expect.above is not None:
        inside.append(estimate.p_above(expect.above))
        outside.append(estimate.p_below(expect.above))
    if expect.below is not None:
        inside.append(estimate.p_below(expect.below))
        outside.append(estimate.p_above(expect.below))
    return max(inside), min(1.0, min(outside) * len(outside))


def _corrected(chances: Sequence[Chances], places: Sequence[int]) -> list[Chances]:
    """Return the chances, those at `places` with Holm's correction."""
    corrected = list(chances)
    sides = [holm([chances[index][side] for index in places]) for side in (0, 1)]
    for index, inside, outside in zip(places, *sides, strict=True):
        corrected[index] = inside, outside
    return corrected


def _judged(
    part: Part, estimate: Estimate, chances: Chances, of_all: Chances, alpha: float
) -> tuple[str, float, float | None]:
    """Return an estimate's verdict by its corrected chances, and its p: in its claim, in all."""
    above, below = part.expect.ends
    lies_inside = above < estimate.figure < below
    if part.whole:
        return INSIDE if lies_inside else OUTSIDE, 1.0, None
    if estimate.nothing_changed and not lies_inside:
        return FAILS, 1.0, None
    (inside, outside), overall = chances, of_all if part.counts else (None, None)
    if inside <= alpha and above < estimate.low and estimate.high < below:
        return HOLDS, inside, overall[0]
    if outside <= alpha and (estimate.high < above or estimate.low > below):
        return FAILS, outside, overall[1]
    return UNDECIDED, min(inside, outside), None


def _verdict(claim: Claim, answers: Sequence[Answer]) -> Verdict:
    """Return a claim's verdict: by regime all that shows a direction has to hold, then sizes."""
    verdict, told = _of_regimes([answer for answer in answers if not answer.part.aside])
    if claim.untestable is not None:
        verdict, told = OPEN, claim.untestable
    return Verdict(claim=claim, answers=answers, verdict=verdict, told=told)


def _of_regimes(counted: Sequence[Answer]) -> tuple[str, str]:
    by_regime: dict[str, list[Answer]] = {}
    for answer in counted:
        by_regime.setdefault(answer.part.regime, []).append(answer)
    names: dict[str, list[str]] = {HOLDS: [], FAILS: [], UNDECIDED: [], GATED: []}
    for regime, parts in by_regime.items():
        names[_direction(parts)].append(regime)
    gates = dict.fromkeys(a.gate for a in counted if a.gate and a.part.regime in names[GATED])
    undecided = [answer for answer in counted if answer.verdict == UNDECIDED]
    if not names[HOLDS]:
        if names[FAILS]:
            failing = (a for a in counted if a.verdict == FAILS and not a.part.size)
            return FAILS, ", ".join(a.part.what for a in failing)
        if names[UNDECIDED]:
            return TOO_FEW, "; ".join([_what_is_asked(undecided), *gates])
        return OPEN, "; ".join(gates) or "no part of it counts"
    sizes = [
        a for a in counted if a.part.size and a.verdict == FAILS and a.part.regime in names[HOLDS]
    ]
    told = list(map(str, sizes))
    if names[FAILS] or names[UNDECIDED] or names[GATED]:
        split = [f"{word}: {' / '.join(each)}" for word, each in names.items() if each]
        sized = [f"size differs: {', '.join(told)}"] if told else []
        return DEPENDS, "; ".join([*split, *gates, *sized])
    told += [f"{UNDECIDED}: {', '.join(a.part.what for a in undecided)}"] if undecided else []
    return SIZE if sizes else HOLDS, "; ".join(told)


def _what_is_asked(undecided: Sequence[Answer]) -> str:
    """Return the figures that these samples leave undecided, and the most documents one asks for.

    A figure at its bound asks for no number.
    """
    asked = [answer.needed for answer in undecided if answer.needed is not None]
    without = len(undecided) - len(asked)
    most = [f"the largest asks for {max(asked):,} documents"] if asked else []
    none = [f"no number decides {without} of {len(undecided)}"] if without else []
    return "; ".join([", ".join(map(str, undecided)), ", ".join([*most, *none])])


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
    return HOLDS if HOLDS in words and not any(a.is_uncounted for a in asked) else UNDECIDED
