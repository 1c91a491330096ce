"""The outcome of a search: its Pareto front, and the best policy within the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from lm_eval_moecache.algorithms.policy import choice_text
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.metrics import METRICS, Column
from lm_eval_moecache.report.runs.run import Value
from lm_eval_moecache.report.tables.front import Sampled, keeps_score
from lm_eval_moecache.report.tables.leaderboard import Table, cells_of
from lm_eval_moecache.report.tables.text import as_markdown

SHIPPED, SEARCHED = "shipped", "searched"
NO_TURN = "no turn before the trials or the time were up; the same command continues the search"

Entry = Mapping[str, Any]
"""One measured policy: name, kind, policy, is_lossless, accuracy, stderr, speed, measured_by,
within_budget."""


def sign_of(metric: str) -> int:
    """Return 1 where more of a metric is better, else -1."""
    return 1 if METRICS[metric].higher_is_better else -1


def outcome_of(
    question: Mapping[str, Any],
    floor: float,
    entries: Sequence[Entry],
    left_out: Mapping[str, str],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Return the outcome; `best` is the fastest policy within the budget, shipped or searched.

    Ties go to the more accurate, then to the earlier. `front` holds the entries that keep their
    place against every other, as in a table (`report.tables.front.pareto_front`): one faster, shown
    more accurate, or lossless and not shown to be matched. Fastest first.
    """
    metric, sign = question["metric"], sign_of(question["metric"])
    within_budget = [e for e in entries if e["within_budget"]]

    def fastest(some: Iterable[Entry]) -> Entry | None:
        return max(some, key=lambda e: (sign * e["speed"], e["accuracy"]), default=None)

    def keeps(e: Entry, other: Entry) -> bool:
        if sign * e["speed"] > sign * other["speed"]:
            return True
        if (e["speed"], e["accuracy"]) == (other["speed"], other["accuracy"]):
            return True
        one, another = (Sampled(x["accuracy"], x["stderr"] or 0.0) for x in (e, other))
        return keeps_score(one, another, e["is_lossless"], other["is_lossless"])

    best = fastest(within_budget)
    best_shipped = fastest(e for e in within_budget if e["kind"] == SHIPPED)
    front: dict[tuple[float, float], Entry] = {}
    for e in entries:
        if all(keeps(e, other) for other in entries):
            front.setdefault((e["speed"], e["accuracy"]), e)
    return {
        "question": dict(question),
        "floor": floor,
        "verdict": _verdict(metric, best, best_shipped),
        "best": best,
        "front": sorted(front.values(), key=lambda e: -sign * float(e["speed"])),
        "shipped": [e for e in entries if e["kind"] == SHIPPED],
        "left_out": dict(left_out),
        "trials": dict(counts),
        "confirmation": None,
    }


def _verdict(metric: str, best: Entry | None, shipped: Entry | None) -> str:
    """Return one sentence on whether the search beats every shipped composition in budget."""
    if best is None:
        return "No policy met the budget."
    winner = f"{best['name']} ({metric} {best['speed']:.1f}, accuracy {best['accuracy']:.3f})"
    if shipped is None:
        return f"{winner} meets the budget; no shipped composition does."
    if best["kind"] == SHIPPED:
        return f"None was found faster than the shipped {winner}, which meets the budget."
    runner_up = f"{shipped['name']} ({shipped['speed']:.1f})"
    return f"{winner} is faster than every shipped composition that meets the budget: {runner_up}."


def read_outcome(
    study: Any, floor: float, shipped: Sequence[str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Return the outcome of a study, from its trials.

    `shipped` are the compositions that can run, `refused` says why the others cannot.
    """
    entries, counts = [], Counter[str]()
    left_out = {**refused, **dict.fromkeys(shipped, NO_TURN)}
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        composition, state = attributes.get("composition"), trial.state.name.lower()
        if state == "waiting":
            continue
        counts[state] += 1
        left_out.pop(composition, None)
        if "entry" in attributes:
            entry = attributes["entry"]
            entries.append({**entry, "within_budget": entry["accuracy"] >= floor})
        elif composition is not None:
            left_out[composition] = attributes.get("reason", state)
    return outcome_of(study.user_attrs["question"], floor, entries, left_out, counts)


def confirmation_text(name: str, confirmation: Mapping[str, Any] | None) -> str:
    """Return one sentence on the confirmation."""
    if confirmation is None:
        return "Not confirmed: the search has seen all documents. Give --limit to keep some."
    count = sum(confirmation["documents"].values())
    verdict = "within" if confirmation["within_budget"] else "beyond"
    return (
        f"On {count} other documents {name} loses {confirmation['points_lost']:.2f} points "
        f"(accuracy {confirmation['accuracy']:.3f} against "
        f"{confirmation['reference_accuracy']:.3f}), {verdict} the budget, "
        f"at {confirmation['speed']:.1f} against {confirmation['reference_speed']:.1f}."
    )


def front_table(outcome: Mapping[str, Any]) -> str:
    """Return front, shipped compositions and verdict of an outcome as Markdown."""
    metric = outcome["question"]["metric"]
    shipped = sorted(outcome["shipped"], key=lambda e: -sign_of(metric) * e["speed"])
    tables = [
        _table("Pareto front", outcome["front"], metric),
        _table("Shipped compositions", shipped, metric),
    ]
    lines = [as_markdown(tables), outcome["verdict"]]
    if outcome["best"] is not None:
        lines.append(confirmation_text(outcome["best"]["name"], outcome["confirmation"]))
    reasons: dict[str, list[str]] = {}
    for name, reason in outcome["left_out"].items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"Left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _table(title: str, entries: Sequence[Entry], metric: str) -> Table:
    speed = METRICS[metric]
    cells: Mapping[Column, Callable[[Entry], Value]] = {
        Column("name", "Policy"): lambda e: Value(e["name"]),
        Column("composition", "Composition"): lambda e: Value(composition_text(e["policy"])),
        Column("lossless", "Lossless"): lambda e: Value("yes" if e["is_lossless"] else "no"),
        Column("accuracy", "Accuracy", 3): lambda e: Value(e["accuracy"], e["stderr"]),
        Column(metric, speed.heading, speed.decimals): lambda e: Value(e["speed"]),
        Column("measured_by", "Measured by"): lambda e: Value(e["measured_by"]),
        Column("within_budget", "Within budget"): lambda e: Value(
            "yes" if e["within_budget"] else "no"
        ),
    }
    columns, rows = (*cells,), [[read(e) for read in cells.values()] for e in entries]
    return Table(title, columns, cells_of(columns, rows))


def composition_text(policy: Mapping[str, Any]) -> str:
    """Return the algorithms with parameters: `standard + next_gate(depth=2) + lru + fetch`."""
    return " + ".join(choice_text(axis, policy[axis]) for axis in AXES)


def policy_yaml(entry: Entry, question: Mapping[str, Any]) -> str:
    """Return an entry as a policy file named `tuned`, which `policy=PATH` runs."""
    place = ", ".join(f"{k}={question[k]}" for k in ("pretrained", "capacity", "hardware"))
    policy: dict[str, Any] = {
        "name": "tuned",
        "source": f"moecache tune: {entry['name']} on {place}",
        "phases": entry["policy"]["phases"],
    }
    for axis in AXES:
        policy[axis] = {k: v for k, v in entry["policy"][axis].items() if v is not None}
    head = (
        f"# {question['metric']} {entry['speed']:.1f} at accuracy {entry['accuracy']:.3f} on "
        f"{', '.join(question['tasks'])}; budget {question['budget']:g} points.\n"
    )
    return head + yaml.safe_dump(policy, sort_keys=False)
