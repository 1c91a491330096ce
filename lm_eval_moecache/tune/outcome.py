"""What a search has found: its Pareto front, and the best policy within the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.numbers import unknown
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import Column, Value
from lm_eval_moecache.report.tables import Table, as_markdown

SHIPPED, SEARCHED = "shipped", "searched"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One measured policy: a shipped composition or a trial of the search."""

    name: str
    kind: str
    policy: Mapping[str, Any]
    accuracy: float
    stderr: float | None
    speed: float
    measured_by: str
    within_budget: bool

    def as_dict(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that was measured; `best` is the fastest within the budget, shipped or searched."""

    question: Mapping[str, Any]
    floor: float
    entries: tuple[Entry, ...]
    left_out: Mapping[str, str]
    counts: Mapping[str, int]
    confirmation: Mapping[str, Any] | None = None
    """What the best does on documents that the search has not seen."""

    @property
    def sign(self) -> int:
        return 1 if METRICS[self.question["metric"]][2] else -1

    def fastest(self, kind: str | None = None) -> Entry | None:
        """Return the fastest entry within the budget; of equals the more accurate, the earlier."""
        chosen = [e for e in self.entries if e.within_budget and kind in (None, e.kind)]
        return max(chosen, key=lambda e: (self.sign * e.speed, e.accuracy), default=None)

    @property
    def front(self) -> list[Entry]:
        """The entries that none beats in both accuracy and speed, the fastest first."""
        found: dict[tuple[float, float], Entry] = {}
        for entry in self.entries:
            place = (entry.accuracy, self.sign * entry.speed)
            others = [(e.accuracy, self.sign * e.speed) for e in self.entries]
            if not any(a >= place[0] and s >= place[1] and (a, s) != place for a, s in others):
                found.setdefault(place, entry)
        return sorted(found.values(), key=lambda e: -self.sign * e.speed)

    @property
    def verdict(self) -> str:
        """One sentence: whether the search beats every shipped composition within the budget."""
        metric = self.question["metric"]
        shipped, best = self.fastest(SHIPPED), self.fastest()
        if best is None:
            return "No policy met the budget."
        told = f"{best.name} ({metric} {best.speed:.1f}, accuracy {best.accuracy:.3f})"
        if shipped is None:
            return f"{told} meets the budget; no shipped composition does."
        other = f"{shipped.name} ({shipped.speed:.1f})"
        if best.kind == SHIPPED:
            return f"None was found faster than the shipped {told}, which meets the budget."
        return f"{told} is faster than every shipped composition that meets the budget: {other}."

    def as_dict(self) -> dict[str, Any]:
        best = self.fastest()
        return {
            "question": dict(self.question),
            "floor": self.floor,
            "verdict": self.verdict,
            "best": best and best.as_dict(),
            "front": [e.as_dict() for e in self.front],
            "shipped": [e.as_dict() for e in self.entries if e.kind == SHIPPED],
            "left_out": dict(self.left_out),
            "trials": dict(self.counts),
            "confirmation": self.confirmation and dict(self.confirmation),
        }


def read_outcome(study: Any, floor: float) -> Outcome:
    """Collect what a study holds."""
    entries, left_out, counts = [], {}, Counter[str]()
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        composition = attributes.get("composition")
        if composition is None:
            counts[trial.state.name.lower()] += 1
        if "figures" in attributes:
            figures = attributes["figures"]
            entry = Entry(
                name=composition or f"trial {trial.number}",
                kind=attributes["kind"],
                policy=attributes["policy"],
                within_budget=figures["accuracy"] >= floor,
                **figures,
            )
            entries.append(entry)
        elif composition is not None:
            left_out[composition] = attributes["reason"]
    measured = {entry.name for entry in entries}
    return Outcome(
        question=study.user_attrs["question"],
        floor=floor,
        entries=tuple(entries),
        left_out={name: why for name, why in left_out.items() if name not in measured},
        counts=counts,
    )


def confirmation_text(name: str, found: Mapping[str, Any] | None) -> str:
    """Return one sentence for the tables."""
    if found is None:
        return "Not confirmed: the search has seen all documents. Give --limit to keep some."
    count = sum(found["documents"].values())
    verdict = "within" if found["within_budget"] else "beyond"
    return (
        f"On {count} other documents {name} loses {found['points_lost']:.2f} points (accuracy "
        f"{found['accuracy']:.3f} against {found['reference_accuracy']:.3f}), {verdict} the "
        f"budget, at {found['speed']:.1f} against {found['reference_speed']:.1f}."
    )


def front_table(found: Mapping[str, Any]) -> str:
    """Return front, shipped compositions and verdict as Markdown, from `Outcome.as_dict`."""
    metric = found["question"]["metric"]
    if metric not in METRICS:
        raise unknown("question.metric", metric, METRICS)
    heading, decimals, higher, *_ = METRICS[metric]
    speed = Column(metric, heading, decimals, None, True)
    shipped = sorted(found["shipped"], key=lambda e: -e["speed"] if higher else e["speed"])
    tables = [
        _table("Pareto front", found["front"], speed),
        _table("Shipped compositions", shipped, speed),
    ]
    lines = [as_markdown(tables), found["verdict"]]
    if found["best"] is not None and "confirmation" in found:
        lines.append(confirmation_text(found["best"]["name"], found["confirmation"]))
    lines += [f"Left out: {name}: {reason}" for name, reason in found["left_out"].items()]
    return "\n".join(lines) + "\n"


def _table(title: str, entries: Sequence[Mapping[str, Any]], speed: Column) -> Table:
    columns = (
        Column("name", "Policy"),
        Column("composition", "Composition"),
        Column("accuracy", "Accuracy", 3, None, True),
        speed,
        Column("measured_by", "Measured by"),
        Column("within_budget", "Within budget"),
    )
    rows = tuple(
        (
            Value(e["name"]),
            Value(composition_text(e["policy"])),
            Value(e["accuracy"], e["stderr"]),
            Value(e["speed"]),
            Value(e["measured_by"]),
            Value("yes" if e["within_budget"] else "no"),
        )
        for e in entries
    )
    return Table(title, columns, rows)


def composition_text(policy: Mapping[str, Any]) -> str:
    """`standard + next_gate(depth=2) + lru + fetch`: algorithms with their parameters."""
    texts = []
    for choice in (policy[axis] for axis in AXES):
        given = {k: v for k, v in choice.items() if k not in ("name", "class_path")}
        shown = [
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in given.items()
            if value is not None
        ]
        name = str(choice.get("name", choice.get("class_path")))
        texts.append(f"{name}({', '.join(shown)})" if shown else name)
    return " + ".join(texts)


def policy_yaml(entry: Entry, outcome: Outcome) -> str:
    """Write an entry as a policy file: `policy=PATH` runs it, its name is `tuned`."""
    question = outcome.question
    place = ", ".join(f"{k}={question[k]}" for k in ("pretrained", "capacity", "hardware"))
    policy: dict[str, Any] = {
        "name": "tuned",
        "source": f"moecache tune: {entry.name} on {place}",
        "phases": entry.policy["phases"],
    }
    for axis in AXES:
        policy[axis] = {k: v for k, v in entry.policy[axis].items() if v is not None}
    head = (
        f"# {question['metric']} {entry.speed:.1f} at accuracy {entry.accuracy:.3f} on "
        f"{', '.join(question['tasks'])}; budget {question['budget']:g} points.\n"
    )
    return head + yaml.safe_dump(policy, sort_keys=False)
