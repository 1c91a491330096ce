"""What runtimes count themselves, held against a replay: hits, misses and bytes of their caches.

A file of counts is a runtime's log, or what it prints or writes at the end of a run.
`counters.yaml` has the lines by which each is known; BigMoeOnEdge writes a CSV with a row per
decoded token instead.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import lines_of, read_text
from lm_eval_moecache.trace.trace import Trace
from moecache_plan.data import data

MOST_BYTES = 1 << 30
ALL = "all"
"""Passes that a runtime counts: these, or `DECODE` alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a runtime says of one run; None for what it does not say."""

    writer: str
    phase: str
    hit_rate: float
    hits: float | None = None
    """Lookups of whole experts that found them resident."""
    misses: float | None = None
    bytes_moved: int | None = None
    steps: int | None = None
    """Decode steps."""
    oracle_hit_rate: float | None = None
    """Share of the decode lookups that go to each layer's most used experts, as many as fit."""
    slots_per_layer: float | None = None
    """Experts that fit, over layers."""
    has_layer_caches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A runtime's lines: each match of `line` holds counts, and matches add up."""

    line: str
    """With the groups `hits` and `misses`, perhaps `bytes`; or `steps`, `rate` and `active`."""
    phase: str = ALL
    keys: int = 1
    """Lookups per expert: 3 where gate, up and down are cached each on its own."""
    last: bool = False
    """Matches are snapshots of running counts: the last one holds."""
    slots: str = ""
    """How the log states the slots of a layer, in keys."""
    has_layer_caches: bool = False
    oracle: str = ""


FORMS = {writer: Form(**fields) for writer, fields in data("counters").items()}
_TABLE = "BigMoeOnEdge"
_HIT, _READ = "cache_hit_pct", "read_bytes"


def read_counts(file: str) -> Counts:
    """Read a runtime's counts. Raises ValueError for a file that no form fits."""
    label = f"counts={file!r}"
    text = read_text(file, label, MOST_BYTES)
    for writer, form in FORMS.items():
        if matches := list(re.finditer(form.line, text)):
            return _of_lines(label, writer, form, matches, text)
    lines = [line for line in lines_of(text) if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    if rows and _HIT in rows[0]:
        return _of_table(label, rows)
    raise ValueError(
        f"{label} has no counts that are known. Allowed: the log or the statistics of "
        f"{', '.join(FORMS)}, or {_TABLE}'s CSV with {_HIT} and {_READ} (docs/how.md)."
    )


def _of_lines(
    label: str, writer: str, form: Form, matches: Sequence[re.Match[str]], text: str
) -> Counts:
    found = [match.groupdict() for match in (matches[-1:] if form.last else matches)]
    slots, oracle = (_last_number(part, text) for part in (form.slots, form.oracle))
    counts = Counts(
        writer=writer,
        phase=form.phase,
        hit_rate=0.0,
        oracle_hit_rate=oracle,
        slots_per_layer=None if slots is None else slots / form.keys,
        has_layer_caches=form.has_layer_caches,
    )
    if "steps" in found[0]:
        steps = [int(row["steps"]) for row in found]
        lookups = [n * float(row["active"]) for n, row in zip(steps, found, strict=True)]
        missed = sum(n * float(row["rate"]) for n, row in zip(lookups, found, strict=True))
        if not sum(lookups):
            raise ValueError(f"{label}: {writer} counted no lookup.")
        return replace(counts, hit_rate=1 - missed / sum(lookups), steps=sum(steps))
    hits, misses = (sum(int(row[key]) for row in found) / form.keys for key in ("hits", "misses"))
    if not hits + misses:
        raise ValueError(f"{label}: {writer} counted no lookup.")
    moved = [int(row["bytes"]) for row in found if row.get("bytes")]
    return replace(
        counts,
        hit_rate=hits / (hits + misses),
        hits=hits,
        misses=misses,
        bytes_moved=sum(moved) if moved else None,
    )


def _last_number(pattern: str, text: str) -> float | None:
    numbers = re.findall(pattern, text) if pattern else []
    return float(numbers[-1]) if numbers else None


def _of_table(label: str, rows: Sequence[Mapping[str, str]]) -> Counts:
    """Read BigMoeOnEdge's rows: the hit rate runs from the start of the run, prefill included."""
    try:
        rate = float(rows[-1][_HIT]) / 100
        moved = sum(int(row[_READ]) for row in rows) if _READ in rows[0] else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label}: {_HIT} and {_READ} must be numbers: {error}.") from None
    if rate < 0:
        raise ValueError(f"{label}: {_HIT} is below 0: the run had no cache.")
    return Counts(writer=_TABLE, phase=ALL, hit_rate=rate, bytes_moved=moved, steps=len(rows))


def replayed(trace: Trace, setting: Setting, counts: Counts) -> dict[str, float]:
    """Replay a routing; return the metrics of the passes that the runtime counts, by its names.

    Bytes of BigMoeOnEdge's table are those of its rows, decoded tokens.
    """
    passes = replay(trace, setting, cache_reset="never").ledger.passes
    decoded = [record for record in passes if record.phase != PREFILL]
    counted = decoded if counts.phase == DECODE else passes
    requests = sum(record.requests for record in counted)
    if not requests:
        raise ValueError(f"trace {trace.name} has no decoded token to compare.")
    hits = sum(record.hits for record in counted)
    moving = decoded if counts.writer == _TABLE else counted
    return {
        "hit_rate": hits / requests,
        "hits": hits,
        "misses": requests - hits,
        "bytes_moved": sum(record.bytes_moved for record in moving),
        "steps": len(decoded),
        "oracle_hit_rate": _oracle_hit_rate(trace, setting),
    }


def _oracle_hit_rate(trace: Trace, setting: Setting) -> float:
    """Return the share of decode lookups to each layer's most used experts, a mean over layers.

    As many as fit into a layer's share of the capacity, a part of an expert by interpolation.
    """
    geometry, columns = trace.geometry, trace.columns
    rows = columns.phase == PHASES.index(DECODE)
    shape = geometry.num_layers, geometry.num_experts
    keys = columns.experts[rows].astype(np.int64) + columns.layer[rows, None] * shape[1]
    uses = np.bincount(keys[keys >= 0].ravel(), minlength=shape[0] * shape[1]).reshape(shape)
    covered = np.cumsum(-np.sort(-uses, axis=1), axis=1) / np.maximum(uses.sum(1), 1)[:, None]
    slots = slots_per_layer(setting.capacity.total_bytes, geometry)
    return float(np.mean([np.interp(slots, range(shape[1] + 1), [0, *layer]) for layer in covered]))


def slots_per_layer(capacity_bytes: int, geometry: Any) -> float:
    """Return how many of a layer's experts fit, if the layers share alike."""
    return float(capacity_bytes * geometry.num_experts / geometry.total_expert_bytes)


_ROWS: Mapping[str, tuple[str, str]] = {
    "hit_rate": ("hit rate", ".1%"),
    "hits": ("hits", ",.0f"),
    "misses": ("misses", ",.0f"),
    "bytes_moved": ("bytes moved", ",.0f"),
    "steps": ("decode steps", ",.0f"),
    "oracle_hit_rate": ("static oracle", ".1%"),
}
"""Figure -> its words in a table, and its format."""


def side_by_side(counts: Counts, ours: Mapping[str, float], **about: Any) -> dict[str, Any]:
    """Return what was counted and what was replayed, as JSON data.

    `hit_rate_difference` is replayed - counted, a share.
    """
    said = {name: getattr(counts, name) for name in _ROWS}
    return {
        "writer": counts.writer,
        "passes": counts.phase,
        "counted": {name: value for name, value in said.items() if value is not None},
        "replayed": {name: ours[name] for name, value in said.items() if value is not None},
        "hit_rate_difference": ours["hit_rate"] - counts.hit_rate,
        **about,
    }


def as_text(result: Mapping[str, Any]) -> str:
    """Return the comparison as a table, with what it may be used for."""
    lines = [f"{'':14s} {result['writer']:>18s} {'replayed':>18s}"]
    for name, value in result["counted"].items():
        words, form = _ROWS[name]
        lines.append(f"{words:14s} {value:>18{form}} {result['replayed'][name]:>18{form}}")
    points = 100 * result["hit_rate_difference"]
    return "\n".join([*lines, f"replayed - counted: {points:+.1f} points of hit rate", ""])
