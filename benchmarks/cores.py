"""Whether a processor's cores determine how fast it decodes: forms with them, one machine left out.

    python benchmarks/cores.py

Of the rows of results/runtimes/rows.csv that a processor alone computes and whose cores are said.
Each form is fitted to the other machines' rows, and held to the shipped constants as `fit` does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from lm_eval_moecache.report.tables.text import padded
from moecache_plan.mechanisms import PROCESSOR, mechanisms
from moecache_plan.published import Row, read_rows

ROWS = Path(__file__).resolve().parent.parent / "results" / "runtimes" / "rows.csv"
HELD, ROBUST = 0.3, 0.1
PARTS = ("host_share", "host_layer_us", "host_state_us", "host_attention_us")
Parts = tuple[float, float, float, float]
"""Seconds that memory takes, and those of layers, of states and of attention."""


def parts(row: Row, point: Any) -> Parts:
    work = row.work(row.placed())
    us = [1e-6 * value for value in point[1:4]]
    layers, state = us[0] * work.host_layer, us[1] * work.host_state
    return work.host / point[0], layers, state, us[2] * work.host_attention


def gflop(row: Row) -> float:
    """Return the GFLOP of a token's weights."""
    model = row.model
    layer = model.top_k * model.expert_weights + model.layer_weights
    return 2e-9 * (model.num_layers * layer + model.read_once)


def gigabytes(row: Row) -> float:
    return 1e-9 * row.work(row.placed()).host * (row.machine.host_rate(row.runtime) or 0.0)


def cores(row: Row) -> int:
    return row.machine.cores or 1


Form = Callable[[Row, Parts, float], float]
FORMS: dict[str, tuple[Form, float]] = {
    "without cores": (lambda row, p, x: sum(p), 1.0),
    "and FLOP over cores": (lambda row, p, x: sum(p) + gflop(row) / (x * cores(row)), 100.0),
    "and bytes over cores": (lambda row, p, x: sum(p) + gigabytes(row) / (x * cores(row)), 20.0),
    "memory or bytes over cores, whichever is slower": (
        lambda row, p, x: max(p[0], gigabytes(row) / (x * cores(row))) + sum(p[1:]),
        8.0,
    ),
    "memory or FLOP over cores, whichever is slower": (
        lambda row, p, x: max(p[0], gflop(row) / (x * cores(row))) + sum(p[1:]),
        20.0,
    ),
    "states and attention over cores": (
        lambda row, p, x: p[0] + p[1] + 16 * (p[2] + p[3]) / cores(row),
        1.0,
    ),
    "layers by the root of cores": (
        lambda row, p, x: p[0] + p[1] * math.sqrt(cores(row) / 16) + p[2] + p[3],
        1.0,
    ),
}
"""Name -> seconds a token from a row, its parts and one more constant; where that begins."""


def factors(rows: list[Row], form: Form, start: float) -> list[float]:
    """Return how far off each row is by the other machines' constants."""
    begin = np.log([*(mechanisms().constants[name] for name in PARTS), start])
    machines = Counter(row.key for row in rows)

    def log_speed(point: Any, chosen: list[Row]) -> Any:
        values = np.exp(point)
        return -np.log([form(row, parts(row, values), float(values[4])) for row in chosen])

    found = []
    for key in machines:
        others, mine = ([r for r in rows if (r.key == key) == own] for own in (False, True))
        weights = np.array([machines[row.key] ** -0.25 for row in others])
        measured = np.log([row.decode or 1.0 for row in others])

        def held(point: Any, others: Any = others, w: Any = weights, m: Any = measured) -> Any:
            return np.concatenate([w * (log_speed(point, others) - m), HELD * (point - begin)])

        point = least_squares(held, begin, loss="soft_l1", f_scale=ROBUST).x
        off = log_speed(point, mine) - np.log([row.decode or 1.0 for row in mine])
        found += np.exp(np.abs(off)).tolist()
    return found


def main() -> None:
    rows, _ = read_rows(ROWS)
    rows = [r for r in rows if r.placed().group == PROCESSOR and r.decode and r.machine.cores]
    lines = []
    for name, (form, start) in FORMS.items():
        off = factors(rows, form, start)
        shares = [f"{sum(each <= most for each in off) / len(off):.0%}" for most in (1.25, 1.5)]
        lines.append((name, len(off), f"{median(off):.2f}", *shares, f"{max(off):.1f}"))
    print(padded(("seconds a token", "rows", "median factor", "1.25", "1.5", "worst"), lines))


if __name__ == "__main__":
    main()
