"""How `moecache replay` prints its runs: as JSON and as a Markdown table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.replay_sweep import FEWEST, LRU, Row

PHASES_SHOWN = ("", "decode_")


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the form that `--json` prints."""
    return {
        "runs": [
            {
                "trace": row.trace,
                "policy": row.policy.name,
                "eviction": row.policy.eviction.name,
                "composition": row.policy.as_dict(),
                "open_loop": row.open_loop,
                "capacity": row.capacity.text,
                "capacity_bytes": row.capacity.total_bytes,
                "hardware": row.hardware.name,
                "link_bytes_per_s": row.hardware.link_bytes_per_s,
                # Where the trace says no sizes, each expert counts one byte.
                "has_sizes": row.has_sizes,
                "emulate": row.emulates or None,
                "warm": row.warmed_by or None,
                "regime": row.regime,
                "compiled": not row.uncompiled,
                "uncompiled_because": row.uncompiled or None,
                "metrics": row.metrics,
                **{
                    f"{name}_{phase}miss_rate": row.bounds.get(phase, {}).get(name)
                    for phase in PHASES_SHOWN
                    for name in (LRU, FEWEST)
                },
                "closeness": row.closeness,
                "warnings": list(row.warnings),
            }
            for row in rows
        ]
    }


def as_table(rows: Sequence[Row], in_full: bool = False) -> str:
    """Return a Markdown table, one row per replay; what all rows share stands above it.

    Short, it fits a terminal; in full, it has every column.
    """
    names: dict[str, Callable[[Row], str]] = {
        "Trace": lambda row: Path(row.trace).name,
        "Policy": lambda row: row.policy.name,
        "Hardware": _hardware,
    }
    varying = {k: of for k, of in names.items() if in_full or len({of(row) for row in rows}) > 1}
    short = [k for k in _SHORT if k != "Fewest" or any(row.bounds for row in rows)]
    columns = {**varying, **(_COLUMNS if in_full else {k: _COLUMNS[k] for k in short})}
    writer = MarkdownTableWriter()
    writer.headers = list(columns)
    writer.value_matrix = [[of(row) for of in columns.values()] for row in rows]
    width = max(shutil.get_terminal_size((80, 24)).columns, 40)
    title = textwrap.wrap(_title(rows, varying), width)
    return "\n".join([*title, writer.dumps(), *_notes(rows)])


def _title(rows: Sequence[Row], varying: Collection[str]) -> str:
    """Name what all rows share."""
    first = rows[0]
    parts = [
        *([] if "Trace" in varying else [Path(first.trace).name]),
        *([] if "Policy" in varying else [_policy(first)]),
        *([f"layers charged as: {first.emulates}"] if first.emulates else []),
        *([f"warmed by: {first.warmed_by}"] if first.warmed_by else []),
        *([] if "Hardware" in varying else [f"hardware: {_hardware(first)}"]),
    ]
    return f"moecache replay ({', '.join(parts)})" if parts else "moecache replay"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.open_loop for row in rows):
        notes.append("open loop: the policy changes routing, and hidden states do not follow.")
    if not all(row.has_sizes for row in rows):
        notes.append("No bytes and no times where the trace says no expert size: --expert_bytes.")
    notes += dict.fromkeys(
        f"{row.policy.name}: replayed event by event, not compiled: {row.uncompiled}."
        for row in rows
        if row.uncompiled
    )
    notes += dict.fromkeys(f"Warning: {text}" for row in rows for text in row.warnings)
    if any(row.bounds for row in rows):
        notes.append("Fewest: no eviction on demand misses less (Belady, where all events fit).")
    return notes


def _policy(row: Row) -> str:
    policy = row.policy
    axes = (policy.routing, policy.prefetch, policy.eviction, policy.miss)
    return f"{policy.name}: {' + '.join(axis.name for axis in axes)}"


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


def _bound(row: Row, phase: str, name: str) -> str:
    return _number(row.bounds.get(phase, {}).get(name), "{:.4f}")


def _sized(row: Row, value: float | None, form: str) -> str:
    """Bytes and times are known where the trace says how large an expert is."""
    return _number(value if row.has_sizes else None, form)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "Capacity": lambda row: row.capacity.text,
    "Cycles": lambda row: _number(row.cycles, "{:.2f}"),
    "MB": lambda row: _sized(row, row.capacity.total_bytes / MEGABYTE, "{:.1f}"),
    "Hit": lambda row: _number(row.metrics["hit_rate"], "{:.4f}"),
    "Miss": lambda row: _number(row.metrics["miss_rate"], "{:.4f}"),
    "LRU miss": lambda row: _bound(row, "", LRU),
    "Fewest": lambda row: _bound(row, "", FEWEST),
    "Closeness": lambda row: _number(row.closeness, "{:.3f}"),
    "Decode miss": lambda row: _number(row.metrics["decode_miss_rate"], "{:.4f}"),
    "LRU decode": lambda row: _bound(row, "decode_", LRU),
    "Fewest decode": lambda row: _bound(row, "decode_", FEWEST),
    "MB read": lambda row: _sized(row, row.metrics["bytes_moved"] / MEGABYTE, "{:.1f}"),
    "TPOT ms": lambda row: _sized(row, (row.metrics.get("tpot_ms") or {}).get("mean"), "{:.3f}"),
    "tok/s": lambda row: _sized(row, row.metrics["tok_per_s"], "{:.1f}"),
    "Stall ms/tok": lambda row: _sized(row, row.metrics["stall_ms_per_token"], "{:.3f}"),
    "Transfer/layer": lambda row: _number((row.regime or {}).get("transfer_per_layer"), "{:.3g}"),
    "Bound": lambda row: str((row.regime or {}).get("bound", "")),
}
_SHORT = ("Capacity", "Miss", "Fewest", "Decode miss", "TPOT ms", "tok/s")
