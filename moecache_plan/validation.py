"""Validates the clock against a device: a replayed routing against measurements, token by token.

A measured table is a CSV with one row per decoded token, in order, and any of the `COLUMNS`;
lines that begin with # are comments. `cache_hit_pct` counts from the start of the run, prefill
included, as engines print it; a negative value means that there was no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import EXECUTIONS, TOGETHER, Setting
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.numbers import plain_number, read_count, shown, unknown_name_error
from lm_eval_moecache.records.schemas.keys import MOST_READS
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.trace import Trace

Values = NDArray[np.float64]
WALL, STALL, IO, COMPUTE, READ, HIT, MANAGEMENT = COLUMNS = (
    *("wall_ms", "stall_ms", "io_ms", "compute_ms", "read_bytes", "cache_hit_pct", "mgmt_ms"),
)
OUTLIER = 2.0
"""A token that takes this many times the median wall has stalled for reasons outside the model."""


class Ran(NamedTuple):
    """How a measured engine ran."""

    capacity: str
    policy: str = "on_demand"
    eviction: str = "lru"
    execute: str = TOGETHER
    reads_per_expert: int = 1

    def setting(self, trace: Trace, hardware: Hardware) -> Setting:
        """Return the setting that replays a trace of it on this hardware."""
        if self.execute not in EXECUTIONS:
            raise unknown_name_error("execute", self.execute, EXECUTIONS)
        return Setting(
            policy=load_policy(self.policy, {"eviction": self.eviction}),
            capacity=parse_capacity(self.capacity, trace.geometry),
            hardware=hardware,
            seed=trace.seed,
            execute=self.execute,
            reads_per_expert=read_count(
                "reads_per_expert", self.reads_per_expert, least=1, most=MOST_READS
            ),
        )


def read_measured(path: Path) -> DataFrame:
    """Read a measured table: its known columns, a row a decoded token.

    ValueError for a file without any of the columns, and for a cell that is not a number.
    """
    label = f"measured={str(path)!r}"
    reader = read_csv(path, label)
    rows = list(reader)
    header = reader.fieldnames or []
    present = [name for name in COLUMNS if name in header]
    if not present or not rows:
        raise ValueError(
            f"{label} has no rows with any of the columns {', '.join(COLUMNS)}; it has "
            f"{', '.join(header) or 'none'}. Allowed: a column of one of these names."
        )
    columns = {}
    for name in present:
        values = [plain_number(row[name] or "") for row in rows]
        if None in values:
            number = values.index(None)
            cell = shown(rows[number][name])
            raise ValueError(f"{label}: row {number + 1}, {name}={cell} is not a number.")
        columns[name] = np.array(values, dtype=np.float64)
    return DataFrame(columns)


def simulate(trace: Trace, setting: Setting) -> DataFrame:
    """Replay a routing; return the series of its decoded tokens, in a measured table's units.

    `compute_ms` is the rest of the wall, as engines report it.
    """
    passes = replay(trace, setting, cache_reset="never").ledger.passes
    hits = np.cumsum([record.hits for record in passes])
    share = 100 * hits / np.cumsum([record.requests for record in passes])
    decoded = [i for i, record in enumerate(passes) if record.phase != PREFILL]
    if not decoded:
        raise ValueError(f"trace {trace.name} has no decoded token to compare.")
    rows = [(1e3 * p.duration_s, 1e3 * p.stall_s, float(p.bytes_moved)) for p in passes]
    wall, stall, read = np.array(rows)[decoded].T
    management = 1e3 * setting.hardware.load_overhead_s_per_byte * read
    columns = {WALL: wall, STALL: stall, COMPUTE: wall - stall - management, MANAGEMENT: management}
    return DataFrame({**columns, READ: read, HIT: share[decoded]})


def same_tokens(
    predicted: DataFrame, measured: DataFrame, tokens: slice = slice(None)
) -> tuple[DataFrame, DataFrame]:
    """Return these tokens of both; ValueError where they differ in length or none is left."""
    if len(predicted) != len(measured):
        raise ValueError(
            f"the trace has {len(predicted)} decoded tokens and the measured table "
            f"{len(measured)} rows: they are not of one run. Allowed: a table with one row a "
            "decoded token, in order."
        )
    part = measured.iloc[tokens]
    if not len(part):
        raise ValueError(f"tokens={tokens.start}:{tokens.stop} is none of {len(measured)} tokens.")
    return predicted.iloc[tokens], part


def closeness(predicted: DataFrame, measured: DataFrame) -> dict[str, float | int | None]:
    """Return how close the clock comes.

    Ratios are predicted / measured, None where nothing is measured. The median error is of
    |predicted - measured| / measured over the tokens measured above 0. Hit rates are shares, from
    the run's start to its last token.
    """
    shared = [name for name in measured if name in predicted]
    pairs = {name: (predicted[name].to_numpy(), measured[name].to_numpy()) for name in shared}

    def nearness(name: str) -> tuple[float | None, float | None]:
        if name not in pairs or not pairs[name][1].sum() > 0:
            return None, None
        clock, device = pairs[name]
        positive = device > 0
        errors = np.abs(clock[positive] - device[positive]) / device[positive]
        return float(clock.sum() / device.sum()), float(np.median(errors))

    varies = READ in pairs and len(measured) > 1 and all(side.std() for side in pairs[READ])
    has_cache = HIT in pairs and pairs[HIT][1][-1] >= 0
    stall, wall = nearness(STALL), nearness(WALL)
    return {
        "tokens": len(measured),
        "bytes_ratio": nearness(READ)[0],
        "bytes_correlation": float(np.corrcoef(*pairs[READ])[0, 1]) if varies else None,
        "hit_rate_difference": float(pairs[HIT][0][-1] - pairs[HIT][1][-1]) / 100
        if has_cache
        else None,
        "stall_ratio": stall[0],
        "stall_median_error": stall[1],
        "wall_ratio": wall[0],
        "wall_median_error": wall[1],
    }


def as_text(comparison: Mapping[str, Any], measured: DataFrame) -> str:
    """Return the comparison in lines that a reader can act on."""
    lines = [f"{comparison['tokens']} decoded tokens, the clock / the device:"]
    for name, key in (("bytes read", "bytes"), ("stall", "stall"), ("wall", "wall")):
        ratio, error = comparison[f"{key}_ratio"], comparison.get(f"{key}_median_error")
        if ratio is None:
            text = "not measured"
        elif error is None:
            correlation = comparison["bytes_correlation"]
            text = f"{ratio:.3f} of the total, correlation "
            text += "-" if correlation is None else f"{correlation:.4f}"
        else:
            text = f"{ratio:.3f} of the total, median error of a token {100 * error:.1f}%"
        lines.append(f"  {name:11s} {text}")
    if comparison["hit_rate_difference"] is not None:
        lines.append(f"  hit rate    {100 * comparison['hit_rate_difference']:+.2f} points")
    wall = measured.get(WALL)
    if wall is not None and (slow := int(np.sum(wall > OUTLIER * np.median(wall)))):
        lines.append(
            f"{slow} of {comparison['tokens']} tokens took more than {OUTLIER:g} times the median "
            "wall: the device's own reasons, counted and not modelled."
        )
    return "\n".join([*lines, ""])
