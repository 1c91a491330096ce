"""How `moecache replay` prints its runs: as JSON and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.report.columns import MEGABYTE
from lm_eval_moecache.report.replay_sweep import BELADY, LRU, Row

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
                "metrics": row.metrics,
                **{
                    f"{name}_{phase}miss_rate": row.bounds.get(phase, {}).get(name)
                    for phase in PHASES_SHOWN
                    for name in (LRU, BELADY)
                },
                "closeness": row.closeness,
                "warnings": list(row.warnings),
            }
            for row in rows
        ]
    }


def as_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table, one row per replay; what all rows share stands above it."""
    by_policy = len({_policy(row) for row in rows}) > 1
    by_hardware = len({_hardware(row) for row in rows}) > 1
    writer = MarkdownTableWriter()
    writer.headers = [
        "Trace",
        *(["Policy"] if by_policy else []),
        *(["Hardware"] if by_hardware else []),
        "Capacity",
        "Cycles",
        "MB",
        "Hit",
        "Miss",
        "LRU",
        "Belady",
        "Closeness",
        "Decode miss",
        "LRU",
        "Belady",
        "MB read",
        "TPOT ms",
        "Stall ms/tok",
        "Transfer/layer",
        "Bound",
    ]
    writer.value_matrix = [
        [
            Path(row.trace).name,
            *([row.policy.name] if by_policy else []),
            *([_hardware(row)] if by_hardware else []),
            *_cells(row),
        ]
        for row in rows
    ]
    return "\n".join([_title(rows, by_policy, by_hardware), writer.dumps(), *_notes(rows)])


def _title(rows: Sequence[Row], by_policy: bool, by_hardware: bool) -> str:
    title = "moecache replay"
    title += "" if by_policy else f" ({_policy(rows[0])})"
    title += f", layers charged as: {rows[0].emulates}" if rows[0].emulates else ""
    title += f", warmed by: {rows[0].warmed_by}" if rows[0].warmed_by else ""
    return title + ("" if by_hardware else f", hardware: {_hardware(rows[0])}")


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.open_loop for row in rows):
        notes.append("open loop: the policy changes routing, and hidden states do not follow.")
    if not all(row.has_sizes for row in rows):
        notes.append("No bytes and no times where the trace says no expert size: --expert_bytes.")
    notes += dict.fromkeys(f"Warning: {text}" for row in rows for text in row.warnings)
    if any(row.bounds for row in rows):
        notes.append("LRU and Belady: on demand; Belady's are the fewest misses of that column.")
    return notes


def _policy(row: Row) -> str:
    policy = row.policy
    axes = (policy.routing, policy.prefetch, policy.eviction, policy.miss)
    return f"{policy.name}: {' + '.join(axis.name for axis in axes)}"


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


def _cells(row: Row) -> list[str]:
    metrics = row.metrics
    tpot = metrics.get("tpot_ms")
    sized, regime = row.has_sizes, row.regime or {}
    return [
        row.capacity.text,
        _number(row.cycles, "{:.2f}"),
        _number(row.capacity.total_bytes / MEGABYTE if sized else None, "{:.1f}"),
        _number(metrics["hit_rate"], "{:.4f}"),
        *_rates(row, ""),
        _number(row.closeness, "{:.3f}"),
        *_rates(row, "decode_"),
        _number(metrics["bytes_moved"] / MEGABYTE if sized else None, "{:.1f}"),
        _number(tpot["mean"] if tpot and sized else None, "{:.3f}"),
        _number(metrics["stall_ms_per_token"] if sized else None, "{:.3f}"),
        _number(regime.get("transfer_per_layer"), "{:.3g}"),
        regime.get("bound", ""),
    ]


def _rates(row: Row, phase: str) -> list[str]:
    """The policy's misses, and beside them what LRU has and the fewest there can be."""
    bounds = row.bounds.get(phase, {})
    rates = (row.metrics[f"{phase}miss_rate"], bounds.get(LRU), bounds.get(BELADY))
    return [_number(rate, "{:.4f}") for rate in rates]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
