"""How `moecache replay` prints its runs: as JSON and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.report.replay_sweep import BELADY, LRU, Row


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
                "metrics": row.metrics,
                "lru_miss_rate": row.bounds.get(LRU),
                "belady_miss_rate": row.bounds.get(BELADY),
                "closeness": row.closeness,
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
        "MiB",
        "Hit",
        "Miss",
        "Decode miss",
        "LRU miss",
        "Belady miss",
        "Closeness",
        "MiB read",
        "TPOT ms",
        "Stall ms/tok",
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
    title = "moecache replay"
    title += "" if by_policy else f" ({_policy(rows[0])})"
    title += "" if by_hardware else f", hardware: {_hardware(rows[0])}"
    notes = []
    if any(row.open_loop for row in rows):
        notes.append("open loop: the policy changes routing, and hidden states do not follow.")
    if not all(row.has_sizes for row in rows):
        notes.append("No bytes and no times where the trace says no expert size: --expert_bytes.")
    return "\n".join([title, writer.dumps(), *notes])


def _policy(row: Row) -> str:
    policy = row.policy
    axes = (policy.routing, policy.prefetch, policy.eviction, policy.miss)
    return f"{policy.name}: {' + '.join(axis.name for axis in axes)}"


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


def _cells(row: Row) -> list[str]:
    metrics = row.metrics
    tpot = metrics.get("tpot_ms")
    sized = row.has_sizes
    return [
        row.capacity.text,
        _number(row.capacity.total_bytes / 2**20 if sized else None, "{:.1f}"),
        _number(metrics["hit_rate"], "{:.4f}"),
        _number(metrics["miss_rate"], "{:.4f}"),
        _number(metrics["decode_miss_rate"], "{:.4f}"),
        _number(row.bounds.get(LRU), "{:.4f}"),
        _number(row.bounds.get(BELADY), "{:.4f}"),
        _number(row.closeness, "{:.3f}"),
        _number(metrics["bytes_moved"] / 2**20 if sized else None, "{:.1f}"),
        _number(tpot["mean"] if tpot and sized else None, "{:.3f}"),
        _number(metrics["stall_ms_per_token"] if sized else None, "{:.3f}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
